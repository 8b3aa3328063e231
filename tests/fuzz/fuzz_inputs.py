"""Strategies of hypothesis for what each reader reads: a valid input that is damaged in its structure or its bytes."""

import io
import json
import pickle
import struct
import zipfile
from typing import Any

import numpy as np
from fuzz_readers import TENSORS
from hypothesis import strategies as st

from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer, IdTokenizer

_RAW = {
    "@long": "1" * 5000,
    "@wide": "9" * 30,
    "@deep": "[" * 3000 + "]" * 3000,
    "@deeper": "[" * 50_000,
    "@objects": '{"a":' * 300 + "1" + "}" * 300,
    "@nan": "NaN",
    "@huge": "1e999",
    "@tiny": "-0.0",
    "@zeros": "[" + "0," * 20_000 + "0]",
    "@broken": '{"a"',
}
"""Text that takes the place of such a word in JSON, where no value of Python writes it."""

NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 3 * 10**8, 0.5, -2.5,
    1e308, "", " ", "a", "é", "\0", "\n", "\ud800", "\u202e", "../x", "/dev/zero", "%s", "{}", "x" * 5000, "1" * 200,
    "1e5", "true", "null", [], {}, [[]], [1], ["a"], [None], [{}], {"a": 1}, {"": None}, {"type": "BPE"}, *_RAW,
]  # fmt: skip
"""Values that code forgets."""


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of every value in a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, child in children for below in _paths(child, (*path, key)))]


def _replaced(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    """Returns a JSON value with `change(parent, key)` done to a copy at a path; at the root, the change's value."""
    if not path:
        return change(None, None)
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        change(copy, path[0])
    else:
        copy[path[0]] = _replaced(copy[path[0]], path[1:], change)
    return copy


@st.composite
def json_values(draw: st.DrawFn, seeds: list[Any]) -> Any:
    """Draws one of some JSON values, with up to three parts replaced, removed, added or doubled."""
    value = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 3))):
        nasty = draw(st.sampled_from(NASTY))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "double"]))

        def change(parent: Any, key: Any, kind: str = kind, nasty: Any = nasty) -> Any:
            if parent is None or kind == "replace":
                if parent is not None:
                    parent[key] = nasty
                return nasty
            if kind == "remove":
                del parent[key]
            elif isinstance(parent, dict):
                parent[str(nasty)[:50] if kind == "add" else f"{key}_"] = parent[key]
            else:
                parent.insert(key, nasty if kind == "add" else parent[key])
            return None

        paths = _paths(value)
        path = paths[draw(st.integers(0 if len(paths) == 1 else 1, len(paths) - 1))]
        value = _replaced(value, path, change)
    return value


def json_text(value: Any) -> str:
    """Returns a JSON value as text, with the words of `_RAW` replaced."""
    text = json.dumps(value)
    for word, raw in _RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text


@st.composite
def damaged(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> bytes:
    """Draws bytes; in half of the cases a few of them are changed, removed, repeated or cut off."""
    content = draw(contents)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 4]))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        count = draw(st.sampled_from([1, 1, 2, 4, 8, 100]))
        match draw(st.sampled_from(["flip", "bytes", "cut", "remove", "repeat", "zero"])):
            case "flip":
                flipped = bytes([(content[at] if content else 0) ^ (1 << draw(st.integers(0, 7)))])
                content = content[:at] + flipped + content[at + 1 :]
            case "bytes":
                content = content[:at] + draw(st.binary(max_size=8)) + content[at + count :]
            case "cut":
                content = content[:at]
            case "remove":
                content = content[:at] + content[at + count :]
            case "repeat":
                content = content[:at] + content[at : at + count] * 3 + content[at + count :]
            case "zero":
                content = content[:at] + bytes(count) + content[at + count :]
    return content


def _json(*seeds: Any) -> st.SearchStrategy[bytes]:
    """JSON that is one of some values, with damage."""
    return damaged(json_values([*seeds]).map(lambda value: json_text(value).encode()))


def _lines(*seeds: Any) -> st.SearchStrategy[bytes]:
    """Lines of JSON, each one of some values, with damage."""
    line = json_values([*seeds]).map(json_text)
    return damaged(st.lists(line, min_size=1, max_size=3).map(lambda lines: "\n".join(lines).encode() + b"\n"))


# --- YAML and flags ---------------------------------------------------------------------------------------------------

