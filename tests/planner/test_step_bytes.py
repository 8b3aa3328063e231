"""Bytes and FLOPs of programs whose traffic is known by hand."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxstack.planner import step_bytes

ROWS, WIDTH, TURNS = 512, 256, 7
ARRAY = 4 * ROWS * WIDTH  # bytes of one float32 array


@pytest.fixture(autouse=True)
def no_compile_cache():
    """The cache's keys ignore scopes, so it could return a program with the names of another one."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting once
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def program(f, *shapes, donate=(), trip_counts=None):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(f, donate_argnums=donate).lower(*arrays).compile().as_text()
    return step_bytes.read_program(text, trip_counts)


def moved(found):
    return {part: (read, written) for part, (read, written, _) in step_bytes.by_part(found).items()}


def test_a_product_reads_its_operands_once_and_writes_its_result():
    found = program(jnp.matmul, (ROWS, WIDTH), (WIDTH, 64))
    read, written, flops = step_bytes.by_part(found)["gemm"]
    assert (read, written) == (ARRAY + 4 * WIDTH * 64, 4 * ROWS * 64)
    assert flops == 2 * ROWS * WIDTH * 64


def test_a_triangular_system_has_half_the_flops_of_a_product():
    """Row i of a lower triangular matrix needs i products and i sums for each column of the right side."""
    text = """HloModule solve
ENTRY %main (a: f32[4,64,64], b: f32[4,64,256]) -> (f32[4,64,256], s8[64]) {
  %a = f32[4,64,64]{2,1,0} parameter(0)
  %b = f32[4,64,256]{2,1,0} parameter(1)
  ROOT %solve = (f32[4,64,256]{2,1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$triangularSolve"
}
"""
    _, _, flops = step_bytes.by_part(step_bytes.read_program(text))["gemm"]
    by_hand = 4 * 256 * sum(2 * i for i in range(64))  # the diagonal is one, so nothing is divided
    assert flops == pytest.approx(by_hand, rel=1 / 60)


def test_a_fused_elementwise_function_reads_and_writes_once():
    found = program(lambda x, y: jnp.sin(x) * y + 1, (ROWS, WIDTH), (ROWS, WIDTH))
    assert moved(found) == {"pointwise": (2 * ARRAY, ARRAY)}


def test_a_slice_reads_what_it_copies():
    found = program(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i[0].astype(int), 8), (ROWS, WIDTH), (1,))
    large = {part: sizes for part, sizes in moved(found).items() if sum(sizes) > 64}
    assert large == {"slices": (pytest.approx(8 * 4 * WIDTH, abs=8), 8 * 4 * WIDTH)}


def test_a_scan_writes_only_each_turns_part_of_its_stack():
    def f(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), jnp.cos(x)), x, None, length=TURNS)

    found = program(f, (ROWS, WIDTH))
    assert [loop.trips for loop in found.loops] == [TURNS]
    parts = moved(found)
    scalars = 16 * TURNS  # the loop's index
    assert parts["stacks"] == (0, TURNS * ARRAY)
    assert parts["pointwise"] == (pytest.approx(2 * TURNS * ARRAY, abs=scalars), TURNS * ARRAY)  # x for sine and cosine
    assert parts["fills"] == (pytest.approx(0, abs=scalars), TURNS * ARRAY)  # the stack, before the loop


def test_an_update_in_place_writes_the_row_alone():
    found = program(lambda x, row: x.at[3].set(row), (ROWS, WIDTH), (WIDTH,), donate=(0,))
    assert sum(o.bytes for o in found.operations) <= 3 * 4 * WIDTH + 64


def test_a_conditional_counts_its_larger_branch():
    def f(flag, x):
        return jax.lax.cond(flag[0] > 0, lambda x: jnp.sin(x) @ x.T, lambda x: jnp.zeros((ROWS, ROWS)), x)

    found = program(f, (1,), (ROWS, WIDTH))
    assert step_bytes.by_part(found)["gemm"][2] == 2 * ROWS * ROWS * WIDTH
    assert moved(found).get("fills", (0, 0))[1] <= 64  # the other branch


