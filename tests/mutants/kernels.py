"""Mutants of kernels."""

from mutants.rows import KERNELS, mistakes

mistakes(
    "kernels", "kernels/norm.py", KERNELS + " -k 'norms and not pallas'",
    ("wide = x.astype(jnp.float32)\n    inverse = checkpoint", "wide = x\n    inverse = checkpoint"),
    ("wide = x.astype(jnp.float32)\n    mean = checkpoint", "wide = x\n    mean = checkpoint"),
    ("d_normal - normal * (d_normal * normal).mean(-1, keepdims=True))\n    return dx.astype(x.dtype), (dy * normal).sum(range",
     "d_normal - (d_normal * normal).mean(-1, keepdims=True))\n    return dx.astype(x.dtype), (dy * normal).sum(range"),
    ("centred = d_normal - d_normal.mean(-1, keepdims=True)", "centred = d_normal"),
    ("scale.astype(jnp.float32) + 1 if unit_offset", "scale.astype(jnp.float32) if unit_offset"),
)  # fmt: skip

mistakes(
    "kernels",
    "kernels/activation.py",
    KERNELS + " -k gelu",
    ("(below + wide * density)", "below"),
    ("lax.erf(wide * 0.5**0.5)", "lax.erf(wide)"),
    ("* (1 + 3 * _CUBIC * square)", "* (1 + _CUBIC * square)"),
    ("* below * (1 - below)", "* below"),
    ("return _tanh_gelu(x) if approximate", "return jax.nn.gelu(x) if approximate"),
    ("lambda x, dy: (dy * _forward(x, True)[1],)", "lambda x, dy: (dy * _forward(x, False)[1],)"),
)

ARITHMETIC = "training/test_arithmetic.py"

mistakes(
    "kernels",
    "kernels/linear.py",
    ARITHMETIC + " -k factor",
    ("return (x.astype(jnp.float32) * factor).astype(x.dtype)", "return x * factor"),
    ("    products = dy * x.astype(jnp.float32)\n", "    products = (dy * x.astype(jnp.float32)).astype(x.dtype)\n"),
    ("if i < lead or factor.shape[i - lead] != x.shape[i]]", "if i < lead]"),
)

mistakes(
    "kernels",
    "kernels/taps.py",
    ARITHMETIC + " -k adapters",
    ("(w.astype(jnp.float32) * factor).astype(w.dtype)", "w * factor"),
)

mistakes(
    "kernels", "kernels/cross_entropy.py", KERNELS + " -k 'cross_entropy and not pallas'",
    ("logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)", "logits = jnp.matmul(x, head)"),
    ("logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)",
     "logits = jnp.matmul(x, head, preferred_element_type=jnp.float32).astype(x.dtype).astype(jnp.float32)",
     ARITHMETIC + " -k 'logits and (decoder or labels)'"),
    ("dx = jnp.matmul(d_logits, head.T, preferred_element_type=jnp.float32)", "dx = jnp.matmul(d_logits, head.T)",
     ARITHMETIC + " -k 'kernels_sum and cross'"),
    ("d_logits *= 1 - jnp.square(logits / softcap)", "d_logits *= 1 - jnp.abs(logits / softcap)"),
    ("top = lax.pmax(lax.stop_gradient(self.top), axes)", "top = lax.stop_gradient(self.top)"),
    ("is_local = (local >= 0) & (local < head.shape[1])", "is_local = (local >= 0) & (local <= head.shape[1])"),
    ("return (factor * self.dx).astype(dtypes[0])", "return self.dx.astype(dtypes[0])"),
    ("return (factor * self.dx).astype(dtypes[0])", "return factor.astype(dtypes[0]) * self.dx.astype(dtypes[0])",
     KERNELS + " -k 'scale_of and chunked'"),
    ("SavedGradients(dx, d_head)", "SavedGradients(dx.astype(x.dtype), d_head)", KERNELS + " -k 'scale_of and chunked'"),
    ("return (logits - self.top[..., None]) - self.log_total[..., None]",
     "return logits - (self.top + self.log_total)[..., None]", KERNELS + " -k 'digits and chunked'"),
    ("in_full_chunks = s - s % size\n", "in_full_chunks = s - size\n"),
    ("weights[..., None] * (jnp.exp(lse.log_probs(logits)) - at_target)", "jnp.exp(lse.log_probs(logits)) - at_target"),
)  # fmt: skip