_CONFIG = {
    "model": {"num_layers": 2, "d_model": 32, "windows": [4, 0], "moe": {"num_experts": 4}, "activation": "gelu"},
    "data": {
        "source": "path",
        "path": "x",
        "seq_len": 16,
        "mixture": [{"path": "a", "weight": 1.0, "source": "path"}],
        "eval_fraction": 0.1,
    },
    "optim": {"lr": 1e-3, "name": "adamw", "warmup_steps": 10, "schedule": "wsd"},
    "train": {"steps": 5, "eval_every": 0, "spike": {"action": "skip"}},
    "mesh": {"data": -1, "fsdp": 1},
    "sample": {"prompts": ["a", "b"], "temperature": 0.5},
}
_BITS = [
    "&a ", "*a", "<<: *a", "!!int ", "!!binary ", "!!timestamp ", "!!python/object:os.system ", "? ", "- ", ": ", "{",
    "}", "[",
    "]", "|", ">", "'", '"', "\t", "#", "%YAML 1.1\n", "---\n", "...\n", "~", "0x1F", "1_000", "1:30",
    "0o7", "2020-13-45",
    ".inf", ".nan", "1e5", "&b [*a, *a, *a, *a, *a, *a, *a, *a]", "\ufeff", "\x85", "\u2028", "\x07", "=", "<<",
    "config: x\n",
]  # fmt: skip


@st.composite
def _yaml(draw: st.DrawFn) -> bytes:
    """YAML in the flow style of JSON or in blocks, with bits of its syntax inserted."""
    value = draw(json_values([_CONFIG, {"model": _CONFIG["model"]}]))
    text = json_text(value)
    if draw(st.booleans()) and isinstance(value, dict):
        text = "".join(f"{key}:\n  {json_text(part)}\n" for key, part in value.items())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(_BITS)) + text[at:]
    return text.encode("utf-8", "surrogatepass")


@st.composite
def _bomb(draw: st.DrawFn) -> bytes:
    """YAML in which every anchor repeats the one before."""
    depth = draw(st.integers(1, 12))
    width = draw(st.integers(1, 10))
    first = draw(st.sampled_from(["[x, x]", "{a: 1}", "x", "[]"]))
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    last = f"*a{depth - 1}"
    lines.append(draw(st.sampled_from([f"model: {last}", f"data: {{mixture: {last}}}", f"model: {{windows: {last}}}"])))
    return "\n".join(lines).encode()


@st.composite
def _flags(draw: st.DrawFn) -> bytes:
    """Words of a command line, each on a line."""
    words = []
    for _ in range(draw(st.integers(0, 4))):
        group = draw(st.sampled_from([*_CONFIG]))
        key, value = draw(st.sampled_from([*_CONFIG[group].items()]))
        value = draw(json_values([value]))
        text = json_text(value) if draw(st.booleans()) else str(value)
        name = draw(
            st.sampled_from([f"--{group}.{key}", f"--{group}.{key}", f"--{group}", f"{group}.{key}", f"--{key}"])
        )
        words.append(name + draw(st.sampled_from(["=", "\n", " ", ""])) + text.replace("\n", " "))
    words += draw(st.lists(st.sampled_from(["--", "-", "", "=", "--config", "--mesh=auto", "--x=\x07"]), max_size=1))
    return "\n".join(words).encode("utf-8", "surrogatepass")


# --- text and tokens --------------------------------------------------------------------------------------------------

_CHATS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "system": "s"},
    {"prompt": "a", "completion": "b"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "a", "input": "", "output": "b", "history": [["q", "r"]]},
]
_PREFERENCES = [
    {"prompt": "a", "chosen": "b", "rejected": "c", "system": "s"},
    {"chosen": _CHATS[0]["messages"], "rejected": [*_CHATS[0]["messages"][:1], {"role": "assistant", "content": "d"}]},
]
_PROMPTS = [
    {"prompt": "a", "answer": 3, "system": "s"},
    {"prompt": _CHATS[0]["messages"][:1], "completion": "b", "numbers": [1, 2]},
]
_TRIPLES = [
    {"text": "Bern is in Europe.", "triple": ["Bern", "is in", "Europe"]},
    {"text": "a", "triple": ["b", "c", "d"], "id": 7},
]
_PAIR = {"source": "Yes", "target": "Ja", "language": "de"}
_PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

#, fuzzy
msgid "a"
msgstr "b"

msgid "c"
msgstr "d"
"""


def _mo() -> bytes:
    """A compiled catalogue with one message, by gettext's definition."""
    source, target = b"Yes\0", b"Ja\0"
    return struct.pack("<7I", 0x950412DE, 0, 1, 28, 36, 0, 44) + struct.pack("<4I", 3, 44, 2, 48) + source + target


