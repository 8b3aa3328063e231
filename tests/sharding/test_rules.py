"""Rules and their errors, the figures of `summarize`, and the limits of `assert_sharded`."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxstack.config import ConfigError, MeshConfig
from jaxstack.sharding import (
    Leaf,
    Rules,
    ShardingError,
    assert_sharded,
    make_mesh,
    replicated_fraction,
    replication_factor,
    summarize,
)

KERNEL, BIAS = Leaf((8, 16), ("embed", "mlp")), Leaf((16,), ("mlp",))
NAMES = {"embed": "fsdp", "mlp": "tensor"}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), batch=4)


def refused(rules: Rules, leaves: dict[str, Leaf], mesh: Mesh) -> str:
    with pytest.raises(ShardingError) as error:
        rules.resolve(leaves, mesh)
    assert "\n" not in str(error.value)
    return str(error.value)


def says(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, text


# Specs from rules.


def test_names(mesh):
    leaves = {"a/kernel": KERNEL, "a/bias": BIAS, "norm": Leaf((8,), (None,))}
    assert Rules(NAMES).resolve(leaves, mesh) == {
        "a/kernel": P("fsdp", "tensor"),
        "a/bias": P("tensor"),
        "norm": P(None),
    }


def test_the_first_pattern_wins_over_later_ones_and_over_names(mesh):
    rules = Rules(NAMES, paths=[("head/kernel", (None, "fsdp")), (".*/kernel", ("tensor", None))])
    leaves = {"head/kernel": KERNEL, "a/kernel": KERNEL, "b/other": KERNEL}
    assert rules.resolve(leaves, mesh) == {
        "head/kernel": P(None, "fsdp"),
        "a/kernel": P("tensor", None),
        "b/other": P("fsdp", "tensor"),
    }


def test_several_mesh_axes_for_one_dimension(mesh):
    by_name = Rules({"embed": ("data", "fsdp"), "mlp": None}).resolve({"a": KERNEL}, mesh)
    # Lists come from YAML files.
    by_path = Rules(paths=[("a", [["data", "fsdp"], None])]).resolve({"a": Leaf((8, 16))}, mesh)
    by_names = Rules({"x": "data", "y": "fsdp"}).resolve({"a": Leaf((8, 16), (("x", "y"), None))}, mesh)
    assert by_name == by_path == by_names == {"a": P(("data", "fsdp"), None)}


def test_the_empty_pattern_replicates_any_rank(mesh):
    leaves = {"a": Leaf((3, 5, 7)), "b": Leaf((3,))}
    assert Rules(paths=[(".*", ())]).resolve(leaves, mesh) == {"a": P(), "b": P()}


def test_one_element_needs_no_rule_and_takes_any(mesh):
    leaves = {"step": Leaf(()), "head/bias": Leaf((1,)), "a/bias": Leaf((2,))}
    rules = Rules(paths=[(".*/bias", ("tensor",))])
    assert rules.resolve(leaves, mesh) == {"step": P(), "head/bias": P(), "a/bias": P("tensor")}


def test_without_rules_for_names_the_names_are_mesh_axes(mesh):
    leaves = {"a": Leaf((8, 16), ("fsdp", "tensor")), "b": Leaf((8, 16), (("data", "fsdp"),))}
    assert Rules().resolve(leaves, mesh) == {"a": P("fsdp", "tensor"), "b": P(("data", "fsdp"))}


def test_an_annotation_may_be_shorter_than_the_rank(mesh):
    assert Rules({"embed": "fsdp"}).resolve({"a": Leaf((8, 16), ("embed",))}, mesh) == {"a": P("fsdp")}


# Errors: each message names the array, the rule and the fix.


def test_an_array_that_no_rule_reaches(mesh):
    text = refused(Rules(NAMES), {"a/kernel": KERNEL, "a.b/scale": Leaf((8,))}, mesh)
    says(text, "a.b/scale", "no rule reaches", "(8,)", "Rules.paths")
    example = text.partition("for example (")[2].partition(", ())")[0].strip("'").replace("\\\\", "\\")
    Rules(paths=[(example, ())]).resolve({"a.b/scale": Leaf((8,))}, mesh)  # the advice works


@pytest.mark.parametrize("part", ["kernel", "a/kern"])
def test_a_pattern_that_matches_only_a_part(part, mesh):
    text = refused(Rules(paths=[(part, ())]), {"a/kernel": Leaf((8, 16))}, mesh)
    says(text, "a/kernel", f"'{part}' matches only a part", "whole path")


def test_a_logical_axis_without_a_rule(mesh):
    text = refused(Rules({"embed": "fsdp"}), {"a/kernel": KERNEL}, mesh)
    says(text, "a/kernel", "logical axis 'mlp'", "Rules.parameters", "which has embed", "None replicates")


def test_mesh_axes_and_logical_names_do_not_mix(mesh):
    """`tensor` is a mesh axis, but with any rule every name needs a rule."""
    text = refused(Rules({"embed": "fsdp"}), {"a": Leaf((8, 16), ("embed", "tensor"))}, mesh)
    says(text, "a: ", "no rule for the logical axis 'tensor'")


def test_a_name_that_is_no_mesh_axis_where_there_are_no_rules(mesh):
    text = refused(Rules(), {"a/kernel": KERNEL}, mesh)
    says(text, "a/kernel", "Rules.parameters is empty", "'embed'", "fsdp", "Add a rule")


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (Rules(NAMES | {"heads": "tensor"}), "Rules.parameters: nothing uses the rule 'heads'"),
        (Rules(NAMES, paths=[("b/.*", ())]), "Rules.paths: nothing uses the rule 'b/.*'"),
        # The pattern takes what the name would have been used for.
        (Rules(NAMES, paths=[("a/.*", ())]), "Rules.parameters: nothing uses the rule 'embed'"),
    ],
    ids=["name", "pattern", "name behind a pattern"],
)
def test_a_rule_that_nothing_uses(rules, named, mesh):
    says(refused(rules, {"a/kernel": KERNEL, "a/bias": BIAS}, mesh), named, "Correct or remove it")


@pytest.mark.parametrize("second", ["a/kernel", ".*/kernel"], ids=["narrower", "the same"])
def test_a_rule_behind_another(second, mesh):
    text = refused(Rules(paths=[(".*/kernel", ()), (second, ("fsdp", None))]), {"a/kernel": Leaf((8, 16))}, mesh)
    says(text, f"nothing uses the rule {second!r}", "'.*/kernel' comes before it", "a/kernel", "narrower rule first")


def test_a_pattern_of_the_wrong_rank(mesh):
    text = refused(Rules(paths=[(".*", ("fsdp", None))]), {"a/bias": Leaf((16,))}, mesh)
    says(text, "a/bias", "'.*' has 2 entries", "(16,)", "one entry a dimension", "() to replicate", "before it")


def test_an_annotation_longer_than_the_rank(mesh):
    text = refused(Rules(NAMES), {"a/bias": Leaf((16,), ("embed", "mlp"))}, mesh)
    says(text, "a/bias", "('embed', 'mlp')", "2 dimensions", "(16,)", "Rules.paths")


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        # Without this error, each letter would be an entry.
        ({"paths": [(".*", "fsdp")]}, r"'\.\*' gives 'fsdp'. .* \('fsdp',\)"),
        ({"paths": [(".*", None)]}, r"'\.\*' gives None. .* or \(\) to replicate"),
        ({"paths": [(".*", (0, "tensor"))]}, r"'\.\*' gives 0. Write the name of a mesh axis"),
        ({"paths": (".*", ("fsdp",))}, r"the rule '\.\*'. Write a list of pairs"),
        ({"paths": [(".*", "fsdp", "tensor")]}, "Write a list of pairs"),
        ({"paths": {"ab": ("fsdp",)}}, "the rule 'ab'. Write a list of pairs"),
        ({"parameters": [("embed", "fsdp")]}, "Rules.parameters is a list. Write a dict"),
        ({"parameters": {"embed": 1}}, "Rules.parameters: the rule 'embed' gives 1"),
        ({"activations": {"batch": ("data", None)}}, "Rules.activations: the rule 'batch' gives"),
    ],
)
def test_rules_of_another_form(rules, words):
    with pytest.raises(ShardingError, match=words):
        Rules(**rules)


@pytest.mark.parametrize("pattern", ["*/kernel", 1])
def test_a_pattern_that_is_no_regular_expression(pattern, mesh):
    says(refused(Rules(paths=[(pattern, ())]), {"a": BIAS}, mesh), f"{pattern!r} is not a regular expression", ".*")


@pytest.mark.parametrize(
    ("rules", "leaf", "named"),
    [
        (Rules({"embed": "fsdp", "mlp": "model"}), KERNEL, "its axes ('embed', 'mlp')"),
        (Rules(paths=[("a", ("model", None))]), Leaf((8, 16)), "the rule 'a'"),
    ],
    ids=["name", "pattern"],
)
def test_a_mesh_axis_that_does_not_exist(rules, leaf, named, mesh):
    says(refused(rules, {"a": leaf}, mesh), "a: ", named, "no mesh axis 'model'", "pipe, data, fsdp, expert")


@pytest.mark.parametrize(
    ("rules", "leaf", "named"),
    [
        (Rules({"embed": "fsdp"}), Leaf((8, 8), ("embed", "embed")), "its axes ('embed', 'embed')"),
        (Rules({"embed": "fsdp", "mlp": ("tensor", "fsdp")}), KERNEL, "its axes ('embed', 'mlp')"),
        (Rules(paths=[("a", ("fsdp", "fsdp"))]), Leaf((8, 8)), "the rule 'a'"),
        # Also where the axis has size one today: the rules are wrong on any larger mesh.
        (Rules(paths=[("a", ("pipe", "pipe"))]), Leaf((8, 8)), "the rule 'a'"),
    ],
)
def test_two_dimensions_that_claim_one_mesh_axis(rules, leaf, named, mesh):
    says(refused(rules, {"a": leaf}, mesh), "a: ", named, "claim the mesh axis '", "Give it to one of them")


def test_a_dimension_that_its_mesh_axes_do_not_divide(mesh):
    text = refused(Rules(NAMES), {"a/kernel": Leaf((8, 15), ("embed", "mlp"))}, mesh)
    says(text, "a/kernel", "('embed', 'mlp')", "dimension 1 of (8, 15)", "tensor=2", "make the dimension 16", "None")
    text = refused(Rules(paths=[("a", (("data", "fsdp", "tensor"),))]), {"a": Leaf((12,))}, mesh)
    says(text, "the rule 'a'", "data=2 x fsdp=2 x tensor=2", "divides into 1 or 2 or 3 or 4 or 6", "dimension 16")


def test_activations(mesh):
    rules = Rules(activations={"batch": ("data", "fsdp"), "embed": None})
    assert rules.activation(("batch", "embed")) == P(("data", "fsdp"), None)
    with pytest.raises(ShardingError, match=r"logical axis 'heads' in Rules.activations, which has batch, embed"):
        rules.activation(("batch", "heads"))
    with pytest.raises(ShardingError, match=r"Rules.activations, which is empty"):
        Rules().activation(("heads",))


# `summarize` and `assert_sharded`, by figures worked out by hand.

LEAVES = {
    "kernel": Leaf((8, 16), ("embed", "mlp")),  # 512 bytes, in 4 parts
    "table": Leaf((10, 8), None, itemsize=2),  # 160 bytes, in 2 parts (fsdp)
    "norm": Leaf((8,), (None,)),  # 32 bytes, whole
    "step": Leaf(()),  # 4 bytes, whole
}
SPECS = {"kernel": P("fsdp", "tensor"), "table": P(None, "fsdp"), "norm": P(None), "step": P()}


def test_the_table(mesh):
    lines = summarize(LEAVES, SPECS, mesh).splitlines()
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    assert [[cell.strip() for cell in row] for row in cells] == [
        ["parameter", "shape", "axes", "spec", "bytes per device"],
        ["kernel", "8 x 16", "embed, mlp", "fsdp, tensor", "128"],
        ["table", "10 x 8", "-, fsdp", "80"],
        ["norm", "8", "-", "-", "32"],
        ["step", "scalar", "-", "4"],
        # 512 + 160 + 32 + 4; 128 + 80 + 32 + 4; (32 + 4) / 708
        ["total 708 bytes, 244 bytes per device, 5.1% replicated"],
    ]
    assert len({len(line) for line in lines[:-1]}) == 1  # columns line up


def test_several_axes_of_one_dimension_in_the_table(mesh):
    text = summarize({"a": Leaf((1024, 1024))}, {"a": P(("data", "fsdp"))}, mesh)
    says(text, "data+fsdp", "1,048,576\n", "total 4,194,304 bytes", "0.0% replicated")


def test_what_counts_as_replicated(mesh):
    leaves, specs = {"a": Leaf((6,)), "b": Leaf((2,))}, {"a": P("data"), "b": P("pipe")}
    assert replicated_fraction(leaves, specs, mesh) == 2 / 8  # pipe has size one, and splits nothing
    assert replicated_fraction(leaves, specs, mesh, ("fsdp", "tensor")) == 1
    alone = make_mesh(MeshConfig(data=1), 1, jax.devices()[:1])
    assert replicated_fraction(leaves, specs, alone) == 0


def test_the_guard_lets_the_small_stay_whole(mesh):
    leaves = {"kernel": Leaf((96,)), "norm": Leaf((4,))}
    assert_sharded(leaves, {"kernel": P("fsdp"), "norm": P()}, mesh, limit=0.04)
    with pytest.raises(ShardingError, match=r"4\.0% of the state .* limit: norm \(4,\)\."):
        assert_sharded(leaves, {"kernel": P("fsdp"), "norm": P()}, mesh, limit=0.039)


def test_the_guard_names_the_largest_first(mesh):
    leaves = {f"w{n}": Leaf((n, 2)) for n in range(1, 6)} | {"split": Leaf((10, 2))}
    specs = {path: P("data") for path in leaves} | {"split": P("tensor")}
    with pytest.raises(ShardingError) as error:
        assert_sharded(leaves, specs, mesh)  # data=2 splits all of them, but its purpose is another
    says(str(error.value), "60.0%", "fsdp=2, tensor=2", "w5 (5, 2), w4 (4, 2), w3 (3, 2) and 2 more", "raise the limit")


def test_the_guard_refuses_what_only_one_of_two_axes_splits():
    """Most of the state is split over all 8 devices, but an array split over two of them still fills a device."""
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4, data=1), 2)
    leaves = {"many": Leaf((8 * 2**28,)), "few": Leaf((2, 2**28))}  # 8 GiB and 2 GiB; 1.25 GiB would be even
    specs = {"many": P(("fsdp", "tensor")), "few": P(None, "fsdp")}
    assert replication_factor(leaves, specs, mesh) == 2 / 1.25
    assert_sharded(leaves, specs, mesh)
    leaves["few"] = Leaf((4, 2**28))  # 1 GiB of each on a device, and even 1.5
    assert_sharded(leaves, specs | {"few": P("tensor")}, mesh)
    specs["few"] = P()
    with pytest.raises(ShardingError, match=r"33.3% of the state is split over none of fsdp=2, tensor=4"):
        assert_sharded(leaves, specs, mesh)
    with pytest.raises(ShardingError, match=r"holds 5\.0 GiB of the state, 3\.3 times .*: .* split few \(4, "):
        assert_sharded(leaves, specs, mesh, limit=0.5)
    assert_sharded(leaves, specs, mesh, limit=0.5, slack=4 * 2**30)


def test_the_guard_has_nothing_to_say_of_data_alone():
    assert_sharded({"w": Leaf((8,))}, {"w": P()}, make_mesh(MeshConfig(data=8), 8))


def test_the_guard_on_a_mesh_with_other_axes():
    grid = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(grid, ("replica", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ShardingError, match=r"the mesh has replica, model, and none of fsdp, .*axes="):
        assert_sharded({"w": Leaf((8,))}, {"w": P()}, mesh)
    with pytest.raises(ShardingError, match=r"and none of modle. Name its axes"):
        assert_sharded({"w": Leaf((8,))}, {"w": P()}, mesh, axes=("model", "modle"))
    with pytest.raises(ShardingError, match="split over none of model=4"):
        assert_sharded({"w": Leaf((8,))}, {"w": P()}, mesh, axes=("model",))
    assert_sharded({"w": Leaf((8,))}, {"w": P("model")}, mesh, axes=("model",))
    assert_sharded({"w": Leaf((8,))}, {"w": P("model")}, mesh, axes="model")


@pytest.mark.parametrize("function", [summarize, assert_sharded])
def test_a_call_with_a_tree_in_place_of_its_arrays_by_path(function, mesh):
    call = rf"Call it as {function.__name__}\(\*shardings_of\(tree\), mesh\)"
    for leaves, specs in (([1.0], {}), ({"w": Leaf((8,))}, Rules()), ({"w": Leaf((8,))}, {"v": P()})):
        with pytest.raises(ShardingError, match=call):
            function(leaves, specs, mesh)
    with pytest.raises(ConfigError, match=r"mesh is a NoneType, not a Mesh. Make one with"):
        function({}, {}, None)


def test_a_mesh_of_what_is_no_mesh_config():
    with pytest.raises(ConfigError, match=r"make_mesh got a dict, not a MeshConfig. Write MeshConfig"):
        make_mesh({"fsdp": 2}, 8)
