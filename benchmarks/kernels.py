"""Measures and checks every implementation of every hot operation: `python benchmarks/kernels.py [--ops norm ...]`

Needs jax, flax, optax, numpy and pyyaml, and not torch. The implementations are those of `jaxstack.kernels` and
`jaxstack.moe`, so a new one is measured too. If tokamax is installed, its norm and cross-entropy are measured as well,
and on Hopper GPUs its attention and grouped matmul too. Shapes are those of models of 1e9
to 8e9 parameters with random bfloat16 arrays. On a CPU they are those of `train_cpu.py` in float32.

An operation runs in a loop on the device, so that the time has no dispatch. Implementations take turns in rounds, and
the median counts. The result also has, for each operation:
    errors               of the value and of each gradient: the norm of the difference over the norm of XLA's result in
                         float32 with the highest precision of products, computed on this device
    FLOP/s and bytes/s   by what the operation *needs*. Attention needs the pairs that the causal mask leaves, with two
                         matmuls forward and four backward. A norm needs each array once.
    least time           by the chip's data sheet, and by a large matmul and a large copy in the same run
    memory               that the compiler plans beside arguments
It takes about five minutes on a GPU; `--seconds` ends it sooner. `results/kernels_<device>.json` is written after each
round of measurements. `--ops` and `--implementations` write files of their own. `--small` is a smoke test.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import record

TURN_S = 0.02  # least duration of one loop, long beside a dispatch
SLOW_S = 15.0  # seconds to compile; slower implementations are only measured in the first case of an operation
PASSES = ("forward", "forward and backward")


@dataclass(frozen=True)
class Case:
    """One shape of one operation.

    Attributes:
      op: key of the operation in the tables of implementations.
      name: a description of the shape.
      args: makes the arrays when the case begins.
      call: returns the function of the arrays for the name of an implementation.
      flops, bytes: FLOPs and bytes that the operation needs, by pass.
      choice: properties of the case by which implementations are selected.
      others: other functions to measure, by name.
      differentiated: how many arguments have a gradient, counted from the first. With 0 both passes are the value.
      reference: the function to compare with. `None` means the first implementation of the operation's table.
    """

    op: str
    name: str
    args: Callable[[], tuple[Any, ...]]
    call: Callable[[str], Callable[..., Any]]
    flops: tuple[float, float]
    bytes: tuple[float, float]
    choice: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)
    differentiated: int = 1
    reference: Callable[..., Any] | None = None


def tokamax(op: str) -> dict[str, Callable[..., Any]]:
    """Returns tokamax's kernel for the operation, as tokamax selects it, or nothing if tokamax is not installed."""
    try:
        import tokamax as tk
        from absl import flags
    except ImportError:
        return {}
    flags.FLAGS(sys.argv[:1])  # its settings are flags of absl, which would otherwise parse our command line
    functions: dict[str, Callable[..., Any]] = {
        "norm": lambda x, g: tk.layer_norm(x, g, None, epsilon=1e-6, subtract_mean=False),
        "cross_entropy": lambda x, w, t, _: tk.linear_softmax_cross_entropy_loss(
            x.reshape(-1, x.shape[-1]), t.ravel(), w
        ),
    }
    return {"tokamax": functions[op]}


def mosaic_grouped(platform: str) -> dict[str, Callable[..., Any]]:
    """Returns JAX's own grouped matmul for Hopper, with gradients, or nothing on other platforms than GPUs.

    It is an example of JAX's and no implementation of ours: rows without a group stay undefined, widths must be
    multiples of its blocks, and the gradient of the weights asks the first device for its size, so that it cannot be
    compiled ahead of time.
    """
    if platform != "gpu":
        return {}
    import jax
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    blocks = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 1}

    @jax.custom_vjp
    def product(x: Any, w: Any, sizes: Any) -> Any:
        return ragged_dot_mgpu.ragged_dot(x, w, group_sizes=sizes, **blocks)

    def backward(saved: Any, dy: Any) -> Any:
        x, w, sizes = saved
        dx = ragged_dot_mgpu.ragged_dot(dy, w, group_sizes=sizes, transpose_rhs=True, **blocks)
        return dx, transposed_ragged_dot_mgpu.transposed_ragged_dot(x, dy, group_sizes=sizes, **blocks), None

    product.defvjp(lambda *args: (product(*args), args), backward)
    return {"jax's Mosaic GPU": product}


