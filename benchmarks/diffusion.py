"""Compares experts by timestep with a dense model: `python benchmarks/diffusion.py [--seeds 0 1 2]`, on the CPU.

The pictures are scikit-learn's digits; 360 of 1,797 are held out. For each seed `configs/diffusion_digits.yaml` is
trained with its experts, and with one MLP. Both have equal active parameters, steps and batches. Pixels are scaled
to 0..1 and clipped. The Frechet distance is that of pixels between drawn and held-out pictures. Its baselines are the
training pictures, one normal distribution, and one for each class. Distances to the nearest training picture show
whether pictures are copies. `frechet_deviation` is the standard deviation of the distance over bootstrap samples of the
drawn pictures, so it is that of drawing with other noise. Both kinds of model draw from the same noise. So
`differences` has the distance with experts minus the one without, and its deviation over the same bootstrap samples of
both, which is less than that of either distance.

The held-out loss of each twentieth of the time shows where experts are better than one MLP, and where they are not.

With `--dense_steps N` both models of a seed begin with one dense run of N steps, with a constant learning rate. Then
each expert starts as a copy of its MLP (up-cycling), and the rest of the steps has the schedule of the configuration.
Both get the same batches, so that the experts are their only difference.

Results go to `benchmarks/results/diffusion_patches.json`, or with `--name` to a file of that name; `diffusion.json` has
those of a former configuration. Flags after `--` are for `jaxstack train`, on both sides. With `--runs FOLDER` a run
is kept there as KIND-SEED, and its dense steps as first-SEED; one that is there already is not trained again.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
from picture_distances import frechet_distance, nearest_distances, to_unit

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack import families
from jaxstack.data import images

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "diffusion_digits.yaml"


def train(folder: Path, *flags: str) -> dict[str, float]:
    """Runs a training command; returns its seconds, those of its processors, and the last held-out loss."""
    command = [sys.executable, str(ROOT / "train.py"), f"--config={CONFIG}", f"--run.dir={folder}", *flags]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = [r["eval_loss"] for r in records if "eval_loss" in r][-1]
    return {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(used, 1), "held_out_loss": loss}


def loss_by_time(run: Any, pictures: Any, parts: int = 20) -> list[float]:
    """Returns the held-out loss in equal parts of the time, the picture's first. All runs get the same noise."""
    import jax
    import jax.numpy as jnp

    from jaxstack.families import diffusion
    from jaxstack.families.noise_path import Path as NoisePath
    from jaxstack.families.noise_path import time_of
    from jaxstack.models.context import Context

    cfg, rng = run.model, np.random.default_rng(0)
    clean = images.to_patches(pictures.pixels, cfg.diffusion.patch_size)
    classes = np.repeat(pictures.classes[:, None], clean.shape[1], 1)

    @jax.jit
    def loss(params: Any, noise: Any, timesteps: Any) -> Any:
        path = NoisePath.at(cfg.diffusion.path, time_of(cfg, timesteps)[..., None])
        batch = {"noisy": path.mix(clean, noise), "classes": classes, "gate_ids": timesteps}
        hidden, _ = families.of(cfg).hidden_states(cfg, params, batch, Context())
        velocity = diffusion.predict(cfg, params, hidden, batch, Context())
        return jnp.square(velocity - path.velocity(clean, noise)).mean()

    found = []
    for start, end in itertools.pairwise(np.linspace(0, cfg.moe.max_timestep, parts + 1).astype(int)):
        timesteps = np.broadcast_to(rng.integers(start, end, (len(clean), 1)), classes.shape).astype(np.int32)
        found.append(float(loss(run.params, rng.standard_normal(clean.shape, np.float32), timesteps)))
    return [round(one, 4) for one in found]


def bootstrap(drawn: np.ndarray, held_out: np.ndarray, samples: int = 50) -> np.ndarray:
    """Returns the Frechet distance of bootstrap samples of the drawn pictures [N, D], the same ones for equal N."""
    rng, count = np.random.default_rng(0), len(drawn)
    found = [frechet_distance(drawn[rng.integers(count, size=count)], held_out) for _ in range(samples)]
    return np.array(found)


