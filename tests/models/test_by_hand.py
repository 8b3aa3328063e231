"""The decoder family written a second time, in NumPy and float64, one token and one head at a time.

Most other tests compare jaxstack with itself, and so see no error that both sides share. This file shares nothing with
the package but the names of parameters and of configuration keys.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import DELTA, EXPERTS, FAMILIES, NEAR, SMALL, SPARSE, STATE_SPACE

from jaxstack import families
from jaxstack.config import LatentConfig, LoraConfig, ModelConfig, MoEConfig, RopeScaling
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.training import losses

# Values that no default has, so that a constant in the wrong place shows.
ODD = {"norm_eps": 0.07}
SHARED = FAMILIES | NEAR | EXPERTS | SPARSE | DELTA | STATE_SPACE
MODELS = {name: dataclasses.replace(cfg, **ODD) for name, cfg in SHARED.items()} | {
    "gated_bias": ModelConfig(
        **SMALL, **ODD, norm="layer", positions="none", activation="gelu", bias=True, head_dim=12, num_kv_heads=1,
        attention_scale=0.41, post_norm=True, embedding_scale=True, qk_norm=True, windows=(3,),
    ),
    "plain_relu2": ModelConfig(
        **SMALL, **ODD, gated=False, activation="relu2", norm_unit_offset=True, rope_theta=77.0, logit_softcap=2.0
    ),
    "layer_unit_offset": ModelConfig(
        **SMALL, **ODD, norm="layer", norm_bias=True, norm_unit_offset=True, rope_scaling=RopeScaling("linear", 3.0)
    ),
    "switch": ModelConfig(
        **SMALL, **ODD,
        moe=MoEConfig(
            num_experts=3, top_k=1, normalize=False, d_ff=20, aux_loss_weight=0.7, z_loss_weight=0.3, shared_experts=2
        ),
    ),
}  # fmt: skip


ADAPTED = {f"{name}_lora": dataclasses.replace(MODELS[name], lora=LoraConfig(3, 5.0)) for name in ("gpt2", "mixtral")}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def activate(name, x):
    if name == "silu":
        return x * sigmoid(x)
    if name == "gelu":
        return x * np.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)))(x)
    if name == "relu2":
        return np.where(x > 0, x * x, 0)
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))  # sqrt(2 / pi)


def norm(cfg, p, x, kind=None):
    if p is None:  # without weights
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + cfg.norm_eps)
    if (kind or cfg.norm) == "layer":
        gain = p["scale"] + 1 if cfg.norm_unit_offset else p["scale"]
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + cfg.norm_eps) * gain
        return y + p["bias"] if cfg.bias or cfg.norm_bias else y
    gain = p["scale"] + 1 if cfg.norm_unit_offset else p["scale"]
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) * gain


def rotated(cfg, x, position):
    """Rotates the first R elements of a head at a position: each pair (i, i + R/2) is a complex number."""
    width = int(len(x) * cfg.rotary_fraction)
    half = width // 2
    frequency = np.array([cfg.rope_theta ** (-2 * i / width) for i in range(half)])
    s, sharper = cfg.rope_scaling, 1.0
    if s.factor > 1 and s.kind == "yarn":
        # Where an element turns `beta` times in the original context: theta^(2 i / R) = original / (2 pi beta).
        first, last = (
            width * np.log(s.original_max_position / (2 * np.pi * beta)) / (2 * np.log(cfg.rope_theta))
            for beta in (32, 1)
        )
        first, last = max(np.floor(first), 0), min(np.ceil(last), width - 1)
        for i, f in enumerate(frequency):
            slowed = min(max((i - first) / (last - first), 0), 1)
            frequency[i] = slowed * f / s.factor + (1 - slowed) * f
        sharper = s.attention_factor or 0.1 * np.log(s.factor) + 1
    if s.kind == "linear":
        frequency /= s.factor
    if s.kind == "dynamic":  # the base of a text that is `factor` times as long as the original context
        base = cfg.rope_theta * (s.factor * s.factor - (s.factor - 1)) ** (width / (width - 2))
        frequency = np.array([base ** (-2 * i / width) for i in range(half)])
    for i, f in enumerate(frequency if s.factor > 1 and s.kind == "llama3" else ()):
        wavelength = 2 * np.pi / f
        if wavelength > s.original_max_position / s.low_freq_factor:
            frequency[i] = f / s.factor
        elif wavelength > s.original_max_position / s.high_freq_factor:
            part = (s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            frequency[i] = (1 - part) * f / s.factor + part * f
    first, second = (x[:width:2], x[1:width:2]) if cfg.rotary_interleaved else (x[:half], x[half:width])
    turned = sharper * (first + 1j * second) * np.exp(1j * position * frequency)
    both = np.stack([turned.real, turned.imag], 1 if cfg.rotary_interleaved else 0).ravel()
    return np.concatenate([both, x[width:]])


def head_norm(cfg, p, x):
    """Normalises queries or keys [S, H, K], each head or all heads of a token."""
    if cfg.qk_norm_over == "head":
        return norm(cfg, p, x, "rms")
    return norm(cfg, {"scale": p["scale"].ravel()}, x.reshape(len(x), -1), "rms").reshape(x.shape)


def attention(cfg, p, x, window, segments, positions, rotates=True):
    """Computes attention of one sequence [S, D]."""
    heads, groups, width = (
        cfg.num_heads,
        cfg.num_kv_heads or cfg.num_heads,
        cfg.head_dim or cfg.d_model // cfg.num_heads,
    )
    q, k, v = (np.einsum("sd,dhk->shk", x, p[f"w_{name}"]) for name in "qkv")
    if "b_q" in p:
        q, k, v = q + p["b_q"], k + p["b_k"], v + p["b_v"]
    if cfg.clip_qkv:
        q, k, v = (np.minimum(np.maximum(a, -cfg.clip_qkv), cfg.clip_qkv) for a in (q, k, v))
    if cfg.qk_norm:
        q, k = head_norm(cfg, p["q_norm"], q), head_norm(cfg, p["k_norm"], k)
    if cfg.positions == "rope" and rotates:
        q, k = (
            np.array([[rotated(cfg, h, t) for h in row] for row, t in zip(a, positions, strict=True)]) for a in (q, k)
        )
    scale = cfg.attention_scale or 1 / math.sqrt(width)
    y = np.zeros_like(x) + p.get("b_o", 0)
    for h in range(heads):
        g = h // (heads // groups)
        for t in range(len(x)):
            seen = [j for j in range(t + 1) if (not window or t - j < window) and segments[j] == segments[t]]
            scores = k[seen, g] @ q[t, h] * scale
            if cfg.attention_softcap:
                scores = cfg.attention_softcap * np.tanh(scores / cfg.attention_softcap)
            if cfg.attention_sinks:  # one more score, without a value
                scores = np.append(scores, p["sinks"][h])
            mixed = softmax(scores)[: len(seen)] @ v[seen, g]
            if cfg.attention_gate:
                mixed = mixed * sigmoid(x[t] @ p["w_gate"][:, h])
            y[t] += mixed @ p["w_o"][h]
    return y


def delta_rule(cfg, p, x, window, segments, positions, rotates=True):
    """Computes a layer of the gated delta rule of one sequence [S, D], with a state for each head."""
    sizes = cfg.delta

    def convolved(name, head):
        """Returns what the convolution makes of the projection of one head, reading tokens of the same document."""
        read, made = x @ p[f"w_{name}"][:, head], []
        for t in range(len(x)):
            last = [j for j in range(t + 1) if t - j < sizes.taps and segments[j] == segments[t]]
            made.append(sum(p[f"taps_{name}"][sizes.taps - 1 - (t - j), head] * read[j] for j in last))
        return activate("silu", np.array(made))

    y = np.zeros_like(x)
    for h in range(sizes.value_heads):
        g = h // (sizes.value_heads // sizes.key_heads)
        q, k, v = convolved("q", g), convolved("k", g), convolved("v", h)
        q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        for t in range(len(x)):
            if t == 0 or segments[t] != segments[t - 1]:
                state = np.zeros((sizes.key_dim, sizes.value_dim))
            state = state * np.exp(
                -np.exp(p["rate"][h]) * np.log1p(np.exp(x[t] @ p["w_decay"][:, h] + p["b_decay"][h]))
            )
            state = state + np.outer(k[t], sigmoid(x[t] @ p["w_beta"][:, h]) * (v[t] - k[t] @ state))
            read = q[t] @ state / math.sqrt(sizes.key_dim)
            read = read / np.sqrt((read**2).mean() + cfg.norm_eps) * p["norm"]["scale"]
            y[t] += (read * activate("silu", x[t] @ p["w_z"][:, h])) @ p["w_o"][h]
    return y


def state_space(cfg, p, x, window, segments, positions, rotates=True):
    """Computes a state-space layer of one sequence [S, D], with a state for each head."""
    sizes = cfg.ssm

    def convolved(name, head, t):
        """Returns what the convolution makes of one head's or group's projection of token t."""
        total = p[f"offset_{name}"][head].copy()
        for ago in range(min(t + 1, sizes.taps)):
            if segments[t - ago] == segments[t]:
                total += p[f"taps_{name}"][sizes.taps - 1 - ago, head] * (x[t - ago] @ p[f"w_{name}"][:, head])
        return activate("silu", total)

    each = sizes.heads // sizes.groups
    y = np.zeros_like(x)
    for g in range(sizes.groups):
        states = np.zeros((each, sizes.state_dim, sizes.head_dim))
        for t in range(len(x)):
            if t == 0 or segments[t] != segments[t - 1]:
                states[:] = 0
            key, query = (convolved(name, g, t) for name in "bc")
            read = np.zeros((each, sizes.head_dim))
            for i in range(each):
                h = g * each + i
                values = convolved("x", h, t)
                step = np.log1p(np.exp(x[t] @ p["w_step"][:, h] + p["step_bias"][h]))
                states[i] = states[i] * np.exp(-step * np.exp(p["rate"][h])) + step * np.outer(key, values)
                read[i] = query @ states[i] + p["skip"][h] * values
                read[i] *= activate("silu", x[t] @ p["w_z"][:, h])
            read = read / np.sqrt((read**2).mean() + cfg.norm_eps) * p["norm"]["scale"][g * each : (g + 1) * each]
            y[t] += np.einsum("hp,hpd->d", read, p["w_o"][g * each : (g + 1) * each])
    return y


def latent_attention(cfg, p, x, window, segments, positions, rotates=True):
    """Computes latent attention of one sequence [S, D]: each head's keys and values come from narrow vectors."""
    sizes, rotary = cfg.latent, cfg.latent.rotary_dim
    inner = dataclasses.replace(cfg, norm_eps=1e-6)
    turn = lambda a, t: rotated(dataclasses.replace(cfg, latent=LatentConfig()), a, t)  # noqa: E731
    down = x @ p["w_kv_down"]
    latents = norm(inner, p["kv_norm"], down[:, : sizes.kv_rank], "rms")
    shared = np.array([turn(a, t) for a, t in zip(down[:, sizes.kv_rank :], positions, strict=True)])
    read = norm(inner, p["q_norm"], x @ p["w_q_down"], "rms")
    scale = 1 / math.sqrt(cfg.head_dim)
    if cfg.rope_scaling.factor > 1:
        scale *= (0.1 * sizes.mscale * math.log(cfg.rope_scaling.factor) + 1) ** 2
    y = np.zeros_like(x)
    for h in range(cfg.num_heads):
        k = np.concatenate([latents @ p["w_k"][:, h], shared], 1)
        v = latents @ p["w_v"][:, h]
        for t in range(len(x)):
            q = read[t] @ p["w_q"][:, h]
            q[-rotary:] = turn(q[-rotary:], positions[t])
            seen = [j for j in range(t + 1) if (not window or t - j < window) and segments[j] == segments[t]]
            y[t] += softmax(k[seen] @ q * scale) @ v[seen] @ p["w_o"][h]
    return y