mistakes(
    "kernels", "kernels/grouped_matmul.py", KERNELS + " -k 'grouped and not pallas'",
    ("a = jnp.where((row + jnp.arange(rows) < ends[e])[:, None], a, 0)", "a = jnp.where((row + jnp.arange(rows) <= ends[e])[:, None], a, 0)"),
    ("return state[0] + rows <= end + beyond", "return state[0] + rows < end + beyond"),
    ("return _rows_times_experts(dy, w, sizes, 1), dw, None", "return _rows_times_experts(dy, w.swapaxes(1, 2), sizes, 1), dw, None"),
)  # fmt: skip

mistakes(
    "kernels", "kernels/quantized_matmul.py", "kernels/test_quantized.py",
    ('{"int8": 127.0', '{"int8": 128.0'),
    ("jnp.round(values) if dtype", "jnp.floor(values) if dtype"),
    ("top = lax.pmax(collectives.varying(top, axes), axes)", "top = top"),
    ("FORMATS[kind].gradients, split_out, x.dtype", "FORMATS[kind].values, split_out, x.dtype"),
    ("(sums.astype(jnp.float32) * a_scale * b_scale)", "(sums.astype(jnp.float32) * a_scale / b_scale)"),
)  # fmt: skip

mistakes(
    "kernels", "kernels/implementation.py", "kernels/test_kernels.py kernels/test_attention_kernels.py -k 'mistakes or auto or cannot or choose or default'",
    ("names = [*AUTO_ORDER.get(platform, {}).get(op, ()), *implementations]", "names = [*implementations]"),
)  # fmt: skip

mistakes(
    "attention", "kernels/attention/reference.py", KERNELS + " -k 'test_attention and not mistakes'",
    ("q_index[:, None] - k_index < o.window", "q_index[:, None] - k_index <= o.window"),
    ("visible = q_index[:, None] >= k_index\n        if", "visible = q_index[:, None] > k_index\n        if"),
    ("weights = jax.nn.softmax(scores, axis=-1)", "weights = jax.nn.softmax(scores.astype(v.dtype), axis=-1)"),
    ("return x.reshape(b, s, g, h // g, width).transpose(0, 2, 1, 3, 4)",
     "return x.reshape(b, s, h // g, g, width).transpose(0, 3, 1, 2, 4)"),
    ("o.softcap * jnp.tanh(scores / o.softcap)", "jnp.tanh(scores / o.softcap)"),
    ('"bgcrk,bgtk->bgcrt", q, k, preferred_element_type=jnp.float32)', '"bgcrk,bgtk->bgcrt", q, k)'),
)  # fmt: skip

mistakes(
    "attention", "kernels/attention/chunked.py", KERNELS + " -k 'test_attention and not mistakes'",
    ("factor * weights * (d_weights - delta[..., None])", "factor * weights * d_weights"),
    ("d_scores *= 1 - jnp.square(jnp.clip(scores / o.softcap, -1, 1))", "d_scores *= 1 - jnp.abs(jnp.clip(scores / o.softcap, -1, 1))"),
    ("max(0, start - o.window + 1) if o.window", "max(0, start - o.window + 2) if o.window"),
    ("min(other_length, end + o.window - 1) if o.window", "min(other_length, end + o.window - 2) if o.window"),
    ("(top + jnp.log(total))[..., 0]", "jnp.log(total)[..., 0]"),
    ("return (dq_group + more, d_table), (dk, dv)", "return (more, d_table), (dk, dv)"),
)  # fmt: skip

mistakes(
    "attention",
    "kernels/attention/__init__.py",
    KERNELS + " -k held",
    ("visible &= distances < window", "visible &= distances <= window"),
    ("visible = (distance > 0)[:, None]", "visible = (distance >= 0)[:, None]"),
    ("mixed += weights[..., slots:] *", "mixed = weights[..., slots:] *"),
)

MASKS = "kernels/test_attention_masks.py -k 'not transformers'"

