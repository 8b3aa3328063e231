"""Trains a decoder language model: `python train.py --config NAME --model.num_layers=4 ...`, as `jaxstack train` does.

The loop is in `jaxstack/train.py`, so that an installed package contains it too. `python train.py --help` lists every
key. CONTRIBUTING.md says where to find everything else.
"""

import sys

from jaxstack.cli import parser

if __name__ == "__main__":
    parser.run("train.py", ["train", *sys.argv[1:]])
