"""Properties of the decoder family that hold for every switch and all values."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ENCODERS, EXPERTS, FAMILIES, SMALL, SPARSE, STATE_SPACE
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, RopeScaling
from jaxstack.families.context import make_context
from jaxstack.models import blocks, layers, params
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.layers import AttentionMask, LayerInputs
from jaxstack.models.ops import Ops, implementations
from jaxstack.models.rope import rope_tables, rotate
from jaxstack.sharding import make_mesh

CONTEXTS = {
    "xla": Context(),
    "cpu": Context(ops=Ops(**implementations("cpu"))),
}


def randomised(cfg: ModelConfig, rng: np.random.Generator):
    """Returns parameters without zeros and ones, so that no initial value hides a mistake."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32), params.abstract(families.spec(cfg))
    )


def tokens_for(cfg: ModelConfig, rng: np.random.Generator, batch: int = 2, length: int = 24) -> jax.Array:
    return jnp.asarray(rng.integers(0, cfg.vocab, (batch, length)), jnp.int32)


@pytest.mark.matrix(quick=["llama3", "gemma2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_layer_is_read(family, rng):
    cfg = FAMILIES[family]
    values, tokens = randomised(cfg, rng), tokens_for(cfg, rng)

    def loss(values):
        logits, _ = families.forward(cfg, values, tokens)
        return (logits * jnp.asarray(rng.normal(size=logits.shape), jnp.float32)).sum()

    for path, grad in flatten(jax.grad(loss)(values)).items():
        if path.startswith("layers/"):
            moved = jnp.abs(grad).reshape(cfg.num_layers, -1).max(axis=1)
        else:
            moved = jnp.abs(grad).max()
        assert (moved > 0).all() or path.endswith("/b_k"), f"{path} does not reach the logits"


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_tokens_that_are_not_rows_of_ids_are_refused(kind, rng):
    """Ids are compared where they are known. The first and the last id of the vocabulary are accepted."""
    cfg = FAMILIES["llama3"]
    values = randomised(cfg, rng)

    def forward(tokens):
        return families.forward(cfg, values, kind(tokens))

    with pytest.raises(
        ValueError, match=r"shape \(3,\), but forward reads rows of tokens \[B, S\]. Use tokens\[None\]"
    ):
        forward([1, 2, 3])
    with pytest.raises(ValueError, match=r"shape \(1, 1, 1\), but forward reads rows"):
        forward([[[1]]])
    with pytest.raises(ValueError, match=r"tokens are float32, but ids are integers"):
        forward(np.zeros((1, 2), np.float32))
    for wrong in (cfg.vocab, -1):
        with pytest.raises(
            ValueError, match=rf"contain the id {wrong}, but model.vocab_size={cfg.vocab}. Use ids from 0"
        ):
            forward([[0, wrong]])
    assert forward([[0, cfg.vocab - 1]])[0].shape == (1, 2, cfg.vocab)


def test_a_compiled_forward_reports_an_id_beyond_the_vocabulary_under_debug(rng):
    """Values within `jax.jit` are not checked otherwise. Valid ids give the same logits."""
    cfg = FAMILIES["llama3"]
    values = randomised(cfg, rng)

    def logits(*ids):
        return jax.jit(lambda tokens: families.forward(cfg, values, tokens)[0])(jnp.asarray([ids]))

    plain = logits(0, cfg.vocab - 1)
    assert np.isfinite(logits(0, cfg.vocab)).all()
    with jax.debug_nans(True):
        np.testing.assert_array_equal(logits(0, cfg.vocab - 1), plain)
        with pytest.raises(ValueError, match=f"contain the id {cfg.vocab}"):  # JAX finds NaN and runs without jit
            logits(0, cfg.vocab)


@pytest.mark.parametrize("shards", [1, 2])
def test_under_debug_the_embedding_of_an_id_beyond_the_vocabulary_is_nan(shards, rng):
    """Each device compares with the complete vocabulary, not with its part of it."""
    cfg = dataclasses.replace(FAMILIES["llama3"], vocab_size=64, tied_embeddings=True)
    run = Config(model=cfg, data=DataConfig(batch_size=2), mesh=MeshConfig(data=1, tensor=shards))
    ctx = make_context(run, make_mesh(run.mesh, 2, jax.devices()[:shards]))
    table = jnp.asarray(rng.normal(size=(64, cfg.d_model)), jnp.float32)
    tokens = jnp.asarray([[0, 63, 64, -1]])

    def embed(table, tokens):
        return layers.embed(cfg, {"tokens": table}, tokens, jnp.arange(4), ctx)

    specs = (PartitionSpec("tensor"), PartitionSpec())
    embed = jax.shard_map(embed, mesh=ctx.layout.mesh, in_specs=specs, out_specs=PartitionSpec(None, "tensor"))
    with jax.debug_nans(True):
        compiled = jax.jit(embed).lower(table, tokens).compile()
    found = compiled(*(jax.device_put(x, s) for x, s in zip((table, tokens), compiled.input_shardings[0], strict=True)))
    assert np.isnan(found).all(axis=-1).tolist() == [[False, False, True, True]]
    np.testing.assert_allclose(found[0, :2], table[np.array([0, 63])], rtol=1e-6)


def test_key_bias_cannot_matter_without_positions_in_the_scores(rng):
    """A bias on keys adds the same score to every key of a query, which softmax ignores; it is the exception above."""
    cfg = FAMILIES["gpt2"]
    values, tokens = randomised(cfg, rng), tokens_for(cfg, rng)
    shifted = jax.tree.map(lambda leaf: leaf, values)
    shifted["layers"]["attention"]["b_k"] = values["layers"]["attention"]["b_k"] + 1.0
    a, b = (families.forward(cfg, v, tokens)[0] for v in (values, shifted))
    np.testing.assert_allclose(a, b, atol=2e-3 * float(jnp.abs(a).max()))


@pytest.mark.matrix(quick=["llama3", "gpt2-cpu"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_causality_by_gradients(family, context, rng):
    """Logits at t depend on the token embeddings at 0..t, and on none after t."""
    cfg = FAMILIES[family]
    values, tokens = randomised(cfg, rng), tokens_for(cfg, rng, batch=1)
    t = int(rng.integers(0, tokens.shape[1] - 1))
    table = values["embedding"]["tokens"]
    unique = jnp.arange(tokens.shape[1])[None]  # every position its own row of the table

    def logit_sum(rows):
        own = values | {"embedding": values["embedding"] | {"tokens": jnp.concatenate([rows, table])}}
        grown = dataclasses.replace(cfg, vocab_size=rows.shape[0] + cfg.vocab)
        if not cfg.tied_embeddings:
            own = own | {"head": {"w": jnp.ones((cfg.d_model, grown.vocab)) * jnp.arange(grown.vocab)}}
        x, _ = families.of(grown).hidden_states(grown, own, {"tokens": unique}, CONTEXTS[context])
        return jnp.sin(x[0, t]).sum()

    grads = jnp.abs(jax.grad(logit_sum)(table[tokens[0]])).max(axis=1)
    assert (grads[t + 1 :] == 0).all()
    assert (grads[: t + 1] > 0).all()


def test_sliding_window_by_gradients(rng):
    """With one layer of window 4, the state at t depends on tokens t-3..t alone."""
    cfg = ModelConfig(**SMALL | {"num_layers": 1}, windows=(4,))
    values = randomised(cfg, rng)
    x = jnp.asarray(rng.normal(size=(1, 16, cfg.d_model)), jnp.float32)
    one = jax.tree.map(lambda leaf: leaf[0], values["layers"])

    def at(x):
        y = blocks.block(cfg, Stack(1), one, x, Context(), LayerInputs(), mask=AttentionMask(4))
        return jnp.sin(y[0, 10]).sum()

    moved = jnp.abs(jax.grad(at)(x)[0]).max(axis=1) > 0
    assert moved.tolist() == [7 <= i <= 10 for i in range(16)]


@pytest.mark.matrix(quick=["llama3"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_separate_ones(family, context, rng):
    """Logits of documents packed in one row equal those of each document on its own."""
    cfg = FAMILIES[family]
    values = randomised(cfg, rng)
    lengths = [5, 1, 11, 7]
    documents = [tokens_for(cfg, rng, 1, n) for n in lengths]
    segment_ids = jnp.asarray(np.repeat(np.arange(1, 5), lengths))[None]
    positions = jnp.concatenate([jnp.arange(n) for n in lengths])[None]
    packed, _ = families.forward(
        cfg, values, jnp.concatenate(documents, 1), CONTEXTS[context], positions=positions, segment_ids=segment_ids
    )
    alone = jnp.concatenate([families.forward(cfg, values, d)[0] for d in documents], 1)
    # Float32 sums in another order, through two layers; logits are of order 1 to 10.
    np.testing.assert_allclose(packed, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.matrix(quick=["llama3"])
@pytest.mark.parametrize(
    ("context", "policies"), [("cpu", ["selective", "dots", "full"]), ("xla", ["selective"])], ids=["cpu", "xla"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_remat_changes_no_gradient(family, context, policies, rng):
    """`dots` and `full` name no residuals of kernels, so one set of kernels is enough for them."""
    cfg = FAMILIES[family]
    values, tokens = randomised(cfg, rng), tokens_for(cfg, rng)

    def loss(values, ctx):
        return jnp.tanh(families.forward(cfg, values, tokens, ctx)[0]).mean()

    plain = flatten(jax.grad(loss)(values, CONTEXTS[context]))
    whole = math.sqrt(sum(float(jnp.square(g).sum()) for g in plain.values()))
    for remat in policies:
        again = flatten(jax.grad(loss)(values, dataclasses.replace(CONTEXTS[context], remat=remat)))
        for path, expected in plain.items():
            # The same operations on the same values; fusion may reorder float32 sums. The gradient by a bias of keys
            # is nothing but rounding, for a softmax does not see a shift: float32's of the whole, 1e-7.
            limit = 1e-5 * jnp.linalg.norm(expected) + 1e-7 * whole
            assert jnp.linalg.norm(again[path] - expected) <= limit, (remat, path)


OF_SEVERAL = {
    "windows": dataclasses.replace(FAMILIES["gemma2"], num_layers=4),
    "a layer behind": dataclasses.replace(ENCODERS["modernbert"], num_layers=7),
    "units": dataclasses.replace(STATE_SPACE["hybrid"], num_layers=6),
    "experts": dataclasses.replace(SPARSE["every_second"], num_layers=4),
}
"""Models whose loop over layers runs several in a step; of an encoder, the last layers may be behind the loop."""


@pytest.mark.parametrize("loop", ["scan", pytest.param("unrolled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", OF_SEVERAL)
def test_remat_of_steps_with_several_layers_changes_no_gradient(model, loop, rng):
    cfg = OF_SEVERAL[model]
    values, tokens = randomised(cfg, rng), tokens_for(cfg, rng)

    def loss(values, remat):
        ctx = Context(ops=Ops(layers=loop), remat=remat)
        batch = {"tokens": tokens, "segment_ids": jnp.ones_like(tokens)}
        return jnp.tanh(families.of(cfg).hidden_states(cfg, values, batch, ctx)[0]).mean()

    plain = flatten(jax.grad(loss)(values, "none"))
    for remat in ("selective", "full"):
        again = flatten(jax.grad(loss)(values, remat))
        whole = math.sqrt(sum(float(jnp.square(g).sum()) for g in plain.values()))
        for path, expected in plain.items():  # as above
            limit = 1e-5 * jnp.linalg.norm(expected) + 1e-7 * whole
            assert jnp.linalg.norm(again[path] - expected) <= limit, (remat, path)


def test_recomputation_saves_the_input_of_each_layer_of_a_step():
    """And neither a layer of parameters, nor more than for a model whose steps have one layer."""
    alone = dataclasses.replace(FAMILIES["llama3"], num_layers=6, windows=(8,))
    tokens = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    for remat in ("selective", "full"):
        saved = []
        for windows in ((8,), (8, 0, 8)):
            cfg = dataclasses.replace(alone, windows=windows)
            values = params.abstract(families.spec(cfg))

            def pullback(values, tokens, cfg=cfg, remat=remat):
                ctx = Context(ops=Ops(layers="scan"), remat=remat)
                return jax.vjp(lambda v: families.forward(cfg, v, tokens, ctx)[0], values)[1]

            shapes = jax.tree.leaves(jax.eval_shape(pullback, values, tokens))
            saved.append(sum(leaf.size for leaf in shapes if leaf.shape[:1] in ((6,), (2,))))
        assert saved[1] == pytest.approx(saved[0], rel=0.02), remat


def test_a_model_says_whether_a_turn_of_its_loop_runs_several_layers():
    assert all(families.runs_several(cfg) for cfg in OF_SEVERAL.values())
    assert not families.runs_several(dataclasses.replace(FAMILIES["llama3"], windows=(8,)))


def test_the_layers_of_a_step_are_recomputed_in_turn():
    """A barrier has the layer's input and the gradient of its output: XLA cannot recompute all layers at once."""
    tokens = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    for windows in ((8,), (8, 0, 8)):
        cfg = dataclasses.replace(FAMILIES["llama3"], num_layers=6, windows=windows)
        ctx = Context(ops=Ops(layers="scan"), remat="full")

        def loss(values, tokens, cfg=cfg, ctx=ctx):
            return families.forward(cfg, values, tokens, ctx)[0].mean()

        text = jax.jit(jax.grad(loss)).lower(params.abstract(families.spec(cfg)), tokens).as_text()
        barriers = [line.partition(" : ")[2] for line in text.splitlines() if "optimization_barrier" in line]
        assert len(barriers) == (len(windows) if len(windows) > 1 else 0)
        stream = f"tensor<2x24x{cfg.d_model}xf32>"
        assert all(types.count(stream) == 2 for types in barriers)


def test_remat_policies_recompute_what_they_say():
    """Saved residuals: `none` keeps the most, `dots` the matmul outputs, `full` each layer's input alone."""
    cfg = FAMILIES["llama3"]
    values = params.abstract(families.spec(cfg))
    tokens = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    saved = {}
    for remat in ("none", "selective", "dots", "full"):
        ctx = Context(remat=remat)

        def pullback(values, tokens, ctx=ctx):
            return jax.vjp(lambda v: families.forward(cfg, v, tokens, ctx)[0], values)[1]

        shapes = jax.eval_shape(pullback, values, tokens)
        saved[remat] = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert saved["full"] < saved["dots"] < saved["none"]
    assert saved["full"] < saved["selective"] < saved["none"]


@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling(factor=8.0, original_max_position=64)])
def test_rope_against_complex_numbers_in_float64(scaling, rng):
    """RoPE equals the product of pairs (i, i + K/2) with exp(i * position * frequency), in float64."""
    cfg = ModelConfig(**SMALL | {"d_model": 64}, rope_theta=10000.0, rope_scaling=scaling)
    K = cfg.head_width
    x = rng.normal(size=(2, 40, 4, K))
    positions = rng.integers(0, 200, (2, 40))
    frequencies = np.array([10000.0 ** (-2 * i / K) for i in range(K // 2)])
    if scaling.factor > 1:
        for i, f in enumerate(frequencies):  # Hugging Face's three cases, one by one
            wavelength = 2 * np.pi / f
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            if wavelength > scaling.original_max_position / low:
                frequencies[i] = f / scaling.factor
            elif wavelength >= scaling.original_max_position / high:
                smooth = (scaling.original_max_position / wavelength - low) / (high - low)
                frequencies[i] = (1 - smooth) * f / scaling.factor + smooth * f
        assert len(set(frequencies * 10000.0 ** (np.arange(K // 2) * 2 / K)) - {1.0, 1 / 8}) >= 1
    turned = (x[..., : K // 2] + 1j * x[..., K // 2 :]) * np.exp(1j * positions[..., None] * frequencies)[:, :, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    got = rotate(jnp.asarray(x, jnp.float32), rope_tables(cfg, jnp.asarray(positions)))
    # float32 angles up to 200 radians carry an error of 200 * 2^-24 = 1.2e-5, times |x| of about 4.
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_initial_values_follow_from_seed_and_path_alone():
    """Layer i starts the same in a deeper model, with a wider head, and with or without other parameters."""
    small = ModelConfig(**SMALL)
    deep = dataclasses.replace(small, num_layers=5)
    other = dataclasses.replace(small, tied_embeddings=True, qk_norm=True)
    key = jax.random.key(7)
    a, b, c = (flatten(params.init(key, families.spec(cfg))) for cfg in (small, deep, other))
    for path in ("layers/attention/w_q", "layers/mlp/w_up"):
        assert (a[path] == b[path][:2]).all(), path
        assert (a[path] == c[path]).all(), path
    values = [np.asarray(v).ravel()[:50] for v in a.values() if v.std() > 0]
    assert len({v.tobytes() for v in values}) == len(values), "two parameters share their random numbers"


def expected_start(path: str, cfg: ModelConfig) -> float:
    """Initial values have the declared standard deviation, or are 0 or 1."""
    name = path.rsplit("/", 1)[-1]
    if name == "scale":
        return float(not cfg.norm_unit_offset)
    if name in ("bias", "balance") or name.startswith("b_"):
        return 0.0
    # Two blocks a layer add to the residual stream: their outputs begin smaller, as in GPT-2.
    return 0.3 / math.sqrt(2 * cfg.num_layers) if name in ("w_o", "w_down") else 0.3


@pytest.mark.parametrize("family", FAMILIES | EXPERTS)
def test_initial_spread_is_what_is_declared(family):
    cfg = dataclasses.replace((FAMILIES | EXPERTS)[family], num_layers=4, init_std=0.3)
    values, begins = flatten(params.init(jax.random.key(0), families.spec(cfg))), set()
    for path, value in values.items():
        expected, value = expected_start(path, cfg), np.asarray(value)
        if expected in (0.0, 1.0):
            assert (value == expected).all(), path
            continue
        # The spread of n normal numbers is known to 1/sqrt(2n), and n is 512 at least; three times that. Outputs that
        # were not divided are off by a factor of 2.8.
        assert abs(value.std() / expected - 1) < 3 / math.sqrt(2 * value.size) + 1e-3, path
        assert abs(value.mean()) < 4 * expected / math.sqrt(value.size), path
        own = value.reshape(-1, *value.shape[-2:]) if value.ndim > 2 else value[None]
        firsts = {(row / expected).ravel()[:8].round(5).tobytes() for row in own}
        assert len(firsts) == len(own), f"{path}: two layers or experts begin alike"
        assert not firsts & begins, f"{path} begins like another parameter"
        begins |= firsts


def test_one_layout_however_the_windows_alternate():
    a = families.spec(ModelConfig(**SMALL | {"num_layers": 4}, windows=(8, 0)))
    b = families.spec(ModelConfig(**SMALL | {"num_layers": 4}))
    assert jax.tree.structure(params.abstract(a)) == jax.tree.structure(params.abstract(b))
    assert params.abstract(a) == params.abstract(b)


def test_layers_and_rows_are_dealt_out_in_turns():
    """Block i of step n is layer n * period + i; microbatch i has rows i, i + M, ...; each gets the key."""
    cfg = ModelConfig(**SMALL | {"num_layers": 6}, windows=(8, 0))
    even, odd = blocks.group_layers(len(cfg.windows), {"x": jnp.arange(6)})
    assert (even["x"].tolist(), odd["x"].tolist()) == ([0, 2, 4], [1, 3, 5])
    cut = blocks.split_microbatches({"x": jnp.arange(6), "key": jnp.arange(3)}, 2)
    assert cut["x"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert cut["key"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_the_program_does_not_grow_with_depth():
    def equations(num_layers):
        cfg = ModelConfig(**SMALL | {"num_layers": num_layers}, windows=(8, 0))
        tokens = jnp.zeros((2, 16), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda v: jax.grad(lambda v: families.forward(cfg, v, tokens)[0].sum())(v))(
            params.abstract(families.spec(cfg))
        )
        return str(jaxpr).count(" = ")

    assert equations(4) == equations(48)


def test_bfloat16_is_near_float32(rng):
    cfg = FAMILIES["llama3"]
    values, tokens = params.init(jax.random.key(0), families.spec(cfg)), tokens_for(cfg, rng)
    exact, _ = families.forward(cfg, values, tokens)
    rough, _ = families.forward(cfg, values, tokens, Context(dtype=jnp.bfloat16))
    assert rough.dtype == jnp.float32
    # bfloat16 has 8 bits: 0.4% an operation, a few dozen of them in a row.
    assert jnp.linalg.norm(rough - exact) < 0.03 * jnp.linalg.norm(exact)
    assert not (rough == exact).all()


@pytest.mark.parametrize("family", FAMILIES | EXPERTS)
def test_matrices_and_tables_are_cast_and_nothing_else(family):
    """Norms, biases and routers are not cast: a rounded logit could choose another expert."""
    spec = families.spec((FAMILIES | EXPERTS)[family])
    cast = jax.eval_shape(lambda v: params.cast_matrices(spec, v, jnp.bfloat16), params.abstract(spec))
    for path, leaf in flatten(cast).items():
        name = path.rsplit("/", 1)[-1]
        low = name.startswith("w") or name == "shared_gate" or path in ("embedding/tokens", "embedding/positions")
        assert leaf.dtype == (jnp.bfloat16 if low else jnp.float32), path


def test_dropout_is_off_without_a_key_and_unbiased_with_one(rng):
    x, ids = jnp.ones((2, 100, 500)), jnp.arange(200, dtype=jnp.uint32).reshape(2, 100)
    assert layers.dropout(None, 0.5, x, None) is x
    y = layers.dropout(jax.random.key(1), 0.3, x, ids)
    assert (y[:, ::-1] == layers.dropout(jax.random.key(1), 0.3, x, ids[:, ::-1])).all()  # a token's own, wherever
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.7)}
    assert abs(float(y.mean()) - 1) < 4 * (0.3 / 0.7 / x.size) ** 0.5  # four standard deviations
    cfg = dataclasses.replace(FAMILIES["gpt2"], dropout=0.5)
    values, tokens = randomised(cfg, rng), tokens_for(cfg, rng)
    a, b = (families.forward(cfg, values, tokens, dropout_key=jax.random.key(i))[0] for i in (0, 1))
    assert not jnp.allclose(a, b)
    plain, _ = families.forward(dataclasses.replace(cfg, dropout=0.0), values, tokens)
    assert (families.forward(cfg, values, tokens)[0] == plain).all()


def test_the_model_names_no_mesh_and_no_kernel():
    source = inspect.getsource(ModelConfig)
    assert "mesh" not in source
    assert "implementation" not in source