mistakes(
    "attention", "kernels/attention/relative_bias.py", MASKS,
    ("(-high, -low) for low, high in intervals", "(low, high) for low, high in intervals"),
    ("(max(low, 1), high) for low", "(low, high) for low"),
    ("(distance_BCT[..., None] <= high)", "(distance_BCT[..., None] < high)"),
    ("exact = one_way // 2  #", "exact = one_way  #"),
    ("return apart if apart.ndim == 3 else apart[None]", "return -apart if apart.ndim == 3 else apart[None]"),
    ("(len(buckets), kv_heads, -1)[:, :", "(len(buckets), -1, kv_heads).swapaxes(1, 2)[:, :"),
    ("[:, None, :, None] >= low", "[:, None, :, None] > low"),
    ("bucket = jnp.where(distance_BCT >= low", "bucket = jnp.where(distance_BCT > low"),
    ("d_scores_BGCRT = d_scores_BGCRT.sum(0, keepdims=True)", "d_scores_BGCRT = d_scores_BGCRT[:1]"),
)  # fmt: skip

mistakes(
    "attention", "kernels/attention/reference.py", MASKS,
    ("query_ids[:, :, None] != 0) & (query", "query_ids[:, :, None] >= 0) & (query"),
    ("visible = (q_index[:, None] >= k_index) | same_prefix(mask)", "visible = (q_index[:, None] > k_index) | same_prefix(mask)"),
    ("scores += bias_scores(", "scores -= bias_scores("),
)  # fmt: skip

mistakes(
    "attention", "kernels/attention/chunked.py", MASKS,
    ("top = jnp.where(top > MASKED, top, 0)", "top = top"),
    ("total = jnp.maximum(total, 1)", "total = total"),
    ("                d_scores *= o.scale\n", ""),
    ("d_table += table_gradient(", "d_table = table_gradient("),
    ("factor = o.scale if table is None else 1.0", "factor = o.scale"),
)  # fmt: skip

mistakes(
    "attention", "kernels/attention/__init__.py", MASKS,
    ("jnp.where(kv_segment_ids == 0, -1, kv_segment_ids)", "kv_segment_ids"),
    ("Tokens(positions=-distance)", "Tokens(positions=distance)"),
    ("jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0)", "jax.nn.softmax(scores, axis=-1)"),
    ("o._replace(mask=new_mask), q_BGSRK", "o._replace(mask=new_mask, buckets=None), q_BGSRK"),
)  # fmt: skip

mistakes(
    "attention",
    "kernels/context_attention.py",
    "kernels/test_context_attention.py",
    ("np.stack([low, high[::-1]], axis=1)", "np.stack([low, high], axis=1)"),
    ("start = jnp.where(source < me, 0, half)", "start = jnp.where(source > me, 0, half)"),
    ("out * jnp.exp(lse - total)[..., None]", "out * jnp.exp(total - lse)[..., None]"),
    ("for x in _next(axis, d_block))\n    return _unpack", "for x in d_block)\n    return _unpack"),
    ('AttentionMask(o.window, "causal" if o.window else "full")', 'AttentionMask(0, "full")'),
    ("jnp.abs(me - source) * half", "(source - me) * half"),
    ("collectives.gather(x, (axis,), 1), (k, v, mask.keys)", "x, (k, v, mask.keys)"),
    ("slice_tree(of_keys, 0, keys), chunk * half)", "slice_tree(of_keys, 0, keys), start)"),
    ("source = (me - t) % shards\n        result", "source = (me + t) % shards\n        result"),
)

mistakes(
    "attention",
    "kernels/attention/block_ranges.py",
    "kernels/test_attention_kernels.py -k 'visit'",
    ("(first + 1) // block_kv if o.causal", "(last + 1) // block_kv if o.causal"),
    (
        "np.minimum((last + o.window - 1) // block_q + 1, blocks)",
        "np.minimum((last + o.window - 1) // block_q, blocks)",
    ),
    ("(least[:, None, :] <= own_most[:, :, None])", "(least[:, None, :] < own_most[:, :, None])"),
    ("np.maximum(first - o.window + 1, 0) // block_kv", "np.maximum(first - o.window, 0) // block_kv"),
)

