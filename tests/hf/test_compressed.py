"""Tests of quantised Hugging Face folders: what is read, every part of it, what is written, and what is refused.

An independent reader takes the bits of a row as one long number. The slow tests compare with the compressed-tensors
library and with transformers (extra `[parity]`).
"""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from families import FAMILIES
from test_hf import MODELS, change_json, equal, random_values, read

from jaxstack import families, hf, sharding
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.compress import quantize
from jaxstack.compress.calibrate import Walk
from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.families.context import make_context
from jaxstack.hf import compressed, quantized_folders, tensor_layout, weights
from jaxstack.hf import safetensors as tensor_files
from jaxstack.hf.compressed import Scheme
from jaxstack.kernels.rounding import NF4
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops

safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [test] or [hf]")

SCHEMES = {"int4": Scheme(4, 8), "int4 rows": Scheme(4), "int8": Scheme(8, 16), "fp8": Scheme(8, kind="float")}
INPUTS = Scheme(8, inputs="int8")
FP8, F32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)


def random_codes(rng, shape, scheme):
    """Returns random codes and scales of a matrix, with both ends of the format and a negative scale among them."""
    if scheme.kind == "float":
        codes = rng.normal(0, 20, shape).astype(FP8)
    elif scheme.kind == "normal":
        codes = np.float32(NF4)[rng.integers(0, 16, shape)]
    else:
        end = 1 << (scheme.bits - 1)
        codes = rng.integers(-end, end, shape).astype(np.int8)
        codes[0, :2] = -end, end - 1
    return codes, rng.normal(0, 0.1, (shape[0], scheme.groups(shape[1]))).astype(np.float32)


def dequantized(codes, scales):
    return codes.astype(np.float32) * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def save_quantized(folder, name, cfg, scheme, rng, dtype="float32"):
    """Writes a model with random codes for attention and MLPs, and returns its tensors, dequantised."""
    values = random_values(cfg, rng)
    tensors = weights.hf_tensors(name, families.spec(cfg))
    codes = {
        key: random_codes(rng, tensor.shape, scheme)
        for key, tensor in tensors.items()
        if key.endswith("proj.weight") or ".experts." in key
    }
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    codes = {key: (code, scale.astype(kind).astype(F32)) for key, (code, scale) in codes.items()}
    folder.mkdir()
    hf.save_pretrained(folder, cfg, values, dtype, 64, quantized=(scheme, codes))
    declared, leaves = families.spec(cfg), flatten(values)
    dense = {
        key: weights.build_tensor(tensor, weights.flat_spec(declared), leaves, kind).astype(F32)
        for key, tensor in tensors.items()
    }
    return dense | {key: dequantized(*pair) for key, pair in codes.items()}


def bits_of(row, bits, count):
    """Returns the codes of a row of words, read as one long number."""
    number = int.from_bytes(row.astype("<i4").tobytes(), "little")
    return [(number >> (i * bits)) % (1 << bits) - (1 << (bits - 1)) for i in range(count)]


def write_folder(path, tensors, bits=4, form="pack-quantized", outer=None, group=None, **changes):
    """Writes a folder with `tensors` alone and the `quantization_config` of one group of matrices."""
    own = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"} | changes
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    config |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": own} | (group or {})}} | (outer or {})
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    safetensors.save_file(tensors, path / tensor_files.SINGLE)
    return path