_TRANSLATIONS = st.one_of(
    _lines(_PAIR).map(lambda text: b"jsonl\n" + text),
    damaged(st.sampled_from([b"en\tde\nYes\tJa\nNo\tNein\n", b"en\tde\r\na\t\r\n", b"\xef\xbb\xbfen\tde\na\tb"])).map(
        lambda text: b"tsv\n" + text
    ),
    damaged(st.just(_PO.encode())).map(lambda text: b"po\n" + text),
    damaged(st.just(_mo())).map(lambda text: b"mo\n" + text),
)

_HEADER = {
    "version": 1, "dtype": "uint16", "count": 21, "documents": 2, "vocab_size": 256, "bytes": 19,
    "tokenizer": {"kind": "bytes"}, "sha256": {
        "bin": "e1ac3bd77971050fc4a9af430a0dec498cce2127d8825d4fd08ca9768873e157",
        "starts": "4bbc7c57ef0fbb75b6982299e818e59bb4f8ee380752ec3cda9d31aaa597a35a",
    },
}  # fmt: skip


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _bpe(**more: Any) -> dict[str, Any]:
    """A small tokenizer.json."""
    vocab = {char: i for i, char in enumerate("abcdeHlo ")} | {"Ġ": 9, "ab": 10}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": 11, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"], "unk_token": None},
    } | more  # fmt: skip


_TOKENIZERS = [
    _bpe(),
    _bpe(model={"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}, pre_tokenizer=None),
    _bpe(model={"type": "Unigram", "vocab": [["a", -1.0], ["<unk>", 0.0]], "unk_id": 1}, decoder=None),
    _bpe(
        model={
            "type": "WordPiece",
            "vocab": {"a": 0, "[UNK]": 1},
            "unk_token": "[UNK]",
            "max_input_chars_per_word": 100,
        },
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": False},
    ),
]
_SAVED = [
    ByteTokenizer().to_json(),
    CharTokenizer("abc").to_json(),
    IdTokenizer(300).to_json(),
    {"kind": "classes", "names": ["cat", "dog"], "image": [4, 4, 1]},
    {
        "kind": "hf",
        "name": "x",
        "tokenizer": _bpe(),
        "chat": {"source": "{{ messages }}", "tokens": {"bos_token": "a"}},
    },
]
_TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}{{ m.content }}{% else %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "{% set ns = namespace(x='a') %}{% for i in range(9) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
]
_TEMPLATE_BITS = [
    "{{", "}}", "{%", "%}", "{#", "{{ ''.__class__.__mro__ }}", "{{ 'a' * 10**9 }}", "{{ 10**10**4 }}", "{{ 1 / 0 }}",
    "{{ '%1000000000d' % 1 }}", "{{ 'a'.center(10**10) }}", "{{ messages.append(1) }}", "{{ raise_exception(1) }}",
    "{{ lipsum(n=100) }}", "{% include 'x' %}", "{{ messages | tojson(indent=3) }}", "{{ self }}", "{{ [1] | sum(1) }}",
    "{{ x.y.z }}", "{% break %}", "{{ '\ufdd0' }}", "(" * 300, "{% if 1 %}" * 60, "\0", "{{ 9" + "9" * 5000 + " }}",
]  # fmt: skip


@st.composite
def _template(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from(_TEMPLATES))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(_TEMPLATE_BITS)) + text[at:]
    return text.encode("utf-8", "surrogatepass")


# --- runs and models --------------------------------------------------------------------------------------------------