mistakes(
    "pallas",
    "kernels/attention/pallas_gpu.py",
    "kernels/test_attention_kernels.py -k 'gpu and values'",
    ("rescale = jnp.exp2(factor * (top - higher))", "rescale = jnp.exp2(factor * (higher - top))"),
    ("return share, abs(o.softcap) * _LOG2E, 1 - share * share", "return share, abs(o.softcap) * _LOG2E, 1 - share"),
    ("factor * top + jnp.log2(total)", "factor * top + jnp.log(total)"),
    ("_store(static, dq_ref, start, static.o.scale * dq)", "_store(static, dq_ref, start, dq)"),
    ("visible &= queries - keys < o.window", "visible &= queries - keys <= o.window"),
)

mistakes(
    "pallas",
    "kernels/attention/pallas_tpu.py",
    "kernels/test_borders.py -k 'sees_no_key and tpu'",
    ("jnp.where(total_ref[...] == 0, -MASKED, top_ref[...] + jnp.log2(total))", "top_ref[...] + jnp.log2(total)"),
    ("visible = keys < static.length - j * static.block", "visible = keys <= static.length - j * static.block"),
)

mistakes(
    "pallas", "kernels/cross_entropy_pallas.py", KERNELS + " -k 'cross_entropy and pallas'",
    ("d = weights * (_exp((capped - top) - log_total)", "d = (_exp((capped - top) - log_total)"),
    ("_exp((capped - top) - log_total)", "_exp(capped - (top + log_total))", KERNELS + " -k 'digits and pallas_tpu'"),
    ("[targets - start, *lse, weights]", "[targets, *lse, weights]"),
    ("(totals * jnp.exp(tops - top)).sum(0), chosen.sum(0)", "(totals * jnp.exp(tops - top)).sum(0), chosen.max(0)"),
    ("in_full_blocks = V - V % block", "in_full_blocks = V - block"),
    ("sums[2][...] = chosen + block_chosen", "sums[2][...] = jnp.maximum(chosen, block_chosen)"),
    ("total * _exp(top - higher)", "total"),
)  # fmt: skip

mistakes(
    "pallas",
    "kernels/norm_pallas.py",
    KERNELS + " -k 'norm and pallas_gpu'",
    ("wide - wide.sum(-1, keepdims=True) / width", "wide - wide.mean(-1, keepdims=True)"),
    ("return [inverse * d, dy * normal, dy]", "return [d, dy * normal, dy]"),
    ("inside = start + j * s.R +", "inside = j * s.R +"),
    ("(d_normal * normal).sum(-1, keepdims=True) / width", "(d_normal * normal).sum(-1, keepdims=True)"),
)

mistakes(
    "pallas",
    "kernels/grouped_matmul_pallas.py",
    KERNELS + " -k 'visits or (grouped and pallas)'",
    ("(ends - 1) // tile_rows, first)", "ends // tile_rows, first)"),
    ('searchsorted(through, visit, side="right",', 'searchsorted(through, visit, side="left",'),
    ("(row < end, into < A)", "(row <= end, into < A)"),
    ("first = jnp.minimum(starts // tile_rows, tiles - 1)", "first = starts // tile_rows"),
)

mistakes(
    "kernels",
    "kernels/attention/cudnn.py",
    "kernels/test_packed_attention.py",
    ("offsets * (k.shape[2] * width)", "offsets * (h * width)"),
    ("(first_BS.sum() <= count) &", "(first_BS.sum() <= count + 1) &"),
    ("& (same.sum() == count)", "& (same.sum() >= count)"),
    ("lengths = jnp.diff(starts, append=b * s)", "lengths = jnp.diff(starts, append=b * s - 1)"),
    ("where(fit, out.shape[1], 0)", "where(fit, 0, out.shape[1])"),
    ('(True, True): "PADDING_CAUSAL"', '(True, True): "PADDING"'),
)