@pytest.mark.parametrize(
    ("bits", "form", "groups", "asymmetric"),
    [
        (4, "pack-quantized", 5, False),
        (4, "pack-quantized", 5, True),
        (8, "pack-quantized", 3, True),
        (8, "int-quantized", 1, False),
        (8, "int-quantized", 1, True),
        (8, "float-quantized", 1, False),
        (8, "naive-quantized", 0, False),
    ],
)
def test_every_part_of_a_matrix_is_what_the_bits_say(tmp_path, rng, bits, form, groups, asymmetric):
    """Parts begin and end anywhere, also within a word or a group. 0 groups: one scale for the whole matrix."""
    shape, name = (19, 60), "a.weight"
    scheme = Scheme(bits, kind="float" if form == "float-quantized" else "int")
    codes, _ = random_codes(rng, shape, scheme)
    scales = rng.normal(size=(19, groups) if groups else (1,)).astype(np.float32)
    tensors = {name: codes, f"{name}_scale": scales}
    if form == "pack-quantized":
        tensors = compressed.to_tensors(name, codes, scales, scheme, F32)
        words = tensors[f"{name}_packed"]
        assert words.shape == (19, -(-60 * bits // 32))
        np.testing.assert_array_equal([bits_of(row, bits, 60) for row in words], codes)
    expected = codes.astype(np.float32)
    if asymmetric:
        zeros = rng.integers(-8, 8, (19, groups)).astype(np.int8)
        packed = np.ascontiguousarray(compressed.pack(zeros.T, bits).T) if form == "pack-quantized" else zeros
        tensors[f"{name}_zero_point"] = packed
        expected -= np.repeat(zeros, 60 // groups, axis=1)
    expected *= np.repeat(scales, 60 // groups, axis=1) if groups else scales
    sizes = {"strategy": "group", "group_size": 60 // groups} if groups > 1 else {}
    sizes = sizes or {"strategy": "channel" if groups else "tensor"}
    plain = rng.normal(size=7).astype(np.float32)
    folder = write_folder(tmp_path / "folder", tensors | {"b.weight": plain}, bits, form,
                          type=scheme.kind, symmetric=not asymmetric, **sizes)  # fmt: skip
    files = quantized_folders.open_tensors(folder)
    assert {key: info.shape for key, info in files.infos.items()} == {name: shape, "b.weight": (7,)}
    np.testing.assert_array_equal(files.read("b.weight", (slice(2, 5),)), plain[2:5])
    for _ in range(40):
        top, left = rng.integers(0, 19), rng.integers(0, 60)
        part = slice(top, rng.integers(top, 19) + 1), slice(left, rng.integers(left, 60) + 1)
        np.testing.assert_array_equal(files.read(name, part), expected[part])
    np.testing.assert_array_equal(files.read(name, (slice(None), slice(None))), expected)
    files.__exit__()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_model_is_written_and_read_again(name, scheme, tmp_path, rng, monkeypatch):
    """The parameters equal those of a folder with the dequantised tensors, on one device and sharded over four."""
    monkeypatch.setattr(tensor_layout, "PIECE_BYTES", 700)
    cfg, scheme = dataclasses.replace(MODELS[name], vocab_size=64), SCHEMES[scheme]
    dense = save_quantized(tmp_path / "out", name, cfg, scheme, rng)
    plain = tmp_path / "plain"
    plain.mkdir()
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert set(values.pop("quantization_config")["ignore"]) >= {"lm_head"}
    (plain / "config.json").write_text(json.dumps(values))
    safetensors.save_file(dense, plain / tensor_files.SINGLE)
    expected = read(plain)
    with hf.PretrainedFolder(tmp_path / "out") as source:
        assert str(scheme) in source.formats
        equal(source.read_params(), expected)
    run = Config(model=cfg, mesh=MeshConfig(fsdp=2, tensor=2, data=1), data=DataConfig(batch_size=4))
    ctx = make_context(run, sharding.make_mesh(run.mesh, 4, jax.devices()[:4]))
    equal(read(tmp_path / "out", ctx), expected)


def test_the_configuration_names_formats_and_what_is_left(tmp_path, rng):
    """Where a group does not divide the inputs, the layer's name says which scales it has."""
    cfg = dataclasses.replace(FAMILIES["qwen3"], d_ff=40, tied_embeddings=False, moe=MODELS["qwen3_moe"].moe)
    cfg = dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, d_ff=20))
    save_quantized(tmp_path / "out", "qwen3_moe", cfg, Scheme(4, 16), rng, "bfloat16")
    made = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{i}.mlp.gate" for i in range(cfg.num_layers)]
    assert made["ignore"] == ["lm_head", *routers]
    groups = [
        (g["targets"], g["weights"]["strategy"], g["weights"]["group_size"]) for g in made["config_groups"].values()
    ]
    named = [rf"re:.*\.{layer}$" for layer in ("gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")]
    assert groups == [(named, "group", 16), ([r"re:.*\.down_proj$"], "channel", None)]
    held = tensor_files.TensorFiles(tmp_path / "out").infos
    q = "model.layers.0.self_attn.q_proj.weight"
    assert [held[q + part].dtype for part in ("_packed", "_scale", "_shape")] == ["I32", "BF16", "I64"]
    assert q not in held
    with hf.PretrainedFolder(tmp_path / "out") as source:
        assert source.formats == [str(Scheme(4, 16)), str(Scheme(4))]


def test_a_family_without_linear_layers_is_refused(tmp_path, rng):
    cfg = MODELS["gpt2"]
    codes = {"transformer.h.0.mlp.c_fc.weight": random_codes(rng, (cfg.d_model, cfg.ff_width), Scheme(4))}
    with pytest.raises(ConfigError, match="of the family gpt2 is not the weight of one linear layer"):
        hf.save_pretrained(tmp_path, cfg, random_values(cfg, rng), "float32", 64, quantized=(Scheme(4), codes))
    with pytest.raises(ConfigError, match="fp8 with bits=8 and group=64 cannot be stored"):
        Scheme(8, 64, "float")


A, SCALE = np.zeros((4, 16), np.int8), np.ones((4, 2), np.float32)
GOOD = compressed.to_tensors("a.weight", A, SCALE, Scheme(4, 8), F32)
GROUPS = {"strategy": "group", "group_size": 8}
REFUSED = {
    "gptq": (GOOD, {"outer": {"quant_method": "gptq"}}, 'quant_method="gptq" is not supported. Use the model before'),
    "format": (GOOD, {"form": "nvfp4-pack-quantized"}, "In nvfp4-pack-quantized of type int it cannot be read"),
    "bits": (GOOD, {"bits": 3}, "num_bits=3 is not supported"),
    "type": (GOOD, {"type": "float"}, "In pack-quantized of type float it cannot be read"),
    "order": (GOOD, {"actorder": "group"}, 'actorder="group" is not supported. Quantise the model with'),
    "status": (GOOD, {"outer": {"quantization_status": "frozen"}}, 'quantization_status="frozen"'),
    "cache": (GOOD, {"outer": {"kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme="),
    "sparse": (GOOD, {"outer": {"sparsity_config": {"format": "sparse-24-bitmask"}}}, "sparsity_config="),
    "rotated": (GOOD, {"outer": {"transform_config": {"config_groups": {}}}}, "transform_config="),
    "no groups": (GOOD, {"outer": {"config_groups": {}}}, "List at least one group of matrices"),
    "preset": (GOOD, {"outer": {"config_groups": {"W4A16": ["Linear"]}}}, "W4A16 is not a JSON object"),
    "unknown": (GOOD, {"outer": {"rotation": 3}}, "has 1 unknown key (rotation=3)"),
    "inputs": (GOOD, {"group": {"input_activations": compressed.INPUTS}}, "multiplied with weights of int8 and one"),
    "4-bit inputs": (GOOD, {"group": {"input_activations": compressed.INPUTS | {"num_bits": 4}}}, "num_bits=4"),
    "static inputs": (GOOD, {"group": {"input_activations": compressed.INPUTS | {"dynamic": False}}}, "dynamic=false"),
    "block": (GOOD, {"block_structure": [128, 128]}, "block_structure=[128, 128]"),
    "strategy": (GOOD, {"strategy": "token"}, 'strategy="token" is not supported. Use group, channel or tensor'),
    "group": (GOOD, {"group_size": None}, "group_size=null is not supported"),
    "symmetric": (GOOD, {"symmetric": 1}, "symmetric=1 is not supported"),
    "zero points": (GOOD, {"symmetric": False}, "has no a.weight_zero_point, which symmetric=false requires"),
    "no scale": ({k: v for k, v in GOOD.items() if "scale" not in k}, {}, "but not a.weight_scale"),
    "no shape": ({k: v for k, v in GOOD.items() if "shape" not in k}, {}, "but not a.weight_shape"),
    "no codes": ({k: v for k, v in GOOD.items() if "packed" not in k}, {}, "but not a.weight. Fetch"),
    "index": (GOOD | {"a.weight_g_idx": np.zeros(16, np.int32)}, {}, "a.weight_g_idx assigns inputs to groups"),
    "shape": (GOOD | {"a.weight_shape": np.array([4, 24])}, {}, "a.weight of shape [4, 24] has I32 codes [4, 2]"),
    "vector": (GOOD | {"a.weight_shape": np.array([4])}, {}, "a.weight of shape [4] has I32"),
    "scales": (GOOD | {"a.weight_scale": np.ones((4, 3), F32)}, {}, "scales [4, 3], which is not int4 with a"),
    "other group": (GOOD, {"group_size": 4}, "which is not int4 with a scale for 4 inputs"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_one_line(case, tmp_path):
    tensors, changes, words = REFUSED[case]
    folder = write_folder(tmp_path / "folder", tensors, **GROUPS | changes)
    with pytest.raises(ConfigError) as error:
        quantized_folders.open_tensors(folder)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_an_fp8_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, rng):
    save_quantized(tmp_path / "out", "llama", MODELS["llama"], SCHEMES["fp8"], rng)
    with hf.PretrainedFolder(tmp_path / "out") as source:
        with open(tmp_path / "out" / tensor_files.SINGLE, "r+b") as file:
            file.truncate(9000)
        with pytest.raises(ConfigError, match="cannot be read"):
            source.read_params()


def test_import_and_export_of_a_quantised_folder(tmp_path, rng, capsys):
    """The export is dense: its config.json is the imported one without the key of the quantisation."""
    dense = save_quantized(tmp_path / "in", "llama", MODELS["llama"], Scheme(4, 8), rng)
    change_json(tmp_path / "in/config.json", _note="kept")
    execute(["import", str(tmp_path / "in"), str(tmp_path / "run"), "--data.seq_len=32"])
    assert (
        "its matrices are quantised (int4 with a scale for 8 inputs) and are read as float32" in capsys.readouterr().out
    )
    execute(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    written = safetensors.load_file(tmp_path / "out" / tensor_files.SINGLE)
    assert written.keys() == dense.keys()
    assert [key for key in dense if not np.array_equal(dense[key], written[key])] == []
    before, after = (json.loads((tmp_path / path / "config.json").read_text()) for path in ("in", "out"))
    assert before.pop("quantization_config")["format"] == "pack-quantized"
    assert before == after


@pytest.fixture
def library():
    """Returns the module tests/hf/test_parity.py with transformers, for which the library must be installed."""
    pytest.importorskip("torch", reason="needs the extra [parity]")
    pytest.importorskip("compressed_tensors", reason="needs the extra [parity]")
    import test_parity

    return test_parity


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, kind="float")], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_computes_the_same_logits(name, scheme, dtype, library, tmp_path, rng):
    """Both compute in float32, with the products of codes and scales; scales of bfloat16 are stored exactly."""
    cfg = dataclasses.replace(MODELS[name], vocab_size=64, d_model=64, d_ff=96)
    save_quantized(tmp_path / "out", name, cfg, scheme, rng, dtype)
    load, torch = library.transformers.AutoModelForCausalLM.from_pretrained, library.torch
    theirs, info = load(tmp_path / "out", attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    tokens = rng.integers(0, cfg.vocab, (4, 48))
    expected = theirs.eval()(torch.from_numpy(tokens)).logits.numpy(force=True)
    got, _ = families.forward(cfg, read(tmp_path / "out"), tokens)
    # As in tests/hf/test_hf.py, where the weights are not quantised: other orders of the same sums.
    assert np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["int4", "int4 asymmetric", "int8", "fp8"])
def test_what_the_library_compresses_is_read_bit_for_bit(preset, dtype, library, tmp_path, rng):
    """It computes products in the dtype of the scales; ours are exact in float32 and round to the same numbers."""
    torch = library.torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kind, size = getattr(torch, dtype), (24, 64)
    own = {
        "int4": {"num_bits": 4, "strategy": "group", "group_size": 32},
        "int4 asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
        "int8": {"num_bits": 8, "strategy": "channel"},
        "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }[preset]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**own))
    form = "float-quantized" if preset == "fp8" else "pack-quantized"
    groups = size[1] // own.get("group_size", size[1])
    state = {
        "weight": torch.from_numpy(rng.normal(size=size)).to(kind),
        "weight_scale": torch.from_numpy(rng.uniform(0.01, 0.3, (size[0], groups))).to(kind),
    }
    zeros = torch.zeros(size[0], groups, dtype=torch.int8)
    if "asymmetric" in preset:
        zeros = torch.from_numpy(rng.integers(-8, 8, zeros.shape).astype(np.int8))
    state["weight_zero_point"] = zeros.to(torch.float8_e4m3fn) if preset == "fp8" else zeros
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    folder = write_folder(tmp_path / "folder", {}, form=form, **{"bits": own.pop("num_bits")} | own)
    import safetensors.torch

    held = {f"a.{key}": value.contiguous() for key, value in stored.items()}
    safetensors.torch.save_file(held, folder / tensor_files.SINGLE)
    files = quantized_folders.open_tensors(folder)
    got = files.read("a.weight", (slice(None), slice(None)))
    assert files.infos["a.weight"].dtype == {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert np.array_equal(torch.from_numpy(got).to(kind).float().numpy(), expected.float().numpy())
    files.__exit__()


@pytest.mark.slow
def test_the_library_packs_the_same_bits(library, rng):
    torch = library.torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    for bits in (4, 8):
        codes = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (6, 44)).astype(np.int8)
        for dim, ours in ((1, compressed.pack(codes, bits)), (0, compressed.pack(codes.T, bits).T)):
            np.testing.assert_array_equal(pack_to_int32(torch.tensor(codes), bits, packed_dim=dim).numpy(), ours)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "bits", "group"), [("llama3", 4, 16), ("qwen3", 8, None), ("gemma2", 4, 24)])
def test_transformers_computes_the_same_logits_after_rounding(library, tmp_path, rng, name, bits, group):
    """From a folder whose groups do not divide the inputs of every matrix; and so do we, when we read it."""
    torch, load = library.torch, library.transformers.AutoModelForCausalLM.from_pretrained

    cfg = FAMILIES[name]
    values = params.init(jax.random.key(3), families.spec(cfg))
    walk = Walk.of(cfg, Context())
    layers = list(quantize.quantize(walk, values, [], quantize.Settings(Scheme(bits, group), "rtn")))
    codes = quantize.hf_codes(cfg, layers)
    assert len(codes) == 7 * cfg.num_layers
    assert len({scale.shape[1] for _, scale in codes.values()}) > 1 or group is None
    new = jax.device_get(quantize.join(cfg, values, layers))
    hf.save_pretrained(tmp_path, cfg, new, "float32", 64, quantized=(Scheme(bits, group), codes))
    found = read(tmp_path)
    for path, value in flatten(new).items():
        np.testing.assert_array_equal(np.asarray(flatten(found)[path]), value, err_msg=path)
    tokens = rng.integers(0, cfg.vocab, (2, 40))
    theirs = load(tmp_path, dtype=torch.float32)(torch.tensor(tokens)).logits
    ours = np.asarray(families.forward(cfg, found, tokens)[0])
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=2e-4 * np.abs(ours).max())


def test_a_folder_with_quantised_inputs_is_imported_as_a_run_that_rounds_them(tmp_path, rng, capsys):
    save_quantized(tmp_path / "in", "llama", MODELS["llama"], INPUTS, rng)
    config = json.loads((tmp_path / "in/config.json").read_text())["quantization_config"]
    assert config["format"] == "int-quantized"
    assert config["config_groups"]["group_0"]["input_activations"] == {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True
    }  # fmt: skip
    execute(["import", str(tmp_path / "in"), str(tmp_path / "run"), "--data.seq_len=32"])
    assert "the run has train.quant=int8" in capsys.readouterr().out
    assert parse_config([f"--config={tmp_path / 'run/config.yaml'}"]).train.quant == "int8"
    own = safetensors.load_file(tmp_path / "in" / tensor_files.SINGLE)
    name = "model.layers.1.mlp.down_proj.weight"
    safetensors.save_file(
        {k: v for k, v in own.items() if not k.startswith(name)} | {name: own[name].astype(F32)},
        tmp_path / "in" / tensor_files.SINGLE,
    )
    with pytest.raises(ConfigError, match=rf"inputs are quantised, but not those of {name}\. Set input_activations"):
        hf.PretrainedFolder(tmp_path / "in")
    save_quantized(tmp_path / "experts", "qwen3_moe", MODELS["qwen3_moe"], INPUTS, rng)
    with pytest.raises(ConfigError, match="jaxstack does not round the inputs of experts"):
        hf.PretrainedFolder(tmp_path / "experts")


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_transformers_rounds_the_same_inputs(library, tmp_path, rng, name, monkeypatch):
    """The library divides the largest number of a token by 127.5 and clips it; we, and vLLM, divide it by 127.

    With its scale as it is, both are as far from each other as from the model without rounded inputs. With ours in its
    place, what is left are sums in another order, and the few inputs that these move to the next code.
    """
    torch, load = library.torch, library.transformers.AutoModelForCausalLM.from_pretrained
    from compressed_tensors.quantization.utils import helpers

    cfg = FAMILIES[name]
    values = params.init(jax.random.key(3), families.spec(cfg))
    scheme = INPUTS
    layers = list(quantize.quantize(Walk.of(cfg, Context()), values, [], quantize.Settings(scheme, "rtn")))
    new = jax.device_get(quantize.join(cfg, values, layers))
    hf.save_pretrained(tmp_path, cfg, new, "float32", 64, quantized=(scheme, quantize.hf_codes(cfg, layers)))
    found = read(tmp_path)
    tokens = rng.integers(0, cfg.vocab, (2, 40))
    plain, ours = (
        np.asarray(families.forward(cfg, found, tokens, Context(ops=Ops(quant=q)))[0]) for q in ("none", "int8")
    )
    theirs = load(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        apart = np.linalg.norm(theirs(torch.tensor(tokens)).logits.numpy() - ours)
        assert 0 < apart < 2 * np.linalg.norm(ours - plain)
        real = helpers.calculate_qparams
        monkeypatch.setattr(
            helpers, "calculate_qparams", lambda *a, **k: (real(*a, **k)[0] * (127.5 / 127), real(*a, **k)[1])
        )
        apart = np.linalg.norm(theirs(torch.tensor(tokens)).logits.numpy() - ours)
    assert apart < 0.1 * np.linalg.norm(ours - plain)


@pytest.mark.parametrize("shape", [(), (6,), (4, 6), (2, 4, 6)], ids=str)
def test_fp8_tensors_of_any_rank_are_read(shape, rng, tmp_path):
    """Biases and norms of some folders are float8 too. The file is written by the definition of its format."""
    values = np.asarray(rng.integers(0, 0x7F, shape), np.uint8)  # all are finite
    header = json.dumps({"x": {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [0, values.nbytes]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    with tensor_files.TensorFiles(tmp_path) as opened:
        whole = opened.read("x", (slice(None),) * len(shape))
        np.testing.assert_array_equal(whole.view(np.uint8), values)
        if shape:
            part = opened.read("x", (slice(1, None), *[slice(0, 3)] * (len(shape) - 1)))
            np.testing.assert_array_equal(
                part.view(np.uint8), values[(slice(1, None), *[slice(0, 3)] * (len(shape) - 1))]
            )
