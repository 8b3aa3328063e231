"""Compares DPO steps with TRL: losses step by step, and time per step, on the same CPU, model, pairs and settings.

    pip install trl && python benchmarks/dpo_peers.py

A Llama model with random parameters is written as a Hugging Face folder. `jaxstack train` starts from it with the pairs
of docs/examples/sorting.py. TRL's `DPOTrainer` starts from the same folder, and reads the ids of the same pairs in the
same order. Both compute in float32, without dropout, with AdamW and a clipped gradient, and the log-probabilities of
the reference in each step. Processes alternate, so that other work on the machine slows both.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

EXAMPLE = Path(__file__).parents[1] / "docs/examples/sorting.py"
MODEL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
LR, BETA, ROWS = 1e-4, 0.1, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="number of steps whose losses are compared")
    parser.add_argument("--timed", type=int, default=40, help="number of steps of a process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each library")
    parser.add_argument("--only", choices=("jaxstack", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        {"jaxstack": run_jaxstack, "trl": run_trl}[args.only](args.folder, args.timed)
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), args.timed)
        compare(Path(folder), args)


def compare(folder: Path, args: argparse.Namespace) -> None:
    """Runs all processes, and records losses and times."""
    losses: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {"jaxstack": [], "trl": []}
    load = os.getloadavg()[0]
    for _ in range(args.rounds):
        for name in seconds:
            command = [sys.executable, __file__, f"--only={name}", f"--folder={folder}", f"--timed={args.timed}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found = json.loads((folder / f"{name}.json").read_text())
            losses[name] = found["losses"][: args.steps]
            seconds[name] += found["seconds"][2:]  # the first steps compile, or touch memory for the first time
    difference = float(np.abs(np.subtract(*losses.values())).max())
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    result = {
        "trl": json.loads((folder / "trl.json").read_text())["version"],
        "model": MODEL, "pairs_per_step": ROWS, "lr": LR, "beta": BETA, "dtype": "float32",
        "steps": args.steps, "timed": args.timed, "rounds": args.rounds, "cores": os.cpu_count(),
        "load_average": [load, os.getloadavg()[0]], "losses": losses, "largest_difference": difference,
        "median_seconds": median, "ratio": median["jaxstack"] / median["trl"],
        "fastest_seconds": {name: min(values) for name, values in seconds.items()},
    }  # fmt: skip
    print({"largest_difference": difference, "median_seconds": median, "ratio": result["ratio"]})
    record.record("dpo_peers", result)


def prepare(folder: Path, steps: int) -> None:
    """Writes the model, the pairs, and the ids of the pairs in the order of the steps."""
    import jax
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from jaxstack import data
    from jaxstack.config import resolve
    from jaxstack.data.loader import DataLoader

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL, vocab_size=256, max_position_embeddings=256)).save_pretrained(folder / "hf")
    runpy.run_path(str(EXAMPLE))["main"](folder)
    cfg = config(folder, steps)
    dataset = data.load_for(cfg.model, cfg.data, cfg.aim)
    cfg = resolve(cfg, dataset.vocab_size, dataset.image, dataset.buckets)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    rows: list[dict[str, list[int]]] = []
    for batch in DataLoader(cfg, dataset, one).iterate(0, steps):
        arrays = (batch[name] for name in ("tokens", "targets", "segment_ids", "loss_weights"))
        for tokens, targets, segments, mask in zip(*map(np.asarray, arrays), strict=True):
            sides = []
            for side in (1, 2):
                here = segments == side
                ids = [int(tokens[here][0]), *targets[here].tolist()]
                learned = np.flatnonzero(mask[here]) + 1
                assert (np.diff(learned) == 1).all()
                sides.append((ids[: learned[0]], ids[learned[0] : learned[-1] + 1]))
            (prompt, chosen), (same, rejected) = sides
            assert prompt == same
            rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    (folder / "ids.json").write_text(json.dumps(rows))


def config(folder: Path, steps: int) -> Any:
    """Returns the configuration of `jaxstack train`."""
    from jaxstack.config.reading.parse import parse_config

    return parse_config(
        [
            f"--run.dir={folder}/run", f"--run.init_from={folder}/hf", "--run.log_every=1", "--sample.prompts=[]",
            "--model.num_layers=4", "--model.d_model=128", "--model.num_heads=4", "--model.d_ff=512",
            "--model.norm_eps=1e-6", "--model.qk_norm=false", "--model.tied_embeddings=false", "--mesh.data=1",
            "--data.source=preferences", f"--data.path={folder}/sorting_pairs.jsonl", "--data.tokenizer=bytes",
            "--data.seq_len=96", f"--data.batch_size={ROWS}", f"--train.steps={steps}", f"--train.eval_every={steps}",
            "--train.eval_steps=1", f"--checkpoint.every={steps}", f"--preference.beta={BETA}", f"--optim.lr={LR}",
            "--optim.name=adamw", "--optim.schedule=constant", "--optim.warmup_steps=0", "--optim.weight_decay=0",
            "--optim.b2=0.999", "--optim.clip_norm=1",
        ]
    )  # fmt: skip


def run_jaxstack(folder: Path, steps: int) -> None:
    """Trains with jaxstack, and writes losses and times."""
    import shutil

    from jaxstack.train import main as train

    shutil.rmtree(folder / "run", ignore_errors=True)
    train(config(folder, steps))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "loss" in line and "grad_norm" in line]
    write(folder / "jaxstack.json", [line["loss"] for line in found], [line["step_time_s"] for line in found[1:]])


def run_trl(folder: Path, steps: int) -> None:
    """Trains with TRL, and writes losses and times."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    class OfIds(trl.DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    words = {"<pad>": 0, "<end>": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<end>"
    )
    args = trl.DPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=ROWS, max_steps=steps, learning_rate=LR, beta=BETA,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_beta2=0.999, max_grad_norm=1.0,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, fp16=False, max_length=None,
        gradient_checkpointing=False, disable_dropout=True, train_sampling_strategy="sequential", seed=0,
    )  # fmt: skip
    clock = Clock()
    model = LlamaForCausalLM.from_pretrained(folder / "hf", dtype="float32")
    rows = Dataset.from_list(json.loads((folder / "ids.json").read_text()))
    trainer = OfIds(model, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=[clock])
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    write(folder / "trl.json", losses, clock.seconds, trl.__version__)


def write(path: Path, losses: list[float], seconds: list[float], version: str = "") -> None:
    path.write_text(json.dumps({"losses": losses, "seconds": seconds, "version": version}))


if __name__ == "__main__":
    main()