def cases(small: bool, platform: str, dtype: Any) -> list[Case]:
    """Returns the cases of all operations."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxstack import kernels
    from jaxstack.config.scheme import Scheme
    from jaxstack.kernels.coded_weight import CodedWeight, coded_product

    e = jnp.dtype(dtype).itemsize
    seeds = count()
    capability = getattr(jax.devices()[0], "compute_capability", None)

    def random(*shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(jax.random.key(next(seeds)), shape)).astype(dtype)

    found: list[Case] = []

    def attention(
        B: int, S: int, H: int, G: int, K: int, documents: int = 0, softcap: float | None = None, V: int | None = None
    ) -> None:
        V = V or K  # width of values
        lengths = np.random.default_rng(0).multinomial(S - documents, np.ones(max(documents, 1)) / max(documents, 1), B)
        lengths += documents > 0  # none is empty
        ids = [np.repeat(np.arange(row.size), row) for row in lengths]
        pairs = H * float((lengths * (lengths + 1.0)).sum()) / 2
        q, out = e * B * S * H * K, e * B * S * H * V
        k, v = e * B * S * G * K, e * B * S * G * V
        packed = {"segments": True, "max_documents": documents} if documents else {}

        def args() -> tuple[jax.Array, ...]:
            arrays = random(B, S, H, K), random(B, S, G, K), random(B, S, G, V)
            return (*arrays, jnp.asarray(np.stack(ids), jnp.int32)) if documents else arrays

        def call(name: str) -> Callable[..., Any]:
            how: dict[str, Any] = {"scale": K**-0.5, "softcap": softcap, "implementation": name}
            if not documents:
                return lambda q, k, v: kernels.attention(q, k, v, **how)
            return lambda q, k, v, ids: kernels.attention(
                q, k, v, segment_ids=ids, max_documents=documents, **how
            )  # fmt: skip

        what = [f"batch {B}, sequence {S}, heads {H}/{G} of {K}, causal"]
        what += [f"values of {V}"] * (V != K)
        what += [f"{documents} documents"] * (documents > 0) + [f"cap {softcap}"] * (softcap is not None)
        found.append(
            Case(
                "attention",
                ", ".join(what),
                args,
                call,
                (2 * pairs * (K + V), 6 * pairs * (K + V)),
                (q + k + v + out, 3 * (q + k + v + out)),
                {"dtype": jnp.dtype(dtype), "head_dim": K, "value_dim": V, "softcap": softcap}
                | {"compute_capability": capability}
                | packed,
                differentiated=3,
            )
        )

    def norm(N: int, D: int) -> None:
        found.append(
            Case(
                "norm",
                f"RMSNorm, {N} x {D}",
                lambda: (random(N, D), jnp.ones(D)),
                lambda name: lambda x, g: kernels.rms_norm(x, g, eps=1e-6, implementation=name),
                (4.0 * N * D, 14.0 * N * D),
                (2.0 * e * N * D, 5.0 * e * N * D),
                {"dtype": jnp.dtype(dtype), "d_model": D},
                {"copy": lambda x, g: -x} | tokamax("norm"),
                differentiated=2,
            )
        )

    def cross_entropy(B: int, S: int, D: int, V: int) -> None:
        product = 2.0 * B * S * D * V
        arrays = e * (B * S * D + D * V)
        found.append(
            Case(
                "cross_entropy",
                f"{B * S} tokens, width {D}, vocabulary {V}",
                lambda: (
                    random(B, S, D),
                    random(D, V, scale=D**-0.5),
                    jax.random.randint(jax.random.key(next(seeds)), (B, S), 0, V),
                    jnp.ones((B, S)),
                ),
                lambda name: lambda x, w, t, m: kernels.cross_entropy(x, w, t, m, implementation=name),
                (product, 3 * product),
                (arrays, 3 * arrays),
                {"dtype": jnp.dtype(dtype)},
                tokamax("cross_entropy"),
                differentiated=2,
            )
        )

    def grouped(N: int, E: int, D: int, F: int) -> None:
        loads = np.random.default_rng(0).dirichlet(np.full(E, 2.0)) * N  # uneven: the largest is about 3 x the mean
        sizes = loads.astype(np.int32)
        sizes[-1] += N - sizes.sum()
        product, arrays = 2.0 * N * D * F, e * (N * D + E * D * F + N * F)

        def one_by_one(x: jax.Array, w: jax.Array, s: jax.Array) -> jax.Array:
            """Multiplies all rows with one expert at a time: XLA's ragged_dot needs memory for all of these at once."""
            expert = jnp.repeat(jnp.arange(E), s, total_repeat_length=N)

            def add(y: jax.Array, one: Any) -> tuple[jax.Array, None]:
                i, w = one
                return y + jnp.where((expert == i)[:, None], x, 0) @ w, None

            return jax.lax.scan(jax.checkpoint(add), jnp.zeros((N, F), x.dtype), (jnp.arange(E), w))[0]

        found.append(
            Case(
                "moe",
                f"{N} rows of {D} to {F}, {E} uneven experts, the busiest {sizes.max() * E / N:.1f} x the mean",
                lambda: (random(N, D), random(E, D, F, scale=D**-0.5), jnp.asarray(sizes)),
                lambda name: lambda x, w, s: kernels.grouped_matmul(x, w, s, implementation=name),
                (product, 3 * product),
                (arrays, 3 * arrays),
                {"dtype": jnp.dtype(dtype), "compute_capability": capability, "widths": (D, F)},
                {"one dense matmul": lambda x, w, s: x @ w[0]} | mosaic_grouped(platform),
                differentiated=2,
                reference=one_by_one,
            )
        )

    def linear(N: int, D: int, F: int) -> None:
        product, arrays = 2.0 * N * D * F, e * (N * D + D * F + N * F)
        found.append(
            Case(
                "linear",
                f"{N} x {D} x {F}",
                lambda: (random(N, D), random(D, F, scale=D**-0.5)),
                lambda name: lambda x, w: kernels.linear(x, w, implementation=name),
                (product, 3 * product),
                (arrays, 3 * arrays),
                {"dtype": jnp.dtype(dtype)},
                {
                    f"quant {kind}": lambda x, w, kind=kind: kernels.linear(x, w, quant=kind)
                    for kind in ("int8", "fp8", "fp8_tensorwise")
                },
                differentiated=2,
            )
        )

    def gelu(N: int, D: int) -> None:
        found.append(
            Case(
                "gelu",
                f"exact, {N} x {D}",
                lambda: (random(N, D),),
                lambda name: lambda x: kernels.gelu(x, implementation=name),
                (8.0 * N * D, 16.0 * N * D),
                (2.0 * e * N * D, 5.0 * e * N * D),
                {"dtype": jnp.dtype(dtype)},
            )
        )

    def codes(N: int, D: int, F: int, bits: Literal[4, 8], group: int | None) -> None:
        scheme = Scheme(bits, group)

        def call(name: str) -> Callable[..., Any]:
            return lambda x, codes, scales, w: coded_product(x, CodedWeight(codes, scales, bits, D, (F,), name), 1)

        def args() -> tuple[jax.Array, ...]:
            made = CodedWeight.of(random(D, F, scale=D**-0.5), 1, scheme)
            return random(N, D), made.codes, made.scales, made.values(dtype)

        scales = 4.0 * F * (D // group if group else 1)
        found.append(
            Case(
                "codes",
                f"{N} rows of {D} to {F}, {scheme.weights}",
                args,
                call,
                (2.0 * N * D * F, 2.0 * N * D * F),
                (D * F * bits / 8 + scales + e * N * (D + F),) * 2,
                {"dtype": jnp.dtype(dtype), "scheme": scheme},
                {"float weights": lambda x, codes, scales, w: x @ w},
                differentiated=0,
            )
        )

    if small:
        codes(3, 128, 32, 4, 64)
        attention(1, 128, 4, 2, 16)
        attention(2, 64, 4, 2, 16, documents=5)
        attention(1, 128, 4, 4, 24, V=16)
        norm(64, 128)
        cross_entropy(2, 32, 32, 64)
        grouped(256, 8, 32, 64)
        linear(64, 32, 64)
        gelu(64, 64)
        return found
    if platform == "cpu":  # shapes of train_cpu.py's jobs
        codes(1, 512, 1408, 8, None)
        codes(1, 512, 1408, 4, 64)
        attention(4, 512, 8, 4, 64)
        attention(16, 256, 6, 6, 64)
        norm(4096, 512)
        cross_entropy(4, 256, 512, 8192)
        grouped(4096, 64, 256, 512)
        linear(2048, 512, 1408)
        gelu(4096, 1536)
        return found
    codes(1, 4096, 14336, 4, 64)
    codes(16, 4096, 14336, 4, 64)
    codes(1, 4096, 14336, 8, None)
    attention(8, 2048, 16, 16, 128)
    attention(4, 4096, 32, 8, 128)
    attention(2, 8192, 16, 16, 128)
    attention(8, 2048, 32, 32, 64)
    attention(4, 4096, 32, 32, 64)
    attention(2, 4096, 8, 4, 256)
    attention(8, 2048, 16, 16, 128, documents=8)
    attention(1, 8192, 32, 8, 128, documents=32)
    attention(2, 4096, 16, 4, 64, documents=16)
    attention(2, 4096, 8, 4, 256, documents=16, softcap=50.0)
    attention(2, 4096, 16, 16, 192, V=128)
    attention(2, 4096, 16, 16, 192, documents=16, V=128)
    norm(8192, 4096)
    cross_entropy(4, 2048, 2048, 128256)
    cross_entropy(4, 2048, 4096, 128256)
    grouped(32768, 64, 2048, 1408)
    linear(8192, 4096, 4096)
    gelu(8192, 16384)
    return found


def both(f: Callable[..., Any], differentiated: int) -> Callable[..., Any]:
    """Returns a function of incoming gradients and the arguments of `f`. It computes the value and the gradients."""
    import jax

    def run(dy: Any, *args: Any) -> Any:
        held = args[differentiated:]
        y, back = jax.vjp(lambda *given: f(*given, *held), *args[:differentiated])
        return y, back(dy)

    return run


def incoming(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns random incoming gradients of `f`. The value in their place would nearly cancel in a norm's gradient."""
    import jax

    y = jax.eval_shape(f, *args)
    return jax.random.normal(jax.random.key(1), y.shape).astype(y.dtype)


def in_float32(case: Case, table: Any, args: tuple[Any, ...]) -> Any:
    """Returns value and gradients of a case's reference in float32 with the highest precision of products."""
    import jax
    import jax.numpy as jnp

    plain = next(iter(table))
    dy = incoming(case.call(plain), args)  # in the dtype of the comparison, so that all have equal ones
    wide = [a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in (dy, *args)]
    f = both(case.reference or case.call(plain), case.differentiated)
    with jax.default_matmul_precision("highest"):
        return jax.block_until_ready(jax.jit(f)(*wide))


def errors(found: Any, expected: Any) -> list[float]:
    """Returns the relative error of each array of a tree: the norm of the difference over the norm of the expected.

    Raises:
      FloatingPointError: an array is not finite.
    """
    import jax
    import jax.numpy as jnp

    def one(a: Any, b: Any) -> Any:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30)

    values = [float(jax.jit(one)(a, b)) for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    if not all(map(math.isfinite, values)):
        raise FloatingPointError("the result is not finite")
    return values


class Loop:
    """A function that runs repeatedly on the device.

    A barrier makes each turn depend on the last one, so that XLA removes none. The number of turns is a constant of the
    program, because a GPU would otherwise ask the host before every turn. The first results are compared with
    `expected`.
    """

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], expected: Any = None) -> None:
        import jax
        import jax.numpy as jnp

        def first_of(out: Any) -> Any:
            return sum(leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(out))

        def turn(_: Any, state: Any) -> Any:
            args, _ = jax.lax.optimization_barrier(state)
            return args, f(*args)

        def run(*args: Any) -> Any:
            out = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(f, *args))
            return first_of(jax.lax.fori_loop(0, self.turns, turn, (args, out))[1])

        begin = time.perf_counter()
        once: Any = jax.jit(f).lower(*args).compile()
        self.compile_s = time.perf_counter() - begin
        self.memory = once.memory_analysis()
        out = once(*args)
        if not math.isfinite(first_of(out)):
            raise FloatingPointError("the result is not finite")
        self.errors = None if expected is None else errors(out, expected)
        del out
        self._args, self.times = args, []  # type: tuple[Any, list[float]]
        begin = time.perf_counter()
        jax.block_until_ready([once(*args) for _ in range(3)][-1])
        self.turns = min(max(round(TURN_S / ((time.perf_counter() - begin) / 3)), 1), 2000)
        if self.compile_s > SLOW_S:  # long enough without a loop: calls queue on the device
            self._run = lambda *args: first_of([once(*args) for _ in range(self.turns)][-1])
        else:
            self._run = jax.jit(run).lower(*args).compile()
        self.measure()
        self.times.clear()

    def measure(self) -> None:
        begin = time.perf_counter()
        float(self._run(*self._args))  # waits for the result
        self.times.append((time.perf_counter() - begin) / self.turns)