def mlp(cfg, p, x, limit=None):
    up = x @ p["w_up"] + p.get("b_up", 0)
    gate = x @ p["w_gate"] + p.get("b_gate", 0) if cfg.gated else None
    if limit:
        gate, up = np.minimum(gate, limit), np.maximum(np.minimum(up, limit), -limit)
        return (up + 1) * gate * sigmoid(1.702 * gate) @ p["w_down"] + p["b_down"]
    if cfg.activation == "xielu":
        rising, falling = (np.log1p(np.exp(p[f"slope_{sign}"])) for sign in ("positive", "negative"))
        hidden = np.where(up > 0, rising * up**2, (0.5 + falling) * (np.exp(np.minimum(up, 0)) - 1 - up)) + up / 2
        return hidden @ p["w_down"]
    hidden = activate(cfg.activation, up) if gate is None else activate(cfg.activation, gate) * up
    return hidden @ p["w_down"] + p.get("b_down", 0)


def choose(moe, p, x, gate):
    """Returns the experts of one token, their weights, its scores and its logits."""
    E = moe.num_experts
    if moe.router == "domain":
        return [gate], [1.0], None, None
    if moe.router == "timestep":
        return [gate * E // moe.max_timestep], [1.0], None, None
    logits = x @ p["router"] + p.get("router_bias", 0)
    if moe.router == "softmax":
        scores = softmax(logits)
        chosen = list(np.argsort(-scores)[: moe.top_k])
        total = scores[chosen].sum() if moe.normalize else 1.0
        return chosen, list(scores[chosen] / total), scores, logits
    scores = sigmoid(logits)
    biased = (scores + p["balance"]).reshape(moe.num_groups, -1)
    best = np.argsort(-np.sort(biased)[:, -2:].sum(-1))[: moe.top_k_groups]
    allowed = np.isin(np.arange(E) // (E // moe.num_groups), best)
    chosen = list(np.argsort(-np.where(allowed, biased.ravel(), -np.inf))[: moe.top_k])
    return chosen, list(moe.routed_scale * scores[chosen] / scores[chosen].sum()), scores / scores.sum(), logits


def experts(cfg, p, x, gates, counts, sums):
    """Computes experts for one sequence [S, D], and adds the statistics of its counted tokens to `sums`."""
    moe, S = cfg.moe, len(x)
    routed = [choose(moe, p, row, gates[t]) for t, row in enumerate(x)]
    pairs = [(t, e, w) for t, (chosen, weights, *_) in enumerate(routed) for e, w in zip(chosen, weights, strict=True)]
    kept, k = [], len(routed[0][0])
    for e in range(moe.num_experts):
        own = [pair for pair in pairs if pair[1] == e]
        room = len(own) if moe.capacity_factor is None else math.ceil(moe.capacity_factor * S * k / moe.num_experts)
        kept += sorted(own, key=lambda pair: -pair[2])[:room]
    counted = [pair for pair in pairs if counts[pair[0]]]
    load = np.bincount([e for _, e, _ in counted], minlength=moe.num_experts)
    sums["load"] += load
    sums["dropped"] += len([pair for pair in counted if pair not in kept])
    if routed[0][2] is not None and counts.any():
        scores = np.array([scores for _, _, scores, _ in routed])[counts]
        sums["balance"] += (moe.num_experts / (k * counts.sum()) * load * scores.mean(0)).sum()
        sums["entropy"] -= (scores * np.log(scores)).sum()
        sums["z"] += sum(np.log(np.exp(routed[t][3]).sum()) ** 2 for t in np.flatnonzero(counts))
    y = mlp(cfg, p["shared"], x) if moe.shared_experts else np.zeros_like(x)
    y = y * sigmoid(x @ p["shared_gate"]) if moe.shared_gate else y
    matrices = [f"{kind}_{name}" for kind in "wb" for name in ("up", "gate", "down")]
    for t, e, w in kept:
        own = {name: p[name][e] for name in matrices if name in p}
        y[t] += w * mlp(cfg, own, x[t : t + 1], moe.swiglu_limit)[0]
    return y


SPARSE_PLACES = {
    (False, True) * 2: ["layers/layer_0", "layers/layer_1"] * 2,
    (False, True, True, False, True, False): ["dense_layers", "layers", *["layers_2/layer_0", "layers_2/layer_1"] * 2],
}
"""Where the layers of models are of which some have experts, by the layers that have."""


def has_experts(cfg, layer):
    """Whether a layer has experts."""
    layers = cfg.moe.layers
    if layers.numbers:
        return layer in layers.numbers
    return layer in range(layers.first, cfg.num_layers, layers.every)


def place(cfg, layer):
    """Returns the group of parameters of a layer, and its row there."""
    places = SPARSE_PLACES.get(tuple(has_experts(cfg, i) for i in range(cfg.num_layers)))
    if places is None:
        first = cfg.moe.layers.first
        places = ["dense_layers"] * first + ["layers"] * (cfg.num_layers - first)
    return places[layer], places[:layer].count(places[layer])


def by_hand(cfg, values, tokens, segments, positions, gates, weights):
    """Returns logits of a batch [B, S, V], and the experts' statistics, summed over layers and tokens."""
    E = cfg.moe.num_experts
    sums = {"balance": 0.0, "z": 0.0, "entropy": 0.0, "dropped": 0, "load": np.zeros(E)}
    rows = []
    for ids, segment, position, gate, counts in zip(tokens, segments, positions, gates, weights != 0, strict=True):
        x = values["embedding"]["tokens"][ids] * (math.sqrt(cfg.d_model) if cfg.embedding_scale else 1)
        x = x * cfg.embedding_multiplier
        if cfg.positions == "learned":
            x = x + values["embedding"]["positions"][position]
        for layer in range(cfg.num_layers):
            path, at = place(cfg, layer)
            stacked, attend = values, latent_attention if cfg.latent.kv_rank else attention
            for group in path.split("/"):
                stacked = stacked[group]
            if cfg.delta.every:
                at, kind = divmod(at, cfg.delta.every)
                stacked, attend = stacked[f"layer_{kind}"], attend if kind == cfg.delta.every - 1 else delta_rule
            if cfg.ssm.layers:
                size = len(cfg.ssm.layers)
                attend = state_space if cfg.ssm.layers[at % size] else attend
                at, kind = divmod(at, size)
                stacked = stacked[f"layer_{kind}"] if size > 1 else stacked
            p = jax.tree.map(lambda a, i=at: a[i], stacked)
            window = cfg.windows[layer % len(cfg.windows)]
            rotates = cfg.rope_layers[layer % len(cfg.rope_layers)]
            start, read = x, norm(cfg, p.get("attention_norm"), x) if cfg.pre_norm else x
            y = attend(cfg, p["attention"], read, window, segment, position, rotates)
            x = x + cfg.residual_multiplier * (norm(cfg, p["attention_post_norm"], y) if cfg.post_norm else y)
            if not cfg.ssm.mlp:
                continue
            if cfg.parallel != "one_norm":
                y = x if cfg.parallel == "no" else start
                read = norm(cfg, p.get("mlp_norm"), y) if cfg.pre_norm else y
            y = experts(cfg, p["moe"], read, gate, counts, sums) if "moe" in p else mlp(cfg, p["mlp"], read)
            x = x + cfg.residual_multiplier * (norm(cfg, p["mlp_post_norm"], y) if cfg.post_norm else y)
        x = cfg.head_scale * norm(cfg, values.get("final_norm"), x)
        scores = x @ (values["embedding"]["tokens"].T if cfg.tied_embeddings else values["head"]["w"])
        scores = scores + values["head"]["bias"] if cfg.head_bias else scores
        rows.append(cfg.logit_softcap * np.tanh(scores / cfg.logit_softcap) if cfg.logit_softcap else scores)
    return np.array(rows), sums


def drawn(cfg, rng):
    """Returns parameters without zeros and ones, exact in float64, and a batch of packed documents."""
    values = jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), params.abstract(families.spec(cfg))
    )
    lengths, moe = (5, 1, 7), cfg.moe
    gates = moe.max_timestep if moe.router == "timestep" else max(moe.num_experts, 1)
    batch = {
        "tokens": rng.integers(0, cfg.vocab_size, (2, 13)),
        "targets": rng.integers(0, cfg.vocab_size, (2, 13)),
        "loss_weights": (rng.random((2, 13)) * (rng.random((2, 13)) < 0.7)).astype(
            np.float32
        ),  # padding weighs nothing
        "segment_ids": np.tile(np.repeat([1, 2, 3], lengths), (2, 1)),
        "positions": np.tile(np.concatenate([np.arange(n) for n in lengths]), (2, 1)),
        "gate_ids": rng.integers(0, gates, (2, 13)),
    }
    return values, batch


