"""Everything that reads a file or a text from others, as functions of the bytes to read. The child process runs them.

Each writes the bytes where its reader looks for them, calls the reader, and uses the result as a command would.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxstack import data
from jaxstack.checkpoint import evaluations, manifest
from jaxstack.common.errors import ConfigError
from jaxstack.config import DataConfig, SampleConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.data import binary, chat, images, tokenizers, tokens
from jaxstack.data import own_captions as pictures_with_texts
from jaxstack.data.chat import JinjaTemplate, PlainTemplate
from jaxstack.data.conversations import read_conversations
from jaxstack.data.phrases import Phrases, read_phrases
from jaxstack.data.preferences import read_preferences
from jaxstack.data.rewarded import read_prompts
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer, IdTokenizer
from jaxstack.data.translations import read_translations
from jaxstack.data.triples import encode_triples, read_triples
from jaxstack.hf import configs, peft
from jaxstack.hf.safetensors import INDEX, SINGLE, TensorFiles
from jaxstack.moe import placement
from jaxstack.pipeline.costs import Costs
from jaxstack.report import runs
from jaxstack.serve import requests
from jaxstack.serve.requests import ApiError
from jaxstack.tracking import jsonl

Read = Callable[[bytes, Path], object]
READERS: dict[str, Read] = {}
NEEDS = {"tokenizer_file": "tokenizers", "chat_template": "jinja2"}
"""Packages of the extra `[hf]`, without which these readers refuse every input."""
"""Every reader by name: a function of the bytes and of an empty folder."""

ERRORS: dict[str, tuple[type[Exception], ...]] = {}
"""The errors that a reader's docstring promises, where they are others than `ConfigError`."""


def reader(*errors: type[Exception]) -> Callable[[Read], Read]:
    """Adds a function to `READERS` under its name."""

    def add(function: Read) -> Read:
        READERS[function.__name__] = function
        ERRORS[function.__name__] = errors or (ConfigError,)
        return function

    return add


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@reader()
def yaml(content: bytes, folder: Path) -> object:
    return parse_config([f"--config={write(folder / 'config.yaml', content)}"])


@reader()
def flags(content: bytes, folder: Path) -> object:
    # The words of a command line are C strings: any bytes but zero, of which Python makes text as it does here.
    words = [word.decode(errors="surrogateescape") for word in content.replace(b"\0", b"").split(b"\n")]
    return parse_config([word for word in words if word not in ("-h", "--help", "--print_config")])


@reader()
def conversations(content: bytes, folder: Path) -> object:
    return [*read_conversations(str(write(folder / "chat.jsonl", content)))]


@reader()
def preferences(content: bytes, folder: Path) -> object:
    return [*read_preferences(str(write(folder / "pairs.jsonl", content)))]


@reader()
def prompts(content: bytes, folder: Path) -> object:
    return [*read_prompts(str(write(folder / "prompts.jsonl", content)))]


@reader()
def triples(content: bytes, folder: Path) -> object:
    return encode_triples(read_triples(str(write(folder / "facts.jsonl", content))), ByteTokenizer(), 64)


@reader()
def phrases(content: bytes, folder: Path) -> object:
    return Phrases.of(read_phrases(str(write(folder / "phrases.txt", content))), ByteTokenizer(), 64, 257)


@reader()
def translations(content: bytes, folder: Path) -> object:
    kind, _, rest = content.partition(b"\n")
    suffix = {b"tsv": ".tsv", b"jsonl": ".jsonl", b"po": ".po", b"mo": ".mo"}.get(kind, ".po")
    return [*read_translations(str(write(folder / f"de{suffix}", rest)), ["de"], Counter())]


def token_file(folder: Path) -> Path:
    """Writes a token file into a folder."""
    documents = [data.Document("a", "some text"), data.Document("b", "more of it")]
    tokens.write_token_file(folder / "tokens", documents, ByteTokenizer())
    return folder / "tokens"


@reader()
def token_header(content: bytes, folder: Path) -> object:
    path = token_file(folder)
    write(folder / "tokens.json", content)
    return np.asarray(tokens.read_token_file(path)[0].ids).sum()


@reader()
def token_starts(content: bytes, folder: Path) -> object:
    path = token_file(folder)
    write(folder / "tokens.starts.npy", content)
    return tokens.read_token_file(path)[0].starts[:].sum()


@reader(OSError, ValueError)
def seal(content: bytes, folder: Path) -> object:
    write(folder / "4" / "state" / "a", b"abc")
    write(folder / "4" / manifest.NAME, content)
    manifest.complete_steps(folder)
    return manifest.listing_corruption(folder / "4") or manifest.corruption(folder / "4")


def use(tokenizer: data.Tokenizer) -> object:
    """Uses all functions of a tokenizer."""
    try:
        ids = tokenizer.encode("Hello wörld 1 2")
    except ConfigError:
        ids = np.zeros(1, np.int64)
    tokenizer.encode_with_offsets(tokenizer.decode(ids))
    tokenizer.num_bytes(ids)
    tokenizer.to_bytes(ids)
    return json.dumps(tokenizer.to_json())


@reader()
def tokenizer_file(content: bytes, folder: Path) -> object:
    return use(tokenizers.make_tokenizer(str(write(folder / "tokenizer.json", content)), ()))


@reader()
def saved_tokenizer(content: bytes, folder: Path) -> object:
    found = tokenizers.tokenizer_from_json(json.loads(content))
    if isinstance(found, tokenizers.HFTokenizer) and found.chat is not None:
        chat.template_for(found)
    return use(found)