_STEP = {"step": 1, "loss": 2.5, "time": 1e9, "seconds": {"step": 0.1}, "grad_norm": 1.0, "tokens_per_s": 5}
_RECORDS = [_STEP, _STEP | {"event": "resumed", "lost_s": 1.0}, {"step": 2, "eval_loss": 2.0, "watch": {"a": [1, 2]}}]
_SEAL = {"files": {"state/a": [3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"], "b": [0, "00"]}}
_EVALUATION = {
    "step": 4, "made": "2026-01-01", "versions": {"jax": "1"},
    "results": [{"task": "a", "metric": "acc", "filter": "none", "value": 0.5, "stderr": None}],
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, "bos_token_id": 1, "head_dim": 4,
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1,
}  # fmt: skip
_ADAPTER = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", "rank_pattern": {},
    "alpha_pattern": {}, "base_model_name_or_path": "x", "task_type": "CAUSAL_LM",
}  # fmt: skip


COSTS = {
    "forward": [1.0, 2.0], "backward": [2.0, 4.0], "state_bytes": [9.0, 9.0], "stash_bytes": [4.0, 4.0],
    "boundary_bytes": 3.0, "first": [1.0, 2.0], "last": [1.0, 2.0], "spread": True, "bandwidth": 1e9, "latency": 1e-5,
    "measured_on": "cpu", "memory_bytes": None,
}  # fmt: skip


@st.composite
def _safetensors(draw: st.DrawFn) -> bytes:
    header = draw(
        json_values(
            [
                {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}},
                {"w": {"dtype": "F8_E4M3", "shape": [2, 4], "data_offsets": [0, 8]}},
                {"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}},
            ]
        )
    )
    text = json_text(header).encode()
    length = draw(st.sampled_from([len(text), len(text), len(text), len(text) + 1, 0, 2**40, 2**63]))
    return length.to_bytes(8, "little") + text + bytes(draw(st.sampled_from([8, 8, 8, 7, 0, 100])))


# --- binary files -----------------------------------------------------------------------------------------------------

_NUMBERS = st.sampled_from([0, 1, 2, 3, 6, 2**31, 2**32 - 1, 2**40, 2**63 - 1])


@st.composite
def _megatron(draw: st.DrawFn) -> bytes:
    version, code, sequences, documents = 1, 8, 2, 3
    if draw(st.booleans()):
        code = draw(st.integers(0, 10))
        sequences = draw(_NUMBERS)
        documents = draw(_NUMBERS)
    lengths = draw(st.sampled_from([[2, 4], [6, 0], [-1, 7], [2**31 - 1, 2**31 - 1]]))
    pointers = draw(st.sampled_from([[0, 4], [0, 12], [0, -4], [2**62, 0]]))
    bounds = draw(st.sampled_from([[0, 1, 2], [0, 0, 2], [2, 1, 0], [0, 2**62, 2]]))
    return b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ2i2q3q", version, code, sequences, documents, *lengths, *pointers, *bounds
    )


@st.composite
def _llmc(draw: st.DrawFn) -> bytes:
    magic, version = draw(st.sampled_from([(20240520, 1), (20240801, 7), (20240520, 7), (0, 0)]))
    count = draw(st.sampled_from([4, 4, 0, -1, 2**31 - 1]))
    return struct.pack("<3i", magic, version, count).ljust(1024, b"\0") + np.arange(4, dtype="<u2").tobytes()


def _picture(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """A picture file, or nothing usable where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return b""
    file = io.BytesIO()
    Image.new(mode, (width, height), 100).save(file, kind)
    return file.getvalue()


def _png_of_size(width: int, height: int) -> bytes:
    """A PNG that declares a size, with the pixels of a small one."""
    import zlib

    content = _picture(4, 4)
    header = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


_PICTURES = [
    *(b"png\n" + _picture(4, 4, mode=mode) for mode in ("RGB", "L", "P", "1", "RGBA", "I;16")),
    *(b"jpg\n" + _picture(4, 4, "JPEG", mode) for mode in ("RGB", "L", "CMYK")),
    *(b"png\n" + _png_of_size(*size) for size in ((30_000, 30_000), (2**31 - 1, 2**31 - 1), (0, 4), (4000, 4000))),
    *(b"png\n" + _picture(4, 4, kind) for kind in ("GIF", "TIFF", "BMP", "WEBP", "ICO")),
    b"png\n%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n",
]


def _npz(compressed: bool = False, **arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def _archive(shape: str, dtype: str = "|u1") -> bytes:
    """An .npz file whose pictures declare a shape, and have 16 bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(16))
        archive.writestr("labels.npy", _npy(np.zeros(1, np.int64)))
    return file.getvalue()


_ZERO, _LABELS = np.zeros((3, 2, 2), np.uint8), np.zeros(3, np.int64)
_NPZ = [
    _npz(images=_ZERO, labels=_LABELS),
    _npz(compressed=True, images=np.zeros((3, 2, 2, 3), np.float32), labels=_LABELS),
    _npz(images=_ZERO.astype("c8"), labels=_LABELS),
    _npz(images=np.full((3, 2, 2), np.nan), labels=_LABELS),
    _npz(images=np.array(["a", "b", "c"]), labels=_LABELS),
    _npz(images=_ZERO, labels=np.array([2**40, 0, 1])),
    _npz(images=_ZERO, labels=np.array([2**31 - 1, 0, 1])),
    _npz(images=_ZERO[:, :0], labels=_LABELS),
    _npz(images=np.array(1.0), labels=np.array(1)),
    _npz(pictures=_ZERO),
    *map(_archive, ("(1, 10000, 10000)", "(2**60, 4)", "(-1, 4, 4)", "(1, 4, 4)", "()", "(99999999999, 99999999999)")),
    _archive("(1, 4, 4)", "|O"),
    _archive("(1000000000000, 4, 4)", "|S0"),
    _archive("(1, 4, 4)", "[('a', 'u1')]"),
]

_CAPTIONS = [
    {"picture": [[0, 255], [9, 3]], "text": "a cat", "key": ["cat"], "salient": [0, 0, 1, 2]},
    {"picture": [[[0, 1, 2], [3, 4, 5]]], "text": "two", "key": {"en": ["two"]}},
    {"picture": "a.png", "text": {"en": "a cat"}},
]

_BODIES = [
    {"prompt": "abc", "max_tokens": 4, "temperature": 0.5, "stop": ["x"], "logprobs": 2, "stream": False, "n": 2},
    {"prompt": [1, 2, 3], "echo": True, "seed": 1, "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "top_p": 0.9, "top_logprobs": 3},
    {"prompt": "1 2 " + "9" * 5000, "model": "m", "user": "u"},
]

INPUTS: dict[str, st.SearchStrategy[bytes]] = {
    "yaml": st.one_of(damaged(_yaml()), _bomb()),
    "flags": _flags(),
    "conversations": _lines(*_CHATS) | _json([*_CHATS]),
    "preferences": _lines(*_PREFERENCES) | _json([*_PREFERENCES]),
    "prompts": _lines(*_PROMPTS) | _json([*_PROMPTS]),
    "triples": _lines(*_TRIPLES) | _json([*_TRIPLES]),
    "phrases": damaged(st.sampled_from([b"New York\njson.dumps\n", b"\xef\xbb\xbfa\r\n\r\n b", b"x" * 99, b""])),
    "translations": _TRANSLATIONS,
    "token_header": _json(_HEADER, *(_HEADER | {"tokenizer": saved} for saved in _SAVED)),
    "token_starts": damaged(st.sampled_from([_npy(np.array(x)) for x in ([0, 10], [0, 99], [5, 1], [0.5, 1.5], [])])),
    "seal": _json(_SEAL),
    "tokenizer_file": _json(*_TOKENIZERS),
    # A run's own file, which `runs.read` parses: here only values, since broken JSON is another reader's matter.
    "saved_tokenizer": json_values(_SAVED).map(lambda value: json.dumps(value).encode()),
    "tokenizer_config": _json(
        {"chat_template": "{{ messages }}", "bos_token": {"content": "a"}, "model_max_length": 10**30},
        {"chat_template": [{"name": "default", "template": "x"}], "eos_token": "b"},
    ),
    "chat_template": _template(),
    "metrics": _lines(*_RECORDS),
    "report_config": damaged(_yaml()) | _bomb(),
    "report_tokenizer": _json(*_SAVED),
    "evaluation": _json(_EVALUATION),
    "safetensors": damaged(_safetensors()),
    "safetensors_index": _json({"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}),
    "hf_config": _json(_LLAMA, _GPT2),
    "adapter_config": _json(_ADAPTER),
    "megatron": damaged(_megatron()),
    "llmc": damaged(_llmc()),
    "nanogpt": damaged(
        st.sampled_from(
            [pickle.dumps({"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}, n) for n in range(6)]
            + [pickle.dumps({"itos": ["b", "a"]}), pickle.dumps({"itos": {}}), b"cos\nsystem\n(S'id'\ntR."]
        )
    ),
    "nanogpt_shard": damaged(
        st.sampled_from([_npy(np.arange(40, dtype="<u2")), np.arange(40, dtype="<u4").tobytes()]) | _llmc()
    ),
    "picture": damaged(st.sampled_from(_PICTURES)),
    "own_captions": _lines(*_CAPTIONS) | _json([*_CAPTIONS]),
    "npz": damaged(st.sampled_from(_NPZ)),
    "expert_load": _json({"experts": 2, "tokens": [[1, 2], [3, 4]]}),
    "expert_placement": _json({"experts": 4, "devices": 2, "slots": 2, "layers": [[[0, 1], [2, 3]], [[3, 2], [1, 0]]]}),
    "costs": _json(COSTS),
    "http_body": _json(*_BODIES),
}
"""What each reader reads, by the name that `fuzz_readers.READERS` gives it."""

assert TENSORS
