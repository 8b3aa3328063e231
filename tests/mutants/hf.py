"""Mutants of Hugging Face folders."""

from mutants.rows import mistakes

HF = "hf/test_hf.py"

mistakes(
    "hf", "hf/weights.py", HF + " -k lies",
    ('"layers/attention/w_o": ("model.layers.{}.self_attn.o_proj.weight", TRANSPOSED)',
     '"layers/attention/w_o": ("model.layers.{}.self_attn.o_proj.weight", SAME)'),
    ('"layers/attention/w_q": ("transformer.h.{}.attn.c_attn.weight", SAME),\n'
     '        "layers/attention/w_k": ("transformer.h.{}.attn.c_attn.weight", SAME)',
     '"layers/attention/w_k": ("transformer.h.{}.attn.c_attn.weight", SAME),\n'
     '        "layers/attention/w_q": ("transformer.h.{}.attn.c_attn.weight", SAME)'),
    ('w_gate="w1", w_up="w3", w_down="w2"', 'w_gate="w3", w_up="w1", w_down="w2"'),
    ('"layers/mlp/w_gate": ("model.layers.{}.mlp.gate_proj.weight", TRANSPOSED),\n    "layers/mlp/w_up": ("model.layers.{}.mlp.up_proj.weight"',
     '"layers/mlp/w_gate": ("model.layers.{}.mlp.up_proj.weight", TRANSPOSED),\n    "layers/mlp/w_up": ("model.layers.{}.mlp.gate_proj.weight"'),
    ('post_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", SAME),\n'
     '    "layers/mlp_norm/scale": ("model.layers.{}.pre_feedforward_layernorm.weight"',
     'post_norm/scale": ("model.layers.{}.pre_feedforward_layernorm.weight", SAME),\n'
     '    "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight"'),
    ("numbers = [s.start + i for s, i in zip(where, at, strict=False)]", "numbers = list(at)", HF + " -k 'mesh'"),
)  # fmt: skip

mistakes(
    "hf", "hf/tensor_layout.py", HF,
    (" + self.start + places % block", " + places % block", HF + " -k 'out_and_in or lies'"),
)  # fmt: skip

mistakes(
    "hf", "hf/configs.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ('found["attention_scale"] = scalar**-0.5', 'found["attention_scale"] = scalar**-1'),
)  # fmt: skip

mistakes(
    "hf", "hf/families.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ('"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"',
     '"attn_logit_softcapping": "logit_softcap", "final_logit_softcapping": "attention_softcap"'),
)  # fmt: skip

mistakes(
    "hf", "hf/configs.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ("theta = _number(rope, \"rope_theta\", *([] if usual is None else [usual]))", "theta = _number(rope, \"rope_theta\", 10000.0)"),
)  # fmt: skip

mistakes(
    "hf", "hf/json_keys.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ("self._left.pop(key, *default)", "self._left.get(key, *default)"),
)  # fmt: skip

mistakes(
    "hf", "hf/families.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ('fixed={"norm_unit_offset": True, "post_norm": True, "embedding_scale": True}', 'fixed={"norm_unit_offset": True, "post_norm": True}'),
)  # fmt: skip

mistakes(
    "hf", "hf/configs.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ("scaling[\"original_max_position\"] = int(_number(rope, \"original_max_position_embeddings\", original))",
     "scaling[\"original_max_position\"] = 8192", HF),
    ("if n % p == 0 and windows == windows[:p] * (n // p))", "if windows == windows[:p] * (n // p))", HF,
     {"equivalent": "where p does not divide n the two tuples differ in length, and so are never equal"}),
    ("if windows == (windows[:p] * n)[:n])", "if windows[:1] == (windows[:p] * n)[:1])", "hf/test_encoders.py -k 'modernbert and export'"),
)  # fmt: skip

mistakes(
    "hf", "hf/families.py", "hf/test_public.py -m '' -k 'absent or v0.2'",
    ("        layer_types=(SLIDING,),\n        sliding_window=4096,", "        layer_types=(SLIDING,),"),
    ('"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6', '"rms_norm_eps": 1e-5, "rope_theta": 1e6'),
)  # fmt: skip

mistakes(
    "hf", "hf/configs.py", "hf/test_public.py -m '' -k 'read or v0.2'",
    ("sorted(FAMILIES, key=lambda name: name != preferred)", "FAMILIES"),
    ("    unknown = keys.take_empty()", "    unknown: JsonObject = {}"),
)  # fmt: skip

mistakes(
    "hf", "hf/vocabulary_files.py", "hf/test_vocabulary_files.py -k 'builds or guessed'",
    ('lowercase=settings.get("do_lower_case", True)', 'lowercase=settings.get("do_lower_case", False)'),
    ("for token in (*after, *before)]", "for token in (*before, *after)]"),
    ("if name not in _SPECIAL or not all(", "if name not in _SPECIAL or not any("),
)  # fmt: skip

mistakes(
    "hf", "hf/configs.py", HF + " -k 'gptj or rotated'",
    ("return share if int(head * share) == size else math.nextafter(share, 1)", "return share"),
    ("size % 2 or not 2 <= size <= head", "size % 2 or not 2 <= size"),
)  # fmt: skip

mistakes(
    "hf", "hf/configs.py", HF + " -k 'code_of_a_folder'",
    ("and classes and all(name in known", "and classes and any(name in known"),
    ('known = [family.architecture, f"{stem}Model"', "known = [family.architecture"),
)  # fmt: skip

MXFP4 = "hf/test_mxfp4.py -k 'bits or published'"

mistakes(
    "hf",
    "hf/mxfp4.py",
    MXFP4,
    ("np.stack([held & 15, held >> 4], axis=-1)", "np.stack([held >> 4, held & 15], axis=-1)"),
    ("(experts, outputs, groups)).astype(np.int32) - 127", "(experts, outputs, groups)).astype(np.int32) - 128"),
)

mistakes(
    "hf",
    "hf/weights.py",
    HF + " -k 'lies and (gpt_oss or granitemoe)'",
    ("        return size\n", "        return 1\n"),
    (
        "(complete[at[-1]] if layout.stacked else complete)[places]",
        "(complete[at[0]] if layout.stacked else complete)[places]",
    ),
)

mistakes(
    "hf", "hf/weights.py", "hf/test_modules.py",
    ("replace(layout, layers=(1, first))", "replace(layout, layers=(1, first - 1))"),
    ('("enorm", SAME)', '("hnorm", SAME)'),
)  # fmt: skip