def judge(drawn: np.ndarray, train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Returns the distances of pictures [N, D] from the training pictures and from the held-out ones."""
    near = nearest_distances(drawn, train)
    return {
        "frechet_held_out": round(frechet_distance(drawn, held_out), 4),
        "frechet_train": round(frechet_distance(drawn, train), 4),
        "nearest_median": round(float(np.median(near)), 3),
        "nearest_least": round(float(near.min()), 3),
    }


def baselines(train: np.ndarray, classes: np.ndarray, held_out: np.ndarray, count: int) -> dict[str, Any]:
    """Returns the distances of the training pictures, of one normal distribution, and of one for each class."""
    rng = np.random.default_rng(0)
    one = rng.multivariate_normal(train.mean(0), np.cov(train, rowvar=False), count)
    each, chosen = np.empty((count, train.shape[1])), rng.choice(classes, count)
    for label in np.unique(classes):
        own = train[classes == label]
        draws = rng.multivariate_normal(own.mean(0), np.cov(own, rowvar=False), int((chosen == label).sum()))
        each[chosen == label] = draws
    near = nearest_distances(held_out, train)
    return {
        "train": {"frechet_held_out": round(frechet_distance(train, held_out), 4)},
        "one_normal": judge(one.clip(0, 1), train, held_out),
        "normal_per_class": judge(each.clip(0, 1), train, held_out),
        "held_out": {"nearest_median": round(float(np.median(near)), 3), "nearest_least": round(float(near.min()), 3)},
    }


def lasting(steps: int) -> list[str]:
    """Returns the flags of a run that is evaluated and saved after its last step."""
    return [f"--train.steps={steps}", f"--train.eval_every={steps}", f"--checkpoint.every={steps}"]


def main() -> None:
    """Trains, draws, measures and records; results are written after each seed."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--kinds", nargs="+", default=["experts", "dense"], choices=["experts", "dense"])
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--pictures", type=int, default=5000)
    arguments.add_argument("--name", default="diffusion_patches")
    arguments.add_argument("--dense_steps", type=int, default=0)
    arguments.add_argument("--runs", type=Path, help="folder that keeps the runs")
    arguments.add_argument("flags", nargs="*")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jaxstack
    from jaxstack.config import DataConfig
    from jaxstack.data import load

    dataset = load(DataConfig(source="digits", eval_fraction=0.2))
    known, held_out = (to_unit(part.pixels) for part in (dataset.train, dataset.eval))
    result: dict[str, Any] = {
        "steps": given.steps,
        "pictures": given.pictures,
        "dense_steps": given.dense_steps,
        "flags": given.flags,
        "load_average": os.getloadavg()[0],
        "baselines": baselines(known, dataset.train.classes, held_out, 10_000),
        "cases": [],
        "differences": [],
    }
    print(json.dumps(result["baselines"]), flush=True)
    ids = np.random.default_rng(0).choice(dataset.train.classes, given.pictures)
    for seed in given.seeds:
        distances = {}
        for kind in given.kinds:
            with tempfile.TemporaryDirectory() as scratch:
                folder = (given.runs or Path(scratch)) / f"{kind}-{seed}"
                flags = [f"--run.seed={seed}", "--mesh.data=1", "--sample.pictures=0"]
                flags += [flag for flag in given.flags if kind == "experts" or not flag.startswith("--model.moe")]
                dense, steps, first = "--model.moe.num_experts=0", given.steps, folder.with_name(f"first-{seed}")
                flags += [dense] if kind == "dense" else []
                if given.dense_steps:
                    steps -= given.dense_steps
                    if not first.exists():
                        train(first, *flags, *lasting(given.dense_steps), dense, "--optim.schedule=constant")
                    flags += [f"--run.init_from={first}", f"--run.seed={seed + 100}"]  # other batches
                spent = {} if folder.exists() else train(folder, *flags, *lasting(steps))
                run = jaxstack.load(folder)
                drawn = to_unit(run.draw([str(i) for i in ids], seed=0))
                by_time = loss_by_time(run, dataset.eval)
            distances[kind] = bootstrap(drawn, held_out)
            case = {"seed": seed, "kind": kind, **spent, **judge(drawn, known, held_out)}
            case["frechet_deviation"] = round(float(distances[kind].std()), 4)
            case["loss_by_time"] = by_time
            print(json.dumps(case), flush=True)
            result["cases"].append(case)
            record.record(given.name, result)
        if len(distances) == 2:
            apart = distances["experts"] - distances["dense"]
            difference, spread = (round(float(a), 4) for a in (apart.mean(), apart.std()))
            result["differences"].append({"seed": seed, "experts_minus_dense": difference, "deviation": spread})
            record.record(given.name, result)


if __name__ == "__main__":
    main()
