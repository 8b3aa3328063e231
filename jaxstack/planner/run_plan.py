"""Plans a training run: the best size and length for a budget, its configuration, and what the run takes."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.hardware import Chip
from jaxstack.config import SEARCHED_KEYS, Config, ConfigError, DataConfig, ModelConfig, flat, with_values
from jaxstack.families import flops
from jaxstack.models import params
from jaxstack.planner import memory, mesh_plan, recipe
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.scaling_law import BESIROGLU, FLOPS_PER_PARAMETER_AND_TOKEN, PUBLISHED_RANGE

LARGEST_BUDGET = 1e30
FIRST_MFU = 0.4
"""Fraction of the peak with which a plan starts; the predicted time of its mesh replaces it."""
ROUNDS = 6
"""Corrections of the budget until the time of the run is the given one. Shapes are discrete, so it is never exact."""


@dataclass(frozen=True)
class Machine:
    """What the run is trained on.

    Attributes:
      name: the target as the user wrote it.
      chip: the chip.
      devices: number of devices.
      mfu: fraction of the peak that the run reaches, by the FLOPs of full attention. `None` means the predicted one.
      watts: power of one device, or None.
      price: price of one device for an hour. `None` means that it is not known.
    """

    name: str
    chip: Chip
    devices: int
    mfu: float | None
    watts: float | None
    price: float | None

    def seconds(self, model: ModelConfig, keys: DataConfig, dtype: str, tokens: float) -> float:
        """Returns the seconds that a model takes for this many tokens.

        Args:
          keys: the group `data` of the configuration.
          dtype: `train.dtype`.
        """
        per_token = flops.flops_per_token(model, keys.seq_len, keys.target_length).full
        return tokens * per_token / (self.devices * ChipLimits(self.chip).peak(dtype) * (self.mfu or FIRST_MFU))

    def that_reaches(self, model: ModelConfig, keys: DataConfig, dtype: str, step: float) -> "Machine":
        """Returns the machine with the MFU of a step of this many seconds, unless the user has set it."""
        if self.mfu is not None:
            return self
        at_first = self.seconds(model, keys, dtype, keys.batch_size * keys.seq_len)
        return replace(self, mfu=FIRST_MFU * at_first / step)


@dataclass(frozen=True)
class RunPlan:
    """A planned run.

    Attributes:
      cfg: the configuration.
      parameters: number of parameters of the model, those that a token uses.
      machine: what it is trained on, or None.
      need: memory of a device, or None.
      predicted_step: seconds of a step by `step_time`, with calibrated efficiencies, or None.
    """

    cfg: Config
    parameters: int
    machine: Machine | None
    need: memory.Need | None
    predicted_step: float | None

    @property
    def stored_parameters(self) -> int:
        """All parameters, with every expert."""
        return params.count(families.spec(self.cfg.model))

    @property
    def batch(self) -> int:
        """Tokens of a step."""
        return self.cfg.data.batch_size * self.cfg.data.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.cfg.train.steps * self.batch

    @property
    def flops(self) -> float:
        """FLOPs of training as the law counts them, 6 N D."""
        return float(FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens)

    @property
    def seconds(self) -> float | None:
        """Seconds of the run without evaluations, saves and compiling."""
        cfg = self.cfg
        if self.machine is None:
            return None
        return self.machine.seconds(cfg.model, cfg.data, cfg.train.dtype, self.tokens)

    @property
    def warnings(self) -> list[str]:
        """Warnings: what is outside of the range that the law was fitted to, and an MFU above the predicted one."""
        found = []
        if self.cfg.model.moe.num_experts:
            found.append(
                f"the law was fitted to dense models. For this mixture of experts it counts the {self.parameters:.3g} "
                f"parameters that a token uses, and its loss is that of a dense model of this size."
            )
        for name, value, (low, high) in (
            ("training FLOPs", self.flops, PUBLISHED_RANGE.flops),
            ("parameters", self.parameters, PUBLISHED_RANGE.parameters),
            ("tokens a parameter", self.tokens / self.parameters, PUBLISHED_RANGE.tokens_per_parameter),
        ):
            if not low <= value <= high:
                found.append(
                    f"{value:.3g} {name} is outside of the runs that the law was fitted to, {low:.3g} to {high:.3g}: "
                    f"the prediction is an extrapolation."
                )
        if self.predicted_step is not None and self.seconds is not None:
            planned = self.seconds / self.cfg.train.steps
            if planned < 0.999 * self.predicted_step:
                assert self.machine is not None
                assert self.machine.mfu is not None
                predicted = self.machine.mfu * planned / self.predicted_step
                found.append(
                    f"--mfu={self.machine.mfu:g} is more than the {predicted:.3f} that `plan time` predicts here."
                )
        return found


Sizes = Callable[[float], tuple[float, float]]
"""From training FLOPs to the wanted parameters and tokens."""


def ratio_sizes(tokens_per_parameter: float) -> Sizes:
    """Returns the sizes with a given number of tokens a parameter."""

    def sizes(budget: float) -> tuple[float, float]:
        parameters = math.sqrt(budget / FLOPS_PER_PARAMETER_AND_TOKEN / tokens_per_parameter)
        return parameters, parameters * tokens_per_parameter

    return sizes


def served_sizes(served: float) -> Sizes:
    """Returns the sizes with the fewest FLOPs for training and `served` tokens of use; 0 means training alone."""
    return lambda budget: BESIROGLU.optimum_served(budget, served)


def plan_budget(base: Config, given: Collection[str], budget: float, sizes: Sizes, machine: Machine | None) -> RunPlan:
    """Plans a run for training FLOPs.

    Args:
      base: the family of the model, the data, and all values that no rule decides; resolved.
      given: keys that the user has set, which no rule changes.
      budget: training FLOPs, 6 N D.
      sizes: the wanted parameters and tokens of a budget.
      machine: what it is trained on. None leaves the mesh open.

    Raises:
      ConfigError: no model of the family, no batch or no mesh fits.
    """
    cfg = _sized(base, given, budget, sizes)
    if machine is None:
        return RunPlan(cfg, recipe.parameters_of(cfg.model), None, None, None)
    kept = [key for key in SEARCHED_KEYS if key in given]
    best = mesh_plan.search(cfg, mesh_plan.of_target(machine.name), kept, count=1).ranked[0]
    machine = machine.that_reaches(best.cfg.model, best.cfg.data, best.cfg.train.dtype, best.seconds)
    return RunPlan(best.cfg, recipe.parameters_of(cfg.model), machine, best.need, best.seconds)


def plan_time(base: Config, given: Collection[str], seconds: float, sizes: Sizes, machine: Machine) -> RunPlan:
    """Plans a run that takes at most this many seconds. For the other arguments and errors see `plan_budget`.

    Without an MFU, a first plan says which one its mesh reaches.
    """
    if machine.mfu is None:
        first = plan_time(base, given, seconds, sizes, replace(machine, mfu=FIRST_MFU))
        assert first.predicted_step is not None
        machine = machine.that_reaches(first.cfg.model, first.cfg.data, first.cfg.train.dtype, first.predicted_step)
    assert machine.mfu is not None
    budget = seconds * machine.devices * ChipLimits(machine.chip).peak(base.train.dtype) * machine.mfu
    for _ in range(ROUNDS):
        cfg = _sized(base, given, budget, sizes)
        tokens = cfg.train.steps * cfg.data.batch_size * cfg.data.seq_len
        budget *= seconds / machine.seconds(cfg.model, cfg.data, cfg.train.dtype, tokens)
    # Sizes and batches are discrete, so the rounds end near the time; steps fill it.
    found = plan_budget(base, given, budget, sizes, machine)
    assert found.seconds is not None
    if "train.steps" in given:
        return found
    steps = max(1, int(found.cfg.train.steps * seconds / found.seconds))
    warmup = {} if "optim.warmup_steps" in given else {"optim.warmup_steps": steps // 10}
    cfg = with_values(found.cfg, {"train.steps": steps, **warmup})
    return RunPlan(cfg, found.parameters, machine, found.need, found.predicted_step)


def _sized(base: Config, given: Collection[str], budget: float, sizes: Sizes) -> Config:
    """Returns the configuration with the model's shape, the batch, the steps and the optimizer for training FLOPs."""
    if budget > LARGEST_BUDGET:
        raise ConfigError(f"the budget of {budget:.3g} FLOPs is beyond any law. Use {LARGEST_BUDGET:g} or less.")
    wanted, _ = sizes(budget)
    model = base.model
    if not any(key in given for key in (*(f"model.{name}" for name in SHAPE), "model.moe.d_ff")):
        model = recipe.shape(model, wanted)
    parameters = recipe.parameters_of(model)
    tokens = budget / FLOPS_PER_PARAMETER_AND_TOKEN / parameters
    sequences = max(1, round(recipe.batch_tokens(tokens) / base.data.seq_len))
    if "data.batch_size" in given:
        sequences = base.data.batch_size
    batch = sequences * base.data.seq_len
    steps = round(tokens / batch)
    if steps < 1:
        raise ConfigError(
            f"the budget of {budget:.3g} FLOPs is {tokens:.3g} tokens for {plural(parameters, 'parameter', spec=',')}, "
            f"less than a batch of {plural(batch, 'token', spec=',')}. Use a larger budget, or a smaller family with "
            f"--config."
        )
    steps = base.train.steps if "train.steps" in given else min(steps, 2**31 - 1)
    width = model.base_width or model.d_model  # muP scales the rate to the width by itself
    optim = recipe.optimizer(base.optim, batch, width, steps * batch, parameters, steps)
    values: dict[str, object] = {f"model.{key}": getattr(model, key) for key in (*SHAPE, "moe")}
    values |= {"data.batch_size": sequences, "train.steps": steps, "train.grad_accum": 1}
    values |= {f"optim.{key}": getattr(optim, key) for key in flat(optim)}
    return with_values(base, {key: value for key, value in values.items() if key not in given})


SHAPE = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
"""The keys of `model` that the plan decides, beside the width of an expert. Setting one of them keeps the shape of the
configuration."""
