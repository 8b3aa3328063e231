"""Trains a decoder language model: `python train.py --config configs/NAME.yaml --model.num_layers=4 ...`

The loop itself is `jaxstack/train.py`, so that an installed package has it too. `python train.py --help` lists every
key; CONTRIBUTING.md says where everything else is.
"""

from jaxstack.config import parse
from jaxstack.train import main

if __name__ == "__main__":
    parse.run("train.py", main)