mistakes(
    "kernels", "kernels/attention/tokamax.py", "kernels/test_tokamax.py",
    ("first = jnp.maximum(0 if first is None else first, token - o.window + 1)", "first = jnp.maximum(0 if first is None else first, token - o.window)"),
    ("token + o.window)", "token + o.window + 1)"),
    ("jnp.where(closes, token + 1, length)", "jnp.where(closes, token, length)"),
    ("opens = opens.at[:, tokens].set(True)", "opens = opens", "kernels/test_tokamax.py -k range"),
    ("where(contiguous, out.shape[1], 0)", "where(contiguous, 0, out.shape[1])", "kernels/test_tokamax.py -k contiguous"),
    ("largest_BHS + jnp.log(total_BHS)", "largest_BHS + total_BHS", "kernels/test_tokamax.py -k sinks"),
)  # fmt: skip

mistakes(
    "kernels", "kernels/grouped_matmul.py", "kernels/test_tokamax.py -k rows",
    ("((0, -x.shape[0] % 64), (0, 0))", "((0, 0), (0, 0))"),
    ("dy = jnp.where(used, dy, 0)", "dy = dy"),
    ("return jnp.where(used, collectives.match_varying_tree(out[: x.shape[0]], x), 0)",
     "return collectives.match_varying_tree(out[: x.shape[0]], x)"),
    ("if width % TOKAMAX_WIDTH]", "if width % 8]", "kernels/test_attention_kernels.py -k tokamax"),
)  # fmt: skip

mistakes(
    "kernels", "kernels/implementation.py", "kernels/test_attention_kernels.py -k tokamax",
    ('there.startswith("9.")', 'there >= "9.0"'),
    ('find_spec("tokamax") is None', "False"),
)  # fmt: skip

mistakes(
    "kernels", "kernels/states.py", "kernels/test_states.py",
    ("beta * before * k[:, :, :, None]", "beta * k[:, :, :, None]"),
    ("seen = (document[..., :, None] == document[..., None, :]) & (", "seen = ("),
    ("self.after * self.written(x)", "self.written(x)"),
    ("writes.after * written, of_later", "written, of_later"),
    ("(writes.after * _of_heads(writes.k, x))", "_of_heads(writes.k, x)"),
    ("last - i if reverse else i", "i"),
    ("of_written = writes.after * read", "of_written = read"),
    ("chunks.before * _of_heads(chunks.q, states)", "_of_heads(chunks.q, states)"),
    ("factor = writes.kept.prod(0)", "factor = writes.kept[-1]"),
    ("(change * x if writes.w is None else change @ x) + added, x", "x + added, x"),
    ("lax.rsqrt(jnp.square(a).sum(-1, keepdims=True) + EPS)", "lax.rsqrt(jnp.square(a).mean(-1, keepdims=True) + EPS)"),
    ("jnp.where(seen, 0, -jnp.inf)", "jnp.where(seen, 0, 0)"),
)  # fmt: skip

mistakes(
    "kernels",
    "kernels/causal_convolution.py",
    "kernels/test_states.py",
    ("joined[:, t : t + length] == segment_ids", "joined[:, :length] == segment_ids"),
    ("if bias is None else bias.astype(wide)", "if bias is None else 2 * bias.astype(wide)"),
)

mistakes(
    "kernels",
    "kernels/sequence_parts.py",
    "kernels/test_states.py",
    ("jnp.concatenate([gathered[:, 0], gathered[::-1, 1]])", "jnp.concatenate([gathered[:, 0], gathered[:, 1]])"),
)
SINKS = "kernels/test_attention_sinks.py"

mistakes(
    "kernels",
    "kernels/attention/sinks.py",
    SINKS,
    ("return -(jnp.exp(sinks - total) * delta).sum((0, 1))", "return (jnp.exp(sinks - total) * delta).sum((0, 1))"),
    ("return jnp.exp(lse - total), total", "return jnp.exp(lse - total), lse"),
)

mistakes(
    "kernels",
    "kernels/attention/reference.py",
    SINKS,
    ("weights = weights[..., :-1]", "weights = weights[..., 1:]"),
)

mistakes(
    "kernels",
    "kernels/context_attention.py",
    SINKS + " -k split",
    ("d_sinks = with_sinks.gradient(total, sinks, deltas)", "d_sinks = with_sinks.gradient(total, sinks, total)"),
)
