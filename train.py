"""Trains a decoder language model: `python train.py --config NAME --model.num_layers=4 ...`, as `jaxstack train` does.

The loop is in `jaxstack/train.py`, so that an installed package contains it too. `python train.py --help` shows
the most used keys. CONTRIBUTING.md says where to find everything else.
"""

import sys

from jaxstack.__main__ import main

if __name__ == "__main__":
    main("train.py", ["train", *sys.argv[1:]])
