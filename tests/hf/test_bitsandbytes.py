"""Tests of folders in nf4: every part of a matrix, what is written, and what is refused.

The slow tests compare with the library bitsandbytes and with transformers (extra `[parity]`).
"""

import dataclasses
import json

import numpy as np
import pytest
from test_compressed import save_quantized
from test_hf import MODELS, read

from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.config.scheme import Scheme
from jaxstack.hf import bitsandbytes, quantized_folders
from jaxstack.hf import safetensors as tensor_files
from jaxstack.kernels.rounding import NF4, round_to_nearest

safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [test] or [hf]")

SCHEME, NAME = Scheme(4, 64, "normal"), "a.weight"
MODEL = dataclasses.replace(MODELS["llama"], vocab_size=64, d_model=64, d_ff=128)


def write_folder(path, tensors, **changes):
    """Writes a folder with `tensors` and the `quantization_config` that transformers writes."""
    values = {"quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True}
    values |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_threshold": 6.0}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": values | changes}))
    safetensors.save_file(tensors, path / tensor_files.SINGLE)
    return path


def random_matrix(rng, shape=(6, 192), dtype="float32"):
    """Returns positions in the table, scales, and the tensors that hold them."""
    positions, scales = rng.integers(0, 16, shape), rng.normal(size=(shape[0], shape[1] // 64)).astype(np.float32)
    tensors = bitsandbytes.to_tensors(NAME, np.float32(NF4)[positions], scales, dtype)
    return positions, scales, tensors


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_every_part_of_a_matrix_is_what_the_bytes_say(tmp_path, rng, dtype, stored):
    """Values are products in float32, whatever the matrix was before."""
    positions, scales, tensors = random_matrix(rng, dtype=dtype)
    digits = tensors[NAME].tobytes().hex()  # a hexadecimal digit is a position, the first in the high bits
    assert [int(digit, 16) for digit in digits] == positions.ravel().tolist()
    expected = np.float32(NF4)[positions] * np.repeat(scales, 64, axis=1)
    files = quantized_folders.open_tensors(write_folder(tmp_path / "in", tensors | {"b.weight": np.ones(3)}))
    assert {key: info.shape for key, info in files.infos.items()} == {NAME: (6, 192), "b.weight": (3,)}
    assert (files.scheme_of(NAME), files.scheme_of("b.weight"), files.schemes) == (SCHEME, None, {SCHEME})
    assert files.infos[NAME].dtype == stored
    for _ in range(20):
        top, left = rng.integers(0, 6), rng.integers(0, 192)
        index = slice(top, rng.integers(top, 7)), slice(left, rng.integers(left, 193))
        np.testing.assert_array_equal(files.read(NAME, index), expected[index])
    np.testing.assert_array_equal(files.read(NAME, (slice(2, 4),)), expected[2:4])
    files.__exit__()


def test_a_folder_is_imported_as_it_was_written(tmp_path, rng, capsys):
    dense = save_quantized(tmp_path / "in", "llama", MODEL, SCHEME, rng)
    execute(["import", str(tmp_path / "in"), str(tmp_path / "run"), "--data.seq_len=32"])
    assert "nf4 with a scale for 64 inputs" in capsys.readouterr().out
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    written = safetensors.load_file(tmp_path / "out" / tensor_files.SINGLE)
    assert [key for key in dense if not np.array_equal(dense[key], written[key])] == []
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


STATE = NAME + ".quant_state.bitsandbytes__nf4"


def changed_state(tensors, **changes):
    state = json.loads(tensors[STATE].tobytes()) | changes
    return tensors | {STATE: np.frombuffer(json.dumps(state).encode(), np.uint8)}


REFUSED = {
    "no scales": (lambda t: {k: v for k, v in t.items() if "absmax" not in k}, {}, "but not a.weight.absmax"),
    "other numbers": (lambda t: t | {NAME + ".quant_map": np.zeros(16, np.float32)}, {}, "other numbers than nf4"),
    "another size": (lambda t: t | {NAME: t[NAME][1:]}, {}, "has codes [575, 1]"),
    "blocks over rows": (lambda t: changed_state(t, shape=[12, 96]), {}, "blocks of 64 numbers, which go over rows"),
    "no shape": (lambda t: changed_state(t, shape=None), {}, "which is not supported"),
    "no JSON": (lambda t: t | {STATE: np.frombuffer(b"{", np.uint8)}, {}, "the state of a.weight is {, which"),
    "no offset": (lambda t: changed_state(t, nested_blocksize=256), {}, "which is not supported"),
    "another dtype": (lambda t: changed_state(t, dtype="float64"), {}, "which is not supported"),
    "fp4": (lambda t: t, {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
    "8 bits": (lambda t: t, {"load_in_8bit": True}, "load_in_8bit"),
    "another key": (lambda t: t, {"new_key": 1}, "new_key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_one_line(case, tmp_path, rng):
    change, values, words = REFUSED[case]
    folder = write_folder(tmp_path / "in", change(random_matrix(rng)[2]), **values)
    with pytest.raises(ConfigError) as error:
        quantized_folders.open_tensors(folder)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_groups_that_cannot_be_stored_are_refused():
    with pytest.raises(ConfigError, match=r"nf4 with group=32 cannot be stored. Use one of 64, 128"):
        Scheme.of("nf4", 32)
    with pytest.raises(ConfigError, match="cannot be used for a matrix with 96 inputs"):
        Scheme.of("nf4", 64).groups(96)


@pytest.fixture
def library():
    """Returns the library and torch."""
    torch = pytest.importorskip("torch", reason="needs the extra [parity]")
    return pytest.importorskip("bitsandbytes.functional", reason="needs the extra [parity]"), torch


@pytest.mark.matrix
@pytest.mark.parametrize("double", [False, True])
def test_the_library_stores_the_same_bits_and_reads_the_same_values(double, library, tmp_path, rng):
    """Scales of 8 bits give the library's float32 values up to the order of two operations."""
    functional, torch = library
    w = rng.normal(size=(24, 256)).astype(np.float32)
    packed, state = functional.quantize_4bit(
        torch.from_numpy(w), blocksize=64, quant_type="nf4", compress_statistics=double
    )
    theirs = {NAME: packed.numpy()} | {f"{NAME}.{k}": v.numpy() for k, v in state.as_dict(packed=True).items()}
    made = round_to_nearest(w, SCHEME)
    ours = bitsandbytes.to_tensors(NAME, np.asarray(made.codes), np.asarray(made.scales), "float32")
    for part in (NAME, *([] if double else [f"{NAME}.absmax"]), f"{NAME}.quant_map"):
        np.testing.assert_array_equal(ours[part], theirs[part])
    files = quantized_folders.open_tensors(write_folder(tmp_path / "in", theirs))
    got = files.read(NAME, (slice(None), slice(None)))
    expected = functional.dequantize_4bit(packed, state).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-6 if double else 0)
    files.__exit__()


@pytest.mark.slow
def test_transformers_computes_the_same_logits(library, tmp_path, rng):
    """Both compute in float32, which the folder names, with the same matrices."""
    _, torch = library
    import transformers

    save_quantized(tmp_path / "out", "llama", MODEL, SCHEME, rng)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    tokens = rng.integers(0, MODEL.vocab, (4, 48))
    expected = theirs.eval()(torch.from_numpy(tokens)).logits.numpy(force=True)
    got, _ = families.forward(MODEL, read(tmp_path / "out"), tokens)
    # As in tests/hf/test_hf.py, where the weights are not quantised: other orders of the same sums.
    assert np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()
