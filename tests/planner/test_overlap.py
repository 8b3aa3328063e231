"""What runs beside the collectives of programs whose times are known by hand."""

from dataclasses import replace

import collective_windows
import pytest

from jaxstack.common.hardware import Chip
from jaxstack.planner.hlo import Collective

# A gather of 64 bytes sends 48 and takes one second, an all-reduce of 64 bytes two. A product takes half a second.
CHIP = Chip(("x",), {"bfloat16": 1024.0}, 1e12, 1, 48.0, "")
MESH = {"data": 1, "fsdp": 4}
PRODUCT = "bf16[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
START = "(bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%s), replica_groups={{0,1,2,3}}, dimensions={0}"
REDUCE = "f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%sum"


def program(*body, result="%w"):
    """Returns a scheduled program with a loop of three turns."""
    lines = "\n".join(f"  {line}" for line in body)
    state = "(s32[], bf16[8,4]{1,0}, bf16[2,4]{1,0}, f32[16]{0})"
    return f"""HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%body (p: {state}) -> {state} {{
  %p = {state} parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %w = bf16[8,4]{{1,0}} get-tuple-element(%p), index=1
  %s = bf16[2,4]{{1,0}} get-tuple-element(%p), index=2
  %x = f32[16]{{0}} get-tuple-element(%p), index=3
{lines}
  ROOT %t = {state} tuple(%n, {result}, %s, %x)
}}

%condition (q: {state}) -> pred[] {{
  %q = {state} parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (r: {state}) -> {state} {{
  %r = {state} parameter(0)
  ROOT %loop = {state} while(%r), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""


@pytest.mark.parametrize(
    ("body", "exposed", "beside"),
    [
        ((f"%g = {START}", "%d = bf16[8,4]{1,0} all-gather-done(%g)", f"%m = {PRODUCT}"), [1.0], [0.0]),
        ((f"%g = {START}", f"%m = {PRODUCT}", "%d = bf16[8,4]{1,0} all-gather-done(%g)"), [0.5], [0.5]),
        # The second gather begins when the first has ended.
        (
            (
                f"%g = {START}",
                f"%h = {START}",
                f"%m = {PRODUCT}",
                "%d = bf16[8,4]{1,0} all-gather-done(%g)",
                f"%o = {PRODUCT}",
                "%e = bf16[8,4]{1,0} all-gather-done(%h)",
            ),
            [0.5, 0.5],
            [0.5, 1.0],
        ),
        # Three products take longer than the gather, and a collective that is not split hides nothing.
        (
            (
                f"%g = {START}",
                *(f"%m.{i} = {PRODUCT}" for i in range(3)),
                "%d = bf16[8,4]{1,0} all-gather-done(%g)",
                f"%y = {REDUCE}",
            ),
            [0.0, 2.0],
            [1.5, 0.0],
        ),
    ],
)
def test_times_by_hand(body, exposed, beside):
    found = collective_windows.read_overlap(program(*body), MESH, CHIP)
    assert [w.times for w in found.windows] == [3] * len(exposed)
    assert [w.exposed for w in found.windows] == pytest.approx(exposed)
    assert [w.hidden_by for w in found.windows] == pytest.approx(beside)
    assert [w.flops for w in found.windows] == pytest.approx([1024 * seconds for seconds in beside])
    assert found.exposed == pytest.approx(3 * sum(exposed))
    products = sum(" dot(" in line for line in body)
    assert found.compute == pytest.approx(1.5 * products)
    assert found.collectives == pytest.approx(3 * sum(w.seconds for w in found.windows))
    assert f"of which {1e3 * found.exposed:.1f} ms are exposed" in collective_windows.format_overlap(found)


@pytest.mark.parametrize("result", ["%w", "%d", "%k"])
def test_a_gather_for_the_next_turn(result):
    """Its result is a result of the turn, through a copy at most."""
    body = (f"%g = {START}", "%d = bf16[8,4]{1,0} all-gather-done(%g)", "%k = bf16[8,4]{1,0} copy(%d)")
    (window,) = collective_windows.read_overlap(program(*body, result=result), MESH, CHIP).windows
    assert window.next_turn == (result != "%w")
    assert (window.kind, window.axes, window.sent) == ("all-gather", ("fsdp",), 48)


@pytest.mark.parametrize(
    ("linked", "mesh", "seconds"),
    [(4, {"data": 8, "fsdp": 4}, 1.0), (2, {"data": 1, "fsdp": 4}, 4.0), (4, {"fsdp": 4, "tensor": 2}, 4.0)],
)
def test_a_group_of_several_hosts_sends_over_their_network_cards(linked, mesh, seconds):
    """The last axes of a mesh fill a host first: four devices along `fsdp`, with two of `tensor` each, need eight."""
    chip = replace(CHIP, linked_devices=linked, network_bandwidth=12.0)
    found = collective_windows._Timeline({}, {}, mesh, chip, {})
    assert found._seconds([Collective("all-gather", ("fsdp",), 4, "bf16", (8, 4), 64, 1)]) == seconds
