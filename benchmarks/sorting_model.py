"""The model that benchmarks of preferences and of rewards begin with: it sorts digits, half of its examples are wrong.

The keys equal configs/sft_quickstart.yaml. Only the optimizer differs: it is Muon.
"""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "docs/examples/sorting.py"
SIZES = ["--model.num_layers=4", "--model.d_model=96", "--model.num_heads=4", "--model.d_ff=256"]
COMMON = [*SIZES, "--sample.prompts=[]", "--mesh.data=1", "--optim.name=muon"]
CHAT = [
    "--data.source=chat", "--data.seq_len=144", "--data.packing=true", "--data.batch_size=16", "--optim.lr=3e-3",
    "--optim.warmup_steps=30", "--optim.schedule=wsd", "--optim.final_lr_fraction=0", "--train.eval_steps=2",
]  # fmt: skip


def write_data(folder: Path) -> None:
    """Writes conversations and pairs of answers into a folder: `sorting.jsonl` and `sorting_pairs.jsonl`."""
    runpy.run_path(str(EXAMPLE))["main"](folder)


def train_on_conversations(folder: Path, steps: int, *more: str) -> Path:
    """Trains the model on conversations, with more keys, and returns its run."""
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.train import main as train

    path = folder / "chat"
    flags = [f"--data.path={folder}/sorting.jsonl", f"--run.dir={path}", f"--train.steps={steps}"]
    train(parse_config([*COMMON, *CHAT, *flags, *more]))
    return path
