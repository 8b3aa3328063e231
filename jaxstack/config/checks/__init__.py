"""Checks that compare keys of different groups. Each raises `ConfigError`, which says what to do."""

from jaxstack.config.checks.buckets import check_buckets
from jaxstack.config.checks.families import check_family
from jaxstack.config.checks.mesh import check_mesh
from jaxstack.config.checks.training import check_training
from jaxstack.config.groups import Groups


def check(cfg: Groups) -> None:
    """Checks the keys of a run against each other.

    Raises:
      ConfigError: two of them do not fit.
    """
    check_training(cfg)
    check_mesh(cfg)
    check_family(cfg)
    check_buckets(cfg)
