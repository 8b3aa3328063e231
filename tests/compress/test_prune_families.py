"""Pruning of models with several stacks: encoder-decoders, diffusion and contrastive models.

A part whose output weights are zero leaves without a trace, all stacks keep the same widths, and what stacks share is
cut once. The run that is made is trained, used and exported like any other.
"""

import json
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes
from test_every_family import batches_of, drawn, flags_of

import jaxstack as js
from jaxstack import families
from jaxstack.cli.compress_quantize import calibration
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.compress import order, prune
from jaxstack.compress.calibrate import Walk
from jaxstack.compress.importance import Importance, OfStack, measure
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.families import contrastive, diffusion, surgery
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.train import main

MODELS = test_meshes.MODELS
HALF = {"heads": 4, "d_ff": 48}
CASES = {
    "t5": (MODELS["t5"], {**HALF, "layers": 1, "encoder_layers": 2}),
    "t5_sigmoid": (
        replace(MODELS["t5_sigmoid"], num_kv_heads=4, moe=replace(test_meshes.EXPERTS["sigmoid"], num_groups=2)),
        {"heads": 6, "d_ff": 20, "experts": 4, "layers": 1},
    ),
    "dit": (MODELS["dit"], {**HALF, "layers": 1}),
    "dit_text": (replace(MODELS["dit_text"], num_kv_heads=4), {**HALF, "layers": 1, "text_layers": 2}),
    "dit_experts": (MODELS["dit_experts"], {**HALF}),
    "coca": (MODELS["coca"], {**HALF, "layers": 1, "encoder_layers": 2, "caption_layers": 1}),
    "clip": (MODELS["clip"], {**HALF, "layers": 1}),
    "unix2": (MODELS["unix2"], {**HALF, "encoder_layers": 1}),
}
SLOW = [name if name in ("t5", "coca") else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def outputs(cfg, values, batch):
    """Returns what a model of a family is used for: logits, velocities, or features and logits of captions."""

    def work(values, batch):
        ctx, family = Context(), families.of(cfg)
        hidden, _ = family.hidden_states(cfg, values, batch, ctx)
        if cfg.family == "diffusion":
            return diffusion.predict(cfg, values, hidden, batch, ctx)
        if cfg.family == "encoder_decoder":
            return family.logits(cfg, values, hidden, ctx)
        found = contrastive.features(cfg, values, hidden, batch, ctx)
        return (*found, contrastive.logits(cfg, values, hidden, ctx)) if cfg.contrastive.caption_layers else found

    return jax.tree.leaves(jax.jit(work)(values, batch))


def same(cfg, values, small, new, batch):
    """Asserts that two models compute the same, up to float32 sums in another order."""
    for one, other in zip(outputs(cfg, values, batch), outputs(small, new, batch), strict=True):
        assert float(jnp.abs(one).max()) > 0
        np.testing.assert_allclose(other, one, atol=1e-4 * float(jnp.abs(one).max()))


def writable(values):
    return jax.tree.map(np.array, values)


def not_kept(rng, count, keep):
    return rng.permutation(count)[keep:]


def remove_parts(cfg, sizes, values, rng):
    """Sets the output weights of as many parts as `sizes` removes to zero, of other layers other ones; in place.

    Returns the layers of each stack that stay.
    """
    small, each = prune.smaller_model(cfg, sizes), cfg.num_heads // cfg.kv_heads
    stay = {}
    for name, stack in families.of(small).layers(small).items():
        layers = values[name]
        depth = len(jax.tree.leaves(layers)[0])
        stay[name] = sorted(rng.permutation(depth)[: stack.depth].tolist())
        shared = not_kept(rng, cfg.kv_heads, small.kv_heads)  # all layers read one table of relative positions
        for layer in range(depth):
            for group in {"attention", "cross"} & layers.keys():
                own = shared if cfg.positions == "relative" and group == "attention" else None
                gone = not_kept(rng, cfg.kv_heads, small.kv_heads) if own is None else own
                for head in gone:
                    layers[group]["w_o"][layer, head * each : (head + 1) * each] = 0
            units = params.flat_spec(stack.spec)
            for path in [path for path in units if path.endswith("w_down")]:
                w, keep = flatten(layers)[path], units[path].shape[-2]
                for one in w[layer] if units[path].batch_axes else [w[layer]]:
                    one[not_kept(rng, len(one), keep)] = 0
            if "moe" in layers and small.moe.num_experts < cfg.moe.num_experts:
                for first in (0, 4):  # of each group, two of four experts are never chosen
                    layers["moe"]["balance"][layer, first + rng.permutation(4)[:2]] = -50
        for layer in set(range(depth)) - {*stay[name]}:
            for path, leaf in flatten(layers).items():
                if path.rpartition("/")[2] in order.OUTPUTS:
                    leaf[layer] = 0
    return stay


@pytest.mark.random
@pytest.mark.parametrize("name", SLOW)
def test_parts_that_add_nothing_are_found_and_leave_without_a_trace(name, seed):
    """Heads, hidden units and layers without output weights have no importance, and the rest computes the same."""
    cfg, given = CASES[name]
    values, rng = writable(drawn(cfg, seed)), np.random.default_rng(seed)
    sizes = prune.smaller_sizes(cfg, given)
    stay = remove_parts(cfg, sizes, values, rng)
    values, batches = jax.tree.map(jnp.asarray, values), batches_of(cfg, seed)
    kept = prune.choose(cfg, sizes, measure(Walk.of(cfg, Context()), values, batches))
    assert {stack: own.layers.tolist() for stack, own in kept.stacks.items()} == stay
    small = prune.smaller_model(cfg, sizes)
    assert prune.sizes_of(small) == sizes
    new = prune.keep(cfg, small, Context(), values, kept)
    assert params.count(families.spec(small)) == sum(a.size for a in jax.tree.leaves(new))
    assert params.count(families.spec(small)) < params.count(families.spec(cfg))
    same(cfg, values, small, new, batches[0])


WIDE = ["t5", "t5_scaled", "unix2", "dit_experts"]


def without_channels(cfg, small, kept, values):
    """Returns writable parameters that neither read nor make the channels that leave."""
    made = writable(values)
    for path, p in params.flat_spec(families.spec(cfg)).items():
        for dim, axis in enumerate(p.axes):
            if axis in ("embed", "expert_embed", "input_embed"):
                own = kept.channels[surgery.width_of(cfg.family, path, axis)]
                mask = np.isin(np.arange(cfg.d_model), own).astype(np.float32)
                flatten(made)[path][...] *= mask.reshape(-1, *(1,) * (len(p.axes) - dim - 1))
    return made


def magnify_norms(cfg, small, new):
    """Multiplies what norms make by the root of the widths' ratio: a root mean square over fewer channels is larger."""
    made, factor = writable(new), (cfg.d_model / small.d_model) ** 0.5
    for path, leaf in flatten(made).items():
        group, _, name = path.rpartition("/")
        if path.endswith("norm/scale") and leaf.shape[-1] == small.d_model:
            leaf[...] *= factor
        if group.endswith("modulation"):  # what a norm without weights makes is multiplied by 1 + these
            for i in (1, 4):
                one = leaf[..., i, :] if i < leaf.shape[-2] else np.zeros(0)
                one[...] = factor * one + (factor - 1 if name == "b" else 0)
    return made


@pytest.mark.random
@pytest.mark.parametrize("name", [WIDE[0], *(pytest.param(one, marks=pytest.mark.slow) for one in WIDE[1:])])
def test_channels_that_nothing_reads_leave_all_stacks(name, seed):
    """Pictures, texts, the condition and the timestep have channels of their own; T5's factor of the head changes."""
    cfg = replace(CASES["t5" if name == "t5_scaled" else name][0], norm_eps=1e-12)
    if cfg.family == "encoder_decoder":
        cfg = replace(cfg, embedding_scale=name == "t5_scaled", head_scale=cfg.d_model**-0.5)
    values, rng, batches = drawn(cfg, seed), np.random.default_rng(seed), batches_of(cfg, seed, 1)
    sizes = prune.smaller_sizes(cfg, {"d_model": 40})
    small = prune.smaller_model(cfg, sizes)
    found = measure(Walk.of(cfg, Context()), values, batches)
    chosen = replace(found, channels={name: rng.random(cfg.d_model) for name in found.channels})
    kept = prune.choose(cfg, sizes, chosen)
    expected = {"t5": {"residual"}, "t5_scaled": {"residual"}, "unix2": {"image", "text"}}
    assert kept.channels.keys() == expected.get(name, {"picture", "condition", "time"})
    cut = without_channels(cfg, small, kept, values)
    new = magnify_norms(cfg, small, prune.keep(cfg, small, Context(), cut, kept))
    assert small.head_scale == (40**-0.5 if name.startswith("t5") else 1)
    assert small.contrastive.features == (64 if name == "unix2" else None)
    same(cfg, cut, small, new, batches[0])


def test_all_layers_keep_the_heads_of_one_table_of_relative_positions():
    """Of attention these are the heads with the largest sum over the layers that stay; `cross` has no table."""
    cfg = replace(MODELS["t5"], num_layers=3, encoder_layers=3, num_heads=4, num_kv_heads=4)
    heads = np.array([[9, 1, 0, 2], [0, 3, 4, 9], [9, 8, 0, 0.0]])
    units = {"mlp": np.ones((3, cfg.ff_width))}
    own = OfStack(np.array([3, 2, 1.0]), {"attention": heads}, units, np.zeros((3, 0)))
    both = replace(own, heads={"attention": heads[:, ::-1], "cross": heads})
    found = Importance({"encoder": own, "decoder": both}, {"residual": np.ones(cfg.d_model)})
    sizes = prune.smaller_sizes(cfg, {"heads": 2, "layers": 2})
    kept = prune.choose(cfg, sizes, found)
    assert kept.stacks["encoder"].layers.tolist() == [0, 1, 2]
    assert kept.stacks["encoder"].heads["attention"].tolist() == [[0, 1]] * 3  # 18, 12, 4, 11
    assert kept.stacks["decoder"].layers.tolist() == [0, 1]
    assert kept.stacks["decoder"].heads["attention"].tolist() == [[0, 3]] * 2  # 11, 4, 4, 9
    assert kept.stacks["decoder"].heads["cross"].tolist() == [[0, 3], [2, 3]]
    values = drawn(cfg, 0)
    new = prune.keep(cfg, prune.smaller_model(cfg, sizes), Context(), values, kept)
    for stack, own in (("encoder", [0, 1]), ("decoder", [0, 3])):
        np.testing.assert_array_equal(new["relative"][stack], values["relative"][stack][:, own])
    np.testing.assert_array_equal(new["decoder"]["cross"]["w_q"][1], values["decoder"]["cross"]["w_q"][1][:, [2, 3]])


def test_a_depth_that_is_not_set_follows_the_layers():
    own, shared = CASES["t5"][0], replace(CASES["t5"][0], encoder_layers=None)
    depths = [
        (prune.sizes_of(cfg).encoder_layers, small.encoder_layers, small.encoder_depth, small.num_layers)
        for cfg, given in (
            (own, {"layers": 1}),
            (shared, {"layers": 1}),
            (shared, {"encoder_layers": 1}),
            (shared, {"layers": 1, "encoder_layers": 2}),
        )
        for small in [prune.smaller_model(cfg, prune.smaller_sizes(cfg, given))]
    ]
    assert depths == [(3, 3, 3, 1), (2, None, 1, 1), (2, 1, 1, 2), (2, 2, 2, 1)]


def test_importance_of_cross_attention_and_of_the_condition(rng):
    """One picture, with a text: from sums of squares, and from numbers of the condition by its formula in float64."""
    cfg = MODELS["dit_text"]
    values, batches = drawn(cfg, 0), batches_of(cfg, 0, 1)
    batches = [{name: a[:1] for name, a in batches[0].items()}]
    walk, grams = Walk.of(cfg, Context()), []

    def look(index, layer, measured):
        grams.append({path: np.asarray(each.gram, np.float64) for path, each in measured().items()})
        return layer

    list(walk.run(values, batches, look))
    found = measure(walk, values, batches)
    own = jax.tree.map(lambda a: np.asarray(a, np.float64), values)
    texts, pictures = grams[:3], grams[3:]
    for layer, gram in enumerate(pictures):
        squares = np.diag(gram["cross/w_o"]).reshape(cfg.num_heads, -1).sum(1)
        sizes = np.sqrt(squares * (own["layers"]["cross"]["w_o"][layer] ** 2).sum((1, 2)))
        np.testing.assert_allclose(found.stacks["layers"].heads["cross"][layer], sizes, rtol=1e-4)
    assert [*found.stacks["text"].heads] == ["attention"]
    words = sum(np.sqrt(np.diag(gram[path])) for gram in texts for path in ("attention/w_q", "mlp/w_up"))
    words = words + sum(np.sqrt(np.diag(gram["cross/w_k"])) for gram in pictures)
    np.testing.assert_allclose(found.channels["text"], words, rtol=1e-4)
    patches = sum(np.sqrt(np.diag(gram[path])) for gram in pictures for path in ("attention/w_q", "cross/w_q"))
    np.testing.assert_allclose(found.channels["picture"], patches, rtol=1e-4)

    def silu(x):
        return x / (1 + np.exp(-x))

    t, half = float(batches[0]["gate_ids"][0, 0]), 128
    angles = (t + 0.5) / cfg.moe.max_timestep * 1000 * 10_000.0 ** (-np.arange(half) / half)
    group = own["condition"]
    units = silu(np.concatenate([np.cos(angles), np.sin(angles)]) @ group["w_time"] + group["b_time"])
    made = silu(units @ group["w_out"] + group["b_out"])
    time = np.abs(units) * np.linalg.norm(group["w_out"], axis=1)
    np.testing.assert_allclose(found.channels["time"], time, rtol=1e-3, atol=1e-4 * time.max())  # angles in float32
    read = np.sqrt((own["layers"]["modulation"]["w"] ** 2).sum((2, 3))).sum(0)
    np.testing.assert_allclose(found.channels["condition"], np.abs(made) * read, rtol=1e-2, atol=1e-3 * read.max())


def test_layers_of_all_stacks_are_left_out_by_the_loss(seed):
    """The losses are the ones of a measured order; the next layer is left out of the stack where it costs least."""
    cfg = replace(test_meshes.config("t5", {}), model=CASES["t5"][0])
    values, batches = drawn(cfg.model, seed), batches_of(cfg.model, seed)
    lines = []
    search = prune.LayerSearch(cfg, Context(), values, batches)
    left, losses = search.leave_out({"encoder": 2, "decoder": 1}, lines.append)
    measured = order.Order(cfg, Context(), values, batches)
    rows = [*measured.layers()]
    assert losses.whole == pytest.approx(measured.whole, rel=1e-5)
    for name, without in losses.without.items():
        np.testing.assert_allclose(without, [row.loss for row in rows if row.stack == name], rtol=1e-5)
    first = min(rows, key=lambda row: row.loss)
    assert lines[0].startswith(f"left out {first.stack} layer {first.layer}: loss {first.loss:.4f} (all layers ")
    other = [row for row in rows if row.stack != first.stack]
    second = min(other, key=lambda row: search.loss({
        one: [i for i in range(3 if one == "encoder" else 2) if (one, i) not in {(row.stack, row.layer), first[:2]}]
        for one in ("encoder", "decoder")
    }))  # fmt: skip
    gone = {(row.stack, row.layer) for row in (first, second)}
    assert {name: steps.tolist() for name, steps in left.items()} == {
        name: [i for i in range(count) if (name, i) not in gone] for name, count in (("encoder", 3), ("decoder", 2))
    }


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [("t5", {"encoder_layers": 4}, "--encoder_layers=4 is more than the 3 of"),
     ("t5", {"text_layers": 1}, r"--text_layers=1, but model\.diffusion\.text_layers=0\. Leave it out"),
     ("dit", {"encoder_layers": 1}, r"--encoder_layers=1, but model\.family=diffusion has no encoder"),
     ("clip", {"caption_layers": 1}, r"--caption_layers=1, but model\.contrastive\.caption_layers=0"),
     ("switch_2", {"d_ff": 8}, r"model\.moe\.layers leaves layers without experts"),
     ("dit_text", {"experts": 2}, "router=timestep each expert has tokens"),
     ("two_widths", {"d_ff": 8}, r"--d_ff=8 is for MLPs and experts of one width, but model\.moe\.d_ff=24"),
     ("scaled", {"d_model": 8}, r"encoder with model\.embedding_scale=true\. Leave --d_model out"),
     ("modernbert_cut", {"layers": 3}, r"\[0, 4, 4\]. The model's 5 are not whole periods\. Leave --layers out"),
     ("branches", {"d_ff": 8}, r"model\.family=branches: pruning .* Export a branch")],
)  # fmt: skip
def test_parts_that_cannot_be_removed(name, given, text):
    text_model = MODELS["dit_text"]
    models = MODELS | {
        "two_widths": replace(text_model, moe=replace(text_model.moe, d_ff=24)),
        "scaled": replace(MODELS["modernbert"], embedding_scale=True),
    }
    with pytest.raises(ConfigError, match=text):
        prune.smaller_sizes(models[name], given)