def run_case(
    case: Case, table: Any, platform: str, rounds: int, peaks: Any, only: list[str] | None, slow: dict[Any, float]
) -> Iterator[dict[str, Any]]:
    """Measures every implementation of a case and yields its record after each round."""
    from jaxstack.kernels import implementation as choice

    loops: dict[tuple[str, str], Loop] = {}
    left_out: dict[str, str] = {}
    args = case.args()
    try:
        expected = in_float32(case, table, args)
    except Exception as error:  # from any compiler, or out of memory; times are measured anyway
        expected, left_out["the reference"] = None, f"{type(error).__name__}: {str(error)[:300]}"
    ways = {name: case.call(name) for name in table if name != "reference" and (only is None or name in only)}
    for name, f in (ways | case.others).items():
        if name in table:
            try:
                choice.select_implementation(case.op, table, name, platform, case.choice)
            except ValueError as error:
                left_out[name] = str(error)
                continue
            if (case.op, name) in slow and only is None:
                left_out[name] = f"takes {slow[case.op, name]:.0f} s to compile; --implementations {name} measures it"
                continue
        for passed in PASSES:
            if name == "copy" and passed != "forward":
                continue
            compared = expected if name in table else None
            try:
                if passed == "forward":
                    loop = Loop(f, args, None if compared is None else compared[0])
                else:
                    loop = Loop(both(f, case.differentiated), (incoming(f, args), *args), compared)
                loops[name, passed] = loop
                if loop.compile_s > SLOW_S:
                    slow[case.op, name] = loop.compile_s
            except Exception as error:  # from any compiler; other implementations are still measured
                left_out[f"{name}, {passed}"] = f"{type(error).__name__}: {str(error)[:300]}"
    for turn in range(rounds):
        names = list(loops)
        first = turn % max(len(names), 1)
        for key in names[first:] + names[:first]:  # no implementation always runs after the same one
            loops[key].measure()
        yield {
            "op": case.op,
            "case": case.name,
            "flops": dict(zip(PASSES, case.flops, strict=True)),
            "bytes": dict(zip(PASSES, case.bytes, strict=True)),
            "rows": [row(case, key, loop, peaks) for key, loop in loops.items()],
            "left_out": left_out,
        }


