"""Writes `trl_losses.json`: the losses of random pairs as TRL's trainers compute them, for `test_losses.py`.

    pip install trl && python tests/posttrain/trl_losses.py

`DPOTrainer` computes its losses within a long method. The part between sums of log-probabilities and the loss of each
pair runs as it is written there.
"""

import inspect
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import trl
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer import dpo_trainer, kto_trainer

PAIR = ("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_tokens", "rejected_tokens")


def draw() -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 40, (2, 6)).astype(float)
    means = -rng.gamma(1.0, 1.0, (4, 6)) - 0.05
    sums = np.round(means * tokens[[0, 1, 0, 1]], 3)
    return dict(zip(PAIR, [*sums.tolist(), *tokens.tolist()], strict=True))


def dpo_trainer_loss(arrays: dict[str, torch.Tensor], kind: str, **constants: float) -> list[float]:
    source = inspect.getsource(dpo_trainer)
    begin = source.index("        # Get the log ratios for the chosen and rejected responses")
    body = textwrap.dedent(source[begin : source.index("            if self.use_weighting:")])
    trainer = SimpleNamespace(f_divergence_type="reverse_kl", loss_types=[kind], loss_weights=[1.0], **constants)
    mask = [(torch.arange(64) < arrays[f"{side}_tokens"][:, None]).float() for side in ("chosen", "rejected")]
    names = {f"{side}_logps": arrays[side] for side in PAIR[:4]}
    scope = dpo_trainer.__dict__ | names | {"self": trainer, "completion_mask": torch.cat(mask)}
    exec(compile(body, "dpo_trainer", "exec"), scope)
    return scope["per_sequence_loss"].tolist()


def kto_trainer_loss(arrays: dict[str, torch.Tensor], **constants: float) -> list[float]:
    """Returns the losses of the chosen completions as wanted ones, and then of the rejected ones as unwanted."""
    source = inspect.getsource(kto_trainer)
    begin = source.index("        if self.calculate_KL:\n            kl = ")
    body = textwrap.dedent(source[begin : source.index("        losses = torch.cat(")])
    accelerator = SimpleNamespace(gather_for_metrics=lambda x: x, device="cpu")
    trainer = SimpleNamespace(calculate_KL=True, loss_type="kto", accelerator=accelerator, **constants)
    # The completions of the other prompts are the same ones, by other probabilities.
    both = torch.cat([arrays["chosen"], arrays["rejected"]])
    names = {f"{side}_logps": arrays[side] for side in PAIR[:4]} | {"KL_logps": both, "ref_KL_logps": both - 2.5}
    scope = kto_trainer.__dict__ | names | {"self": trainer}
    exec(compile(body, "kto_trainer", "exec"), scope)
    weighted = (
        trainer.desirable_weight * scope["chosen_losses"],
        trainer.undesirable_weight * scope["rejected_losses"],
    )
    return torch.cat(weighted).tolist()


def main() -> None:
    inputs = draw()
    arrays = {name: torch.tensor(values, dtype=torch.float32) for name, values in inputs.items()}
    means = [arrays[side] / arrays[f"{side}_tokens"] for side in ("chosen", "rejected")]
    common = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device="cpu"), is_peft_model=False)
    simpo = SimpleNamespace(**vars(common), loss_type="simpo", simpo_gamma=0.5, label_smoothing=0, alpha=0.0)
    smoothed = {"beta": 0.1, "label_smoothing": 0.3}
    found = {
        "dpo": (dpo_trainer_loss(arrays, "sigmoid", beta=0.1), {"beta": 0.1}),
        "hinge": (dpo_trainer_loss(arrays, "hinge", beta=0.1), {"beta": 0.1}),
        "ipo": (dpo_trainer_loss(arrays, "ipo", beta=0.1), {"beta": 0.1}),
        "robust": (dpo_trainer_loss(arrays, "robust", **smoothed), smoothed),
        "simpo": (CPOTrainer.cpo_loss(simpo, *means)[0].tolist(), {"beta": 0.1, "gamma": 0.5}),
        "orpo": ((-ORPOTrainer.odds_ratio_loss(common, *means)[0]).tolist(), {"beta": 0.1}),
    }
    weights = {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    kto = {"values": kto_trainer_loss(arrays, **weights), "constants": weights, "divergence": 2.5}
    result = {
        "source": f"TRL {trl.__version__}, torch {torch.__version__.partition('+')[0]}, float32",
        "inputs": inputs,
        "losses": {name: {"values": values, "constants": constants} for name, (values, constants) in found.items()},
        "kto": kto,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