USES = {
    "encoder_decoder": (
        "--model.activation=relu --model.gated=false --model.qk_norm=false --model.tied_embeddings=true "
        f"--model.head_scale={32**-0.5} --data.eval_fraction=0.2",
        "--layers=1 --d_model=24",
    ),
    "diffusion": ("--model.diffusion.patch_size=2 --optim.lr=0.01", "--layers=1"),
    "contrastive": ("--model.contrastive.caption_layers=2 --optim.lr=0.01", "--encoder_layers=1 --caption_layers=1"),
}


@contextmanager
def on_one_device():
    """Lets commands that train see one of the eight devices that tests have."""
    every = jax.devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *a: every(*a) if a else every()[:1])
        yield


def trained_run(folder, family):
    """Trains a run on what can be learned."""
    flags = [*flags_of(folder, family), *USES[family][0].split()]
    rng, labels = np.random.default_rng(0), np.arange(200) % 3
    bars = np.stack([np.zeros((8, 8)), np.eye(8), 1 - np.eye(8)])
    np.savez(folder / "F.npz", images=bars[labels] * 0.8 + 0.2 * rng.random((200, 8, 8)), labels=labels)
    more = ["--train.steps=120", "--train.eval_every=120", "--checkpoint.every=120"]
    with on_one_device():
        main(parse_config([*flags, *more, f"--run.dir={folder / 'run'}", "--mesh.data=1"]))


