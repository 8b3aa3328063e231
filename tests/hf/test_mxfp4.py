"""Tests of folders whose experts are mxfp4, as gpt-oss is published: every number, every part, and what is refused."""

import json

import numpy as np
import pytest
from test_hf import MODELS, random_values, read, save

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.hf import quantized_folders
from jaxstack.hf import safetensors as tensor_files

safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [test] or [hf]")

NAME = "model.layers.0.mlp.experts.down_proj"
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write_folder(path, tensors, **changes):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": METHOD | changes}))
    safetensors.save_file(tensors, path / tensor_files.SINGLE)
    return path


def random_blocks(rng, experts=3, outputs=5, groups=2):
    """Returns random codes and exponents of a matrix, as its tensors."""
    blocks = rng.integers(0, 256, (experts, outputs, groups, 16)).astype(np.uint8)
    return {f"{NAME}_blocks": blocks, f"{NAME}_scales": rng.integers(110, 140, blocks.shape[:3]).astype(np.uint8)}


def test_every_number_is_what_its_bits_say(tmp_path):
    """A sign, two bits of exponent with a bias of 1, and one of mantissa; without an exponent the leading bit is 0."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    scales = np.full((1, 1, 16), 127 + 3, np.uint8)
    files = quantized_folders.open_tensors(write_folder(tmp_path, {f"{NAME}_blocks": codes, f"{NAME}_scales": scales}))

    def number(code):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        return (-size if sign else size) * 2.0**3

    expected = [number(half) for byte in range(256) for half in (byte & 15, byte >> 4)]  # low bits first
    assert (files.infos[NAME].shape, files.infos[NAME].dtype) == ((1, 512, 1), "BF16")
    np.testing.assert_array_equal(files.read(NAME, (slice(None),))[0, :, 0], expected)
    files.__exit__()


def test_every_part_is_what_transformers_makes_of_it(tmp_path, rng):
    torch = pytest.importorskip("torch", reason="needs the extra [parity]")
    theirs = pytest.importorskip("transformers.integrations.mxfp4", reason="needs the extra [parity]")
    tensors = random_blocks(rng)
    both = (torch.from_numpy(tensors[f"{NAME}_{part}"]) for part in ("blocks", "scales"))
    expected = theirs.convert_moe_packed_tensors(*both).float().numpy()
    files = quantized_folders.open_tensors(write_folder(tmp_path / "in", tensors | {"b": np.ones(3, np.float32)}))
    assert {key: info.shape for key, info in files.infos.items()} == {NAME: expected.shape, "b": (3,)}
    np.testing.assert_array_equal(files.read(NAME, (slice(1, 2),)), expected[1:2])
    for _ in range(20):
        starts = [rng.integers(0, n) for n in expected.shape]
        index = tuple(slice(a, rng.integers(a + 1, n + 1)) for a, n in zip(starts, expected.shape, strict=True))
        np.testing.assert_array_equal(files.read(NAME, index), expected[index])
    files.__exit__()


def quantized(tensors, rng):
    """Returns a folder's tensors with random codes in place of the matrices of experts, and the dense matrices."""
    found, dense = {}, {}
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = dense[name] = value
            continue
        experts, inputs, outputs = value.shape
        codes = rng.integers(0, 16, (experts, outputs, inputs))
        scales = rng.integers(120, 130, (experts, outputs, inputs // 32))
        sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        numbers = np.where(codes > 7, -1, 1) * sizes[codes % 8] * 2.0 ** (np.repeat(scales, 32, 2) - 127)
        dense[name] = numbers.swapaxes(1, 2).astype(np.float32)
        pairs = codes.reshape(experts, outputs, inputs // 32, 16, 2)
        found[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
        found[f"{name}_scales"] = scales.astype(np.uint8)
    return found, dense


def test_a_published_folder_is_imported_and_exported_dense(tmp_path, rng, capsys):
    cfg = MODELS["gpt_oss"].__class__(**vars(MODELS["gpt_oss"]) | {"d_model": 64, "d_ff": 32})
    path = save(tmp_path / "in", cfg, random_values(cfg, rng))
    packed, dense = quantized(safetensors.load_file(path / tensor_files.SINGLE), rng)
    (path / tensor_files.SINGLE).unlink()
    safetensors.save_file(packed, path / tensor_files.SINGLE)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": METHOD}))
    values = read(path)
    gates = dense["model.layers.1.mlp.experts.gate_up_proj"][..., ::2]
    np.testing.assert_array_equal(values["layers"]["moe"]["w_gate"][1], gates)
    execute(["import", str(path), str(tmp_path / "run"), "--data.seq_len=32"])
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    written = safetensors.load_file(tmp_path / "out" / tensor_files.SINGLE)
    assert written.keys() == dense.keys()
    assert [key for key in dense if not np.array_equal(dense[key], written[key])] == []
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


REFUSED = {
    "no scales": (lambda t: {k: v for k, v in t.items() if "scales" not in k}, {}, f"but not {NAME}_scales"),
    "no blocks": (lambda t: {k: v for k, v in t.items() if "blocks" not in k}, {}, f"but not {NAME}_blocks"),
    "other blocks": (lambda t: t | {f"{NAME}_blocks": t[f"{NAME}_blocks"][..., :8]}, {}, "is not mxfp4 with a scale"),
    "another dtype": (lambda t: t | {f"{NAME}_scales": t[f"{NAME}_scales"].astype(np.int32)}, {}, "I32 scales"),
    "another key": (lambda t: t, {"new_key": 1}, "new_key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_one_line(case, tmp_path, rng):
    change, values, words = REFUSED[case]
    folder = write_folder(tmp_path / "in", change(random_blocks(rng)), **values)
    with pytest.raises(ConfigError) as error:
        quantized_folders.open_tensors(folder)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
