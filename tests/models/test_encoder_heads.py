"""An encoder that begins with the parameters of another one keeps each group that both have, and no other."""

import dataclasses

import jax
import numpy as np
import pytest
from families import ENCODERS, PAIRS

from jaxstack.families import encoder
from jaxstack.models import params

PLAIN, PAIR = ENCODERS["bert"], PAIRS["bert_pairs"]
LABELLED = dataclasses.replace(PLAIN, labels=("a", "b"))
OTHER = dataclasses.replace(PLAIN, labels=("b", "c"))


@pytest.mark.parametrize(
    ("there", "here", "fresh"),
    [
        (PLAIN, PAIR, {"pooler", "sentences"}),
        (PAIR, PLAIN, set()),
        (PLAIN, LABELLED, {"output", "transform"}),
        (LABELLED, OTHER, {"output"}),
        (PAIR, dataclasses.replace(LABELLED, label_each="token"), {"output"}),
    ],
)
def test_only_other_heads_are_fresh(there, here, fresh):
    values, new = (params.init(jax.random.key(i), encoder.spec(cfg)) for i, cfg in enumerate((there, here)))
    moved = jax.tree.map(lambda a: a + 1, values)
    found = encoder.with_other_head(there, moved, here, new)
    assert found.keys() == new.keys()
    for name in new:
        jax.tree.map(np.testing.assert_array_equal, found[name], new[name] if name in fresh else moved[name])
