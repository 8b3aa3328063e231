"""The families of models: their table, and the functions that read it.

Code outside of `models`, `families` and `hf` names no group of parameters: it asks the family of a configuration.
"""

from collections.abc import Mapping
from typing import TypeVar

from jaxstack.config import ModelConfig
from jaxstack.config.objective import OBJECTIVES, Objective
from jaxstack.families import branches, contrastive, diffusion, encoder, encoder_decoder
from jaxstack.models import decoder
from jaxstack.models.blocks import Stack
from jaxstack.models.family import FAMILIES, Family
from jaxstack.models.params import Spec

Group = TypeVar("Group")

FAMILIES.update(
    branches=branches.FAMILY,
    contrastive=contrastive.FAMILY,
    decoder=decoder.FAMILY,
    diffusion=diffusion.FAMILY,
    encoder=encoder.FAMILY,
    encoder_decoder=encoder_decoder.FAMILY,
)


def register_family(name: str, family: Family, objective: Objective | None = None) -> None:
    """Registers a family under a name for `model.family`. Without an objective it has the decoder's objective.

    Raises:
      ValueError: the name is taken.
    """
    if name in FAMILIES:
        raise ValueError(f"There is a family {name!r} already. Use another name.")
    FAMILIES[name] = family
    OBJECTIVES[name] = objective or OBJECTIVES["decoder"]


def of(cfg: ModelConfig) -> Family:
    """Returns the family of a configuration."""
    return FAMILIES[cfg.family]


def spec(cfg: ModelConfig) -> Spec:
    """Returns the declarations of every parameter of a model."""
    return of(cfg).spec(cfg)


def only_stack(cfg: ModelConfig) -> tuple[str, Stack]:
    """Returns the name and the stack of a model with one stack of layers."""
    ((name, stack),) = of(cfg).stacks(cfg).items()
    return name, stack


def split_stacks(cfg: ModelConfig, params: Mapping[str, Group]) -> tuple[dict[str, Group], dict[str, Group]]:
    """Splits the groups of parameters (or what is stored by their names) into those outside of stacks, and the stacks.

    Groups that are not there, such as stacks in which nothing is trained, are left out.
    """
    names = of(cfg).stacks(cfg)
    shared = {name: group for name, group in params.items() if name not in names}
    return shared, {name: params[name] for name in names if name in params}