def test_a_loop_without_a_known_trip_count_is_named():
    def f(x):
        with jax.named_scope("halving"):
            return jax.lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x)

    (loop,) = program(f, (ROWS, WIDTH)).loops
    assert math.isinf(loop.trips)
    assert "halving" in loop.scope
    given = program(f, (ROWS, WIDTH), trip_counts={"halving": 5})
    assert given.loops[0].trips == 5
    assert given.loops[0].is_unnoted
    halved = [o for o in given.operations if o.part == "pointwise" and o.written >= ARRAY]
    assert [o.times for o in halved] == [5]


@pytest.mark.parametrize(("start", "limit", "turns"), [(0, 15, 15), (1, 16, 15)])
def test_a_pipelined_loop_has_its_condition_in_a_fusion(start, limit, turns):
    """XLA:GPU drops its note from a loop whose collectives it moves to the turn before."""
    text = f"""
%compared (p: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  %limit = s32[] constant({limit})
  ROOT %less = pred[] compare(%p, %limit), direction=LT
}}
%condition (s: (s32[], f32[8])) -> pred[] {{
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %fused = pred[] fusion(%i), kind=kLoop, calls=%compared
}}
%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  ROOT %b = (s32[], f32[8]) parameter(0)
}}
ENTRY %main (x: f32[8]) -> (s32[], f32[8]) {{
  %x = f32[8] parameter(0)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %state = (s32[], f32[8]) tuple(%copied, %x)
  ROOT %loop = (s32[], f32[8]) while(%state), condition=%condition, body=%body
}}
"""
    (loop,) = step_bytes.read_program(text).loops
    assert loop.trips == turns
    assert loop.is_unnoted


@pytest.mark.parametrize(("step", "fused", "turns"), [(2, False, 3), (1, False, 5), (2, True, 3)])
def test_the_loop_of_a_collective_matmul_counts_in_steps(step, fused, turns):
    """XLA:TPU unrolls it by 2 and notes nothing. Its counter is unsigned and not the first of its values."""
    add = f"%step = u32[] constant({step})\n  ROOT %next = u32[] add(%i, %step)"
    sums = f"%sum (i: u32[]) -> u32[] {{\n  %i = u32[] parameter(0)\n  {add}\n}}\n" if fused else ""
    more = (
        "%next.1 = u32[] fusion(%i.1), kind=kLoop, calls=%sum"
        if fused
        else (f"%step.1 = u32[] constant({step})\n  %next.1 = u32[] add(%i.1, %step.1)")
    )
    text = f"""
{sums}%condition (s: (f32[8], u32[])) -> pred[] {{
  %s = (f32[8], u32[]) parameter(0)
  %i.0 = u32[] get-tuple-element(%s), index=1
  %limit = u32[] constant(6)
  ROOT %less = pred[] compare(%i.0, %limit), direction=LT
}}
%body (b: (f32[8], u32[])) -> (f32[8], u32[]) {{
  %b = (f32[8], u32[]) parameter(0)
  %x.1 = f32[8] get-tuple-element(%b), index=0
  %i.1 = u32[] get-tuple-element(%b), index=1
  {more}
  ROOT %both = (f32[8], u32[]) tuple(%x.1, %next.1)
}}
ENTRY %main (x: f32[8]) -> (f32[8], u32[]) {{
  %x = f32[8] parameter(0)
  %start = u32[] constant(1)
  %state = (f32[8], u32[]) tuple(%x, %start)
  ROOT %loop = (f32[8], u32[]) while(%state), condition=%condition, body=%body
}}
"""
    (loop,) = step_bytes.read_program(text).loops
    assert loop.trips == turns


@pytest.mark.parametrize("scope", ["attention", "optimizer"])
def test_a_scope_decides_the_part_also_in_a_gradient(scope):
    def f(x):
        with jax.named_scope(scope):
            return jnp.tanh(jnp.sin(x) @ x.T).sum()

    parts = step_bytes.by_part(program(jax.grad(f), (ROWS, WIDTH)))
    assert "gemm" not in parts
    assert parts[scope][2] == 3 * 2 * ROWS * ROWS * WIDTH


def test_the_tables_name_every_part_and_json_holds_them():
    found = program(lambda x: jnp.sin(x) @ x.T, (ROWS, WIDTH))
    text = step_bytes.format_program(found, 1e12, largest=2)
    assert all(part in text for part in ("gemm", "pointwise", "all"))
    assert json.loads(json.dumps(step_bytes.as_json(found)))["parts"]["gemm"]["flops"] == 2 * ROWS * ROWS * WIDTH