@reader()
def tokenizer_config(content: bytes, folder: Path) -> object:
    write(folder / "tokenizer_config.json", content)
    return chat.read_template(str(folder / "tokenizer.json"))


@reader()
def chat_template(content: bytes, folder: Path) -> object:
    write(folder / "chat_template.jinja", content)
    saved = chat.read_template(str(folder / "tokenizer.json"))
    assert saved is not None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return JinjaTemplate("the template", saved).render(turns)


CONFIG = b"run:\n  dir: x\nmodel:\n  num_layers: 2\n"
METRICS = b'{"step": 1, "loss": 2.5, "seconds": {"step": 0.1}}\n'


@reader()
def metrics(content: bytes, folder: Path) -> object:
    log = write(folder / "metrics.jsonl", content)
    jsonl.JsonLines(log).rewind(3)
    write(folder / "metrics.jsonl", content)
    write(folder / "config.yaml", CONFIG)
    return runs.read_runs([folder])[0]


@reader()
def report_config(content: bytes, folder: Path) -> object:
    write(folder / "metrics.jsonl", METRICS)
    write(folder / "config.yaml", content)
    loaded = runs.read_runs([folder])[0]
    return runs.config_differences([loaded, loaded])


@reader()
def report_tokenizer(content: bytes, folder: Path) -> object:
    write(folder / "metrics.jsonl", METRICS)
    write(folder / "tokenizer.json", content)
    return runs.read_runs([folder])[0]


@reader()
def evaluation(content: bytes, folder: Path) -> object:
    write(folder / "evaluations" / "step_4_1.json", content)
    return evaluations.read(folder)


@reader()
def safetensors(content: bytes, folder: Path) -> object:
    write(folder / SINGLE, content)
    with TensorFiles(folder) as files:
        return [files.read(name, tuple(slice(0, n) for n in info.shape)) for name, info in files.infos.items()]


@reader()
def safetensors_index(content: bytes, folder: Path) -> object:
    write(folder / INDEX, content)
    write(folder / "model-00001-of-00001.safetensors", TENSORS)
    with TensorFiles(folder) as files:
        return [*files.infos]


TENSORS = (lambda header: len(header).to_bytes(8, "little") + header + bytes(8))(
    json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
)
"""A safetensors file with one tensor `w`."""


@reader()
def hf_config(content: bytes, folder: Path) -> object:
    write(folder / "config.json", content)
    return configs.read_config(folder)


@reader()
def adapter_config(content: bytes, folder: Path) -> object:
    return peft._read_config(write(folder / "adapter_config.json", content))


@reader()
def megatron(content: bytes, folder: Path) -> object:
    write(folder / "a.idx", content)
    write(folder / "a.bin", np.arange(6, dtype="<u2").tobytes())
    return opened(folder / "a.bin", "megatron")


@reader()
def llmc(content: bytes, folder: Path) -> object:
    return opened(write(folder / "a.bin", content), "llmc")


@reader()
def nanogpt(content: bytes, folder: Path) -> object:
    write(folder / "train.bin", np.arange(2, dtype="<u2").tobytes())
    write(folder / "meta.pkl", content)
    cfg = DataConfig(source="tokens", path=str(folder / "train.bin"), format="nanogpt", tokenizer="chars")
    return np.asarray(binary.open_binary(cfg).train.ids).sum()


@reader()
def nanogpt_shard(content: bytes, folder: Path) -> object:
    return opened(write(folder / "a.npy", content), "nanogpt")


def opened(path: Path, kind: str) -> object:
    cfg = DataConfig(source="tokens", path=str(path), format=kind, tokenizer="ids", vocab_size=1000)
    return np.asarray(binary.open_binary(cfg).train.ids).sum()


@reader()
def picture(content: bytes, folder: Path) -> object:
    kind, _, rest = content.partition(b"\n")
    write(folder / "cat" / f"a.{'jpg' if kind == b'jpg' else 'png'}", rest)
    return images.read_images(DataConfig(source="images", path=str(folder)))[0].pixels.sum()


@reader()
def own_captions(content: bytes, folder: Path) -> object:
    path = write(folder / "captions.jsonl", content)
    found = pictures_with_texts.read_own_captions(DataConfig(source="captions", path=str(path)))
    return found.key_tokens(tokenizers.make_tokenizer("bytes", ()), 8, ["a"]).sum()


@reader()
def npz(content: bytes, folder: Path) -> object:
    path = write(folder / "a.npz", content)
    return images.read_images(DataConfig(source="images", path=str(path)))[0].pixels.sum()


@reader()
def expert_load(content: bytes, folder: Path) -> object:
    return placement.read_load(write(folder / "load.json", content))


@reader()
def expert_placement(content: bytes, folder: Path) -> object:
    return placement.read(write(folder / "placement.json", content), 2, 4)


@reader()
def costs(content: bytes, folder: Path) -> object:
    return Costs.load(write(folder / "costs.json", content))


@reader(ApiError)
def http_body(content: bytes, folder: Path) -> object:
    texts = [ByteTokenizer(), CharTokenizer("abc Helo"), IdTokenizer(1000)]
    tokenizer = texts[len(content) % 3]
    model = requests.Model(
        name="m",
        tokenizer=tokenizer,
        template=PlainTemplate(),
        sample=SampleConfig(),
        seed=None,
        context=256,
        max_tokens=64,
        max_texts=8,
        vocabulary=tokenizer.vocab_size,
    )
    return requests.read_request(content, model, chat=len(content) % 2 == 0)


def clear(folder: Path) -> Path:
    """Returns a folder after emptying it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