def negative(tree):
    return jax.tree.map(lambda a: -a, tree)


def loss_of(run, given, found):
    """Returns the held-out loss of a run that keeps what is most important."""
    sizes = prune.smaller_sizes(run.model, given)
    small = prune.smaller_model(run.model, sizes)
    new = prune.keep(run.model, small, run.context, run.params, prune.choose(run.model, sizes, found))
    return replace(run, config=replace(run.config, model=small), params=new).evaluate().loss


@pytest.mark.slow
@pytest.mark.parametrize("family", USES)
def test_a_pruned_run_of_each_family_is_a_run_like_any_other(family, tmp_path, capsys):
    """What matters least hurts least; the smaller run is used, trained on and exported."""
    trained_run(tmp_path, family)
    out = tmp_path / "small"
    whole = js.load(tmp_path / "run")
    found = measure(Walk.of(whole.model, whole.context), whole.params, calibration(whole, 32))
    reverse = Importance(
        {
            name: replace(own, heads=negative(dict(own.heads)), neurons=negative(dict(own.neurons)))
            for name, own in found.stacks.items()
        },
        negative(dict(found.channels)),
    )
    # The norms of a contrastive model's channels say little: its loss reads the last norm alone, which is not measured.
    width = [{"d_model": 24}] if family != "contrastive" else []
    for given in ({"heads": 2}, {"d_ff": 20}, *width):
        assert loss_of(whole, given, found) < loss_of(whole, given, reverse), given
    capsys.readouterr()
    words = ["compress", "prune", str(tmp_path / "run"), str(out), "--heads=3", "--d_ff=24", "--sequences=16"]
    execute([*words, *USES[family][1].split()])
    said = capsys.readouterr().out
    small = js.load(out)
    count = sum(a.size for a in jax.tree.leaves(small.params))
    assert f"{sum(a.size for a in jax.tree.leaves(whole.params)):,} parameters before, {count:,} after" in said
    assert "left out " in said
    assert ("distill.teacher" in said) == (family != "contrastive")
    described = json.loads((out / "importance.json").read_text())
    assert (out / "importance.png").read_bytes()[:4] == b"\x89PNG"
    before = small.evaluate().loss
    assert f"{before:.4f} after" in said or f"{small.evaluate().bits_per_byte:.4f} after" in said
    pictures = np.load(tmp_path / "F.npz")["images"][:3, ..., None] * 2 - 1
    if family == "encoder_decoder":
        assert (small.model.num_layers, small.model.encoder_depth, small.model.d_model) == (1, 1, 24)
        assert len(described["decoder"]["heads of cross"]["kept"]) == len(described["encoder"]["layers"]["kept"]) == 1
        assert len(small.translate(["ab1", "ab2"], language="up")) == 2
        same_in_transformers(small, out, tmp_path / "hf")
    elif family == "diffusion":
        assert small.model.num_layers == len(described["layers"]["kept"]) == 1
        assert len(described["channels of time"]["kept"]) == 32
        assert small.draw(["0", "2"], steps=4).shape == (2, 8, 8, 1)
    else:
        assert (small.model.encoder_layers, small.model.num_layers) == (1, 2)
        assert described["text"]["layers"]["kept"] == [0, 1]
        assert small.features(pictures).shape == small.features(["0", "1", "2"]).shape == (3, 32)
        assert len(small.captions(pictures)) == 3
        execute(["export", str(out), str(tmp_path / "program"), "--format=stablehlo"])
    assert small.model.num_heads == small.model.kv_heads == 3
    with on_one_device():
        execute(["train", f"--config={out / 'config.yaml'}", "--train.steps=20", "--train.eval_every=20"])
    assert js.load(out).evaluate().loss < before


def same_in_transformers(small, out, folder):
    """Exports a T5, and compares its logits with the ones of transformers, which takes a factor from the width."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    execute(["export", str(out), str(folder)])
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    assert theirs.config.d_model == 24
    rng = np.random.default_rng(0)
    texts, tokens = rng.integers(1, 200, (2, 7)), rng.integers(1, 200, (2, 5))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(texts), decoder_input_ids=torch.tensor(tokens)).logits.numpy()
    batch = {"encoder_tokens": texts, "tokens": tokens}
    batch |= {f"{side}segment_ids": np.ones_like(batch[f"{side}tokens"]) for side in ("encoder_", "")}
    got = outputs(small.model, small.params, jax.tree.map(jnp.asarray, batch))[0]
    np.testing.assert_allclose(got[..., : expected.shape[-1]], expected, atol=1e-4 * np.abs(expected).max())