def row(case: Case, key: tuple[str, str], loop: Loop, peaks: Any) -> dict[str, Any]:
    """Returns the figures of one implementation and pass."""
    which = PASSES.index(key[1])
    seconds, flops, size = median(loop.times), case.flops[which], case.bytes[which]
    least = {name: max(flops / peak, size / bandwidth) for name, (peak, bandwidth) in peaks.items()}
    return {
        "implementation": key[0],
        "pass": key[1],
        "ms": round(1e3 * seconds, 4),
        "rounds": len(loop.times),
        "errors": loop.errors,
        "compile_s": round(loop.compile_s, 1),
        "flops_per_s": round(flops / seconds),
        "bytes_per_s": round(size / seconds),
        "least_ms": {name: round(1e3 * value, 4) for name, value in least.items()},
        "of_roofline": {name: round(value / seconds, 3) for name, value in least.items()},
        "temporary_bytes": loop.memory.temp_size_in_bytes,
        "output_bytes": loop.memory.output_size_in_bytes,
        "argument_bytes": loop.memory.argument_size_in_bytes,
    }


def show(found: dict[str, Any]) -> None:
    """Prints the record of a case."""
    for one in found["rows"]:
        share = next(reversed(one["of_roofline"].values()), None)
        note = "  (more than memory provides: probably cached)" if share and share > 1.1 else ""
        error = f"{max(one['errors']):.1e}" if one["errors"] else "-"
        print(
            f"  {one['pass']:<22} {one['implementation']:<18} {one['ms']:>10.3f} ms "
            f"{one['flops_per_s'] / 1e9:>10,.1f} GFLOP/s {one['bytes_per_s'] / 1e9:>8.1f} GB/s "
            f"{one['temporary_bytes'] / 2**20:>9.0f} MiB temporary  error {error}{note}",
            flush=True,
        )
    for name, why in found["left_out"].items():
        print(f"  {name}: skipped: {why[:160]}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--ops", nargs="+", help="operations to measure (default: all that have cases)")
    arguments.add_argument("--implementations", nargs="+", help="to measure (default: all that run on this device)")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--seconds", type=float, default=280, help="seconds after which no new case starts")
    arguments.add_argument("--small", action="store_true", help="smoke test with tiny shapes")
    arguments.add_argument("--out", type=Path, help="folder of the result (default: results/; --small: no file)")
    given = arguments.parse_args(argv)
    begin = time.perf_counter()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")

    import jax

    from jaxstack.common.hardware import CHIPS, chip_name
    from jaxstack.kernels import implementation as choice
    from jaxstack.models.ops import OPS
    from jaxstack.planner import measure

    device = jax.devices()[0]
    platform = choice.platform_of(device)
    dtype = "float32" if platform == "cpu" else "bfloat16"
    peaks: dict[str, tuple[float, float]] = {}
    if (name := chip_name(device.device_kind)) is not None:
        peaks["data sheet"] = (CHIPS[name].flops[dtype], CHIPS[name].hbm_bandwidth)
    if not given.small:
        here = measure.this_chip(device, dtype)
        peaks["measured"] = (here.flops[dtype], here.hbm_bandwidth)
        print(f"{device.device_kind}: a matmul reaches {here.flops[dtype] / 1e12:.4g} TFLOP/s, a copy "
              f"{here.hbm_bandwidth / 1e9:.1f} GB/s", flush=True)  # fmt: skip
    every = cases(given.small, platform, dtype)
    known = {case.op for case in every}
    print(f"no cases for {', '.join(op for op in OPS if op not in known)}", flush=True)
    found: list[dict[str, Any]] = []
    skipped: list[str] = []

    def write() -> None:
        if given.small and given.out is None:
            return
        result = {
            "device": device.device_kind,
            "dtype": dtype,
            "load_average": os.getloadavg()[0],
            "peaks": {key: {"flops_per_s": peak, "bytes_per_s": rate} for key, (peak, rate) in peaks.items()},
            "skipped": skipped,
            "cases": found,
        }
        variant = [*(given.ops or ()), *(given.implementations or ())]
        record.record(record.name_of("kernels", device.device_kind, *variant), result, given.out)

    slow: dict[Any, float] = {}
    for case in every:
        if given.ops and case.op not in given.ops:
            continue
        if time.perf_counter() - begin > given.seconds:
            skipped.append(f"{case.op}: {case.name}")
            continue
        print(f"{case.op}: {case.name}", flush=True)
        found.append({})
        for found[-1] in run_case(case, OPS[case.op], platform, given.rounds, peaks, given.implementations, slow):
            write()
        show(found[-1])
    for name in skipped:
        print(f"no time left for {name}", flush=True)
    write()
    if not any(row for case in found for row in case["rows"]):
        sys.exit("nothing ran")


if __name__ == "__main__":
    main()
