"""Attention sinks: a learned score of each query head that takes part in its softmax without a value (gpt-oss)."""

from dataclasses import replace

from jaxstack.config import ModelConfig
from jaxstack.models.family import Family
from jaxstack.models.params import Param, Spec, stack


def with_sinks(family: Family) -> Family:
    """Returns the family with attention sinks in its layers. `layers.attention` reads them where they are declared."""

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        sinks = Param((cfg.num_heads,), ("heads",), "vector", std=cfg.init_std)
        for name, one in family.stacks(cfg).items():
            attention = tree[name]["attention"] | {"sinks": stack({"sinks": sinks}, one.depth)["sinks"]}
            tree[name] = {**tree[name], "attention": attention}
        return tree

    return replace(family, spec=spec)