VECTORS = ("rate", "step_bias", "skip")
"""Parameters of a state-space layer with a number for each head."""


def shapes_of(cfg):
    """Returns every parameter's shape by its path."""
    V, D, L, H = cfg.vocab_size, cfg.d_model, cfg.num_layers, cfg.num_heads
    G, K, F = cfg.num_kv_heads or H, cfg.head_dim or D // H, cfg.d_ff or 4 * D
    biased = cfg.norm == "layer" and (cfg.bias or cfg.norm_bias)
    weights_of_norms = ("scale", *["bias"] * biased) if cfg.norm_weights else ()
    norm = lambda path, width: {f"{path}/{n}": width for n in weights_of_norms}  # noqa: E731
    block = {"w_q": (D, H, K), "w_k": (D, G, K), "w_v": (D, G, K), "w_o": (H, K, D)}
    all_biased = cfg.bias or cfg.attention_bias == "all"
    block |= {"b_q": (H, K), "b_k": (G, K), "b_v": (G, K), "b_o": (D,)} if all_biased else {}
    block |= {"sinks": (H,)} if cfg.attention_sinks else {}
    each = cfg.qk_norm_over == "head"
    block |= {"w_gate": (D, H, K)} if cfg.attention_gate else {}
    block |= {"q_norm/scale": (K,) if each else (H, K), "k_norm/scale": (K,) if each else (G, K)} if cfg.qk_norm else {}
    if cfg.latent.kv_rank:
        kv, q, rotary, values = cfg.latent.kv_rank, cfg.latent.q_rank, cfg.latent.rotary_dim, cfg.latent.value_dim
        block = {"w_q_down": (D, q), "q_norm/scale": (q,), "w_q": (q, H, K), "w_kv_down": (D, kv + rotary)}
        block |= {"kv_norm/scale": (kv,), "w_k": (kv, H, K - rotary), "w_v": (kv, H, values), "w_o": (H, values, D)}
    block = {f"attention/{name}": shape for name, shape in block.items()}
    for name in ("attention", "mlp"):
        reads = cfg.pre_norm and (name == "attention" or cfg.parallel != "one_norm")
        block |= norm(f"{name}_norm", (D,)) if reads else {}
        block |= norm(f"{name}_post_norm", (D,)) if cfg.post_norm else {}

    def weights(path, F, *lead):
        names = {"up": ((D, F), (F,)), "down": ((F, D), (D,))} | ({"gate": ((D, F), (F,))} if cfg.gated else {})
        found = {f"{path}/w_{name}": (*lead, *w) for name, (w, _) in names.items()}
        if cfg.activation == "xielu":
            found |= {f"{path}/slope_{sign}": (1,) for sign in ("positive", "negative")}
        biased = cfg.bias or cfg.mlp_bias or (cfg.moe.bias and path == "moe")
        return found | ({f"{path}/b_{name}": (*lead, *b) for name, (_, b) in names.items()} if biased else {})

    moe, E = cfg.moe, cfg.moe.num_experts
    dense = block | weights("mlp", F)
    if E:
        width = moe.d_ff or F
        block |= weights("moe", width, E)
        block |= weights("moe/shared", width * moe.shared_experts) if moe.shared_experts else {}
        block |= {"moe/router": (D, E)} if moe.router in ("softmax", "sigmoid") else {}
        block |= {"moe/balance": (E,)} if moe.router == "sigmoid" else {}
        block |= {"moe/router_bias": (E,)} if moe.bias else {}
        block |= {"moe/shared_gate": (D, 1)} if moe.shared_gate else {}
    else:
        block |= weights("mlp", F)
    places = [place(cfg, layer)[0] for layer in range(L)]
    layers = {
        f"{group}/{path}": (places.count(group), *shape)
        for group in set(places)
        for path, shape in (block if has_experts(cfg, places.index(group)) or not E else dense).items()
    }
    if cfg.delta.every:
        n, s = cfg.delta.every, cfg.delta
        kinds = [{path: shape for path, shape in block.items() if not path.startswith("attention/")} for _ in range(n)]
        heads = {"q": (s.key_heads, s.key_dim), "k": (s.key_heads, s.key_dim), "v": (s.value_heads, s.value_dim)}
        rule = {f"w_{name}": (D, *wide) for name, wide in heads.items()} | {"w_z": (D, *heads["v"])}
        rule |= {f"taps_{name}": (s.taps, *wide) for name, wide in heads.items()}
        rule |= {"rate": heads["v"][:1], "b_decay": heads["v"][:1], "norm/scale": heads["v"][1:]}
        rule |= {"w_beta": (D, s.value_heads), "w_decay": (D, s.value_heads), "w_o": (*heads["v"], D)}
        kinds = [kind | {f"attention/{name}": shape for name, shape in rule.items()} for kind in kinds[:-1]] + [block]
        layers = {f"layers/layer_{i}/{path}": (L // n, *w) for i, one in enumerate(kinds) for path, w in one.items()}
    if cfg.ssm.layers:
        n, s = len(cfg.ssm.layers), cfg.ssm
        wide = {"x": (s.heads, s.head_dim), "b": (s.groups, s.state_dim), "c": (s.groups, s.state_dim)}
        rule = {"w_z": (D, *wide["x"]), "w_step": (D, s.heads), "w_o": (*wide["x"], D), "norm/scale": wide["x"]}
        for name, sizes in wide.items():
            rule |= {f"w_{name}": (D, *sizes), f"taps_{name}": (s.taps, *sizes), f"offset_{name}": sizes}
        rule = {f"attention/{name}": w for name, w in (rule | dict.fromkeys(VECTORS, (s.heads,))).items()}
        rest = {path: shape for path, shape in block.items() if not path.startswith("attention/")}
        rest = rest if s.mlp else {path: shape for path, shape in rest.items() if not path.startswith("mlp")}
        kinds = [rest | rule if states else block for states in s.layers]
        names = [f"layers/layer_{i}" if n > 1 else "layers" for i in range(n)]
        layers = {
            f"{name}/{path}": (L // n, *w) for name, one in zip(names, kinds, strict=True) for path, w in one.items()
        }
    return (
        layers
        | {"embedding/tokens": (V, D)}
        | ({"embedding/positions": (cfg.max_positions, D)} if cfg.positions == "learned" else {})
        | norm("final_norm", (D,))
        | ({} if cfg.tied_embeddings else {"head/w": (D, V)})
        | ({"head/bias": (V,)} if cfg.head_bias else {})
    )


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_definition(name):
    found = {path: p.shape for path, p in params.flat_spec(families.spec(MODELS[name])).items()}
    assert found == shapes_of(MODELS[name])


def merged(cfg, tree):
    """Adds alpha / rank times a b of its adapter to each matrix, one layer and expert at a time."""
    if not isinstance(tree, dict):
        return tree
    found = {name: merged(cfg, below) for name, below in tree.items() if not name.startswith("lora_")}
    for name in (name for name in tree if name.startswith("lora_a_")):
        w, a, b = found["w_" + name[7:]].copy(), tree[name], tree["lora_b_" + name[7:]]
        for at in np.ndindex(w.shape[: a.ndim + b.ndim - 2 - w.ndim]):
            w[at] += cfg.lora.alpha / cfg.lora.rank * np.tensordot(a[at], b[at], 1)
        found["w_" + name[7:]] = w
    return found


def expected_of(cfg, values, batch):
    wide = merged(cfg, jax.tree.map(lambda leaf: leaf.astype(np.float64), values))
    return by_hand(
        cfg, wide, *(batch[name] for name in ("tokens", "segment_ids", "positions", "gate_ids", "loss_weights"))
    )


@pytest.mark.parametrize("name", MODELS | ADAPTED)
def test_logits_loss_and_routing_are_those_of_the_definition(name, rng):
    """The forward pass has the right scales, epsilons, constants, order of operations, sums and means."""
    cfg = (MODELS | ADAPTED)[name]
    values, batch = drawn(cfg, rng)

    @jax.jit
    def run(values, batch):
        rest = {name: batch[name] for name in ("segment_ids", "positions", "gate_ids")}
        logits, _ = families.forward(cfg, values, batch["tokens"], **rest)
        sums, aux = losses.loss_sums(cfg, values, batch, Context())
        extras = families.of(cfg).extras(cfg)
        counts = extras.count(batch, Context())
        figures = extras.metrics(aux | extras.totals(counts))
        return logits, sums["loss"], extras.loss(aux, counts, None), figures, aux

    logits, loss, auxiliary, figures, aux = run(values, batch)
    expected, sums = expected_of(cfg, values, batch)
    # A dozen float32 operations in a row, each a sum of up to 128 terms: some 1e-6 of the largest; ten times that.
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())
    nll = -np.log(np.take_along_axis(softmax(expected), batch["targets"][..., None], -1))
    np.testing.assert_allclose(loss, (nll[..., 0] * batch["loss_weights"]).sum(), rtol=1e-5)
    if not cfg.moe.num_experts:
        return
    counted = (batch["loss_weights"] != 0).sum()
    per_token = counted * cfg.expert_layers
    balance = (
        cfg.moe.aux_loss_weight * sums["balance"] / (2 * cfg.expert_layers) if cfg.moe.router == "softmax" else 0.0
    )
    np.testing.assert_allclose(auxiliary, balance + cfg.moe.z_loss_weight * sums["z"] / per_token, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(np.sum(aux["load"], 0), sums["load"])
    np.testing.assert_allclose(np.sum(aux["dropped"]), sums["dropped"])
    assert (sums["dropped"] > 0) == (name == "capacity")
    np.testing.assert_allclose(
        figures["moe_dropped_fraction"], sums["dropped"] / (per_token * cfg.moe.choices), rtol=1e-6
    )
    np.testing.assert_allclose(figures["moe_entropy"], sums["entropy"] / per_token, rtol=1e-5, atol=1e-7)
    shares = np.asarray(aux["load"]) / (counted * cfg.moe.choices)
    np.testing.assert_allclose(figures["moe_load_max_over_mean"], shares.max() * cfg.moe.num_experts, rtol=1e-6)
    if cfg.moe.router in ("softmax", "sigmoid"):
        np.testing.assert_allclose(figures["moe_balance_loss"], sums["balance"] / (2 * cfg.expert_layers), rtol=1e-5)
        np.testing.assert_allclose(figures["moe_z_loss"], sums["z"] / per_token, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gated_bias", "domain"])
def test_bfloat16_is_near_the_definition(name, rng):
    """Learned routers are left out: of two nearly equal experts, bfloat16 may choose the other."""
    cfg = MODELS[name]
    values, batch = drawn(cfg, rng)
    matrices = params.cast_matrices(families.spec(cfg), values, jnp.bfloat16)
    expected, _ = expected_of(cfg, matrices, batch)
    rest = {name: batch[name] for name in ("segment_ids", "positions", "gate_ids")}
    logits, _ = jax.jit(lambda v, t, r: families.forward(cfg, v, t, Context(dtype=jnp.bfloat16), **r))(
        values, batch["tokens"], rest
    )
    # A rounding is 2^-9 = 0.002 at most and 0.001 on average; some thirty of them, one after the other, are 0.006.
    assert np.linalg.norm(logits - expected) <= 0.015 * np.linalg.norm(expected)
