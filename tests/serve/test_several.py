"""Tests the server of models that do not continue texts: over real sockets, with tiny models of random weights."""

import asyncio
import base64
import dataclasses
import gc
import http.client
import io
import json
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxstack import families, sharding
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError, resolve
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.tokenizers import ByteTokenizer, ClassNames, Tokenizer
from jaxstack.families.context import make_context
from jaxstack.generate.encode import ROWS, TextEncoder
from jaxstack.loaded.trained_run import TrainedRun
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops, implementations
from jaxstack.serve.access import Access

pytest.importorskip("uvicorn", reason="needs the extra [serve]")

from jaxstack.serve.app import Limits
from jaxstack.serve.catalog import Catalog, names_of, parameter_bytes
from jaxstack.serve.errors import ApiError
from jaxstack.serve.kinds import kinds_of
from jaxstack.serve.several import SeveralModels

SMALL = ["--model.num_layers=1", "--model.d_model=16", "--model.num_heads=2", "--model.d_ff=24"]
TEXT = [*SMALL, "--model.vocab_size=320", "--data.tokenizer=bytes", "--data.seq_len=64"]
MODELS = {
    "encoder": [*TEXT, "--model.num_layers=2", "--config=encoder_quickstart"],
    "labels": [
        *TEXT, "--model.num_layers=2", "--config=encoder_quickstart", "--data.source=labels",
        "--data.path=reviews.jsonl", "--model.labels=[bad,good]",
    ],
    "translator": [
        *TEXT, "--config=translate_quickstart", "--model.encoder_layers=1", "--data.languages=[de,fr]",
        "--data.domains=[de,fr]", "--model.moe.num_experts=2", "--data.target_len=24",
    ],
    "contrastive": [*TEXT, "--config=contrastive_digits", "--model.encoder_layers=1", "--data.seq_len=16"],
    "diffusion": [*SMALL, "--config=diffusion_digits", "--model.d_ff=16", "--sample.steps=2"],
}  # fmt: skip
KEY = "a-key-of-this-test"
IMAGE = (8, 8, 1)


def make_run(name: str, **mesh: int) -> TrainedRun:
    """Returns a run with random weights that has not trained."""
    shown = [f"--mesh.{axis}={size}" for axis, size in ({"data": 1} | mesh).items()]
    cfg = parse_config([*MODELS[name], *shown])
    classes = name == "diffusion"
    tokenizer: Tokenizer = ClassNames(tuple("0123456789"), IMAGE) if classes else ByteTokenizer()
    cfg = resolve(cfg, tokenizer.vocab_size, IMAGE)
    count = int(np.prod([*cfg.mesh.sizes.values()]))
    ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:count]))
    values = params.init(jax.random.key(1), families.spec(cfg.model))
    rng = np.random.default_rng(0)  # heads begin with zeros: every answer would be the same
    values = jax.tree.map(lambda a: a + 0.1 * rng.standard_normal(a.shape).astype(np.float32), values)
    shardings = jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(families.spec(cfg.model)))
    return TrainedRun(cfg, jax.device_put(values, shardings), tokenizer, ctx)


class Running:
    """A server of all models in threads of this process."""

    def __init__(self, runs: dict[str, TrainedRun]) -> None:
        from jaxstack.serve.http import Http

        self.runs = runs
        self.lines: list[str] = []
        models = {name: run.config.model for name, run in runs.items()}
        self.catalog = Catalog(models, lambda name: self.runs[name])
        limits = Limits(texts=4, body_bytes=5000, seconds=300)
        self.server = SeveralModels(self.catalog, models, limits, self.lines.append, Access(key=KEY))
        self._http = Http(self.server, grace=1)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._http.serve([listener])), daemon=True)
        self._thread.start()
        while not self._http.started:
            time.sleep(0.01)

    def ask(self, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
        """Returns status and answer of a request; one without a body is a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def stop(self) -> None:
        self._http.should_exit = True
        self._thread.join()
        self.server.worker.stop()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    server = Running({name: make_run(name) for name in MODELS})
    yield server
    server.stop()


def error(answer: tuple[int, Any]) -> tuple[int, str]:
    status, body = answer
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["message"]


def test_embeddings_are_means_of_the_layers_outputs(running):
    """A text alone, and among others of other lengths: the same vector, of length 1, and the mean of its tokens."""
    texts = ["a text", "another one that is longer than 64 tokens, so that it does not share its program", "b"]
    status, answer = running.ask("/v1/embeddings", {"model": "encoder", "input": texts})
    assert status == 200, answer
    vectors = np.array([row["embedding"] for row in answer["data"]])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    run = running.runs["encoder"]
    for text, vector in zip(texts, vectors, strict=True):
        alone = {"tokens": np.frombuffer(text.encode(), np.uint8)[None].astype(np.int32)}
        hidden = hidden_before_the_head(run, alone)[0]
        mean = hidden.mean(0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=2e-5)  # sums in another order
    _, again = running.ask("/v1/embeddings", {"model": "encoder", "input": [list(texts[0].encode())]})
    np.testing.assert_allclose(again["data"][0]["embedding"], vectors[0], atol=1e-6)


def hidden_before_the_head(run: TrainedRun, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the output of the last layer and its norm, by the parts of the family, without padding."""
    from jaxstack.models import layers

    family = families.of(run.model)
    ctx = Context(ops=Ops(**implementations("cpu")))
    inputs = family.make_layer_inputs(run.model, batch, ctx)
    x, _ = family.embed(run.model, run.params, inputs, ctx)
    stack = family.stacks(run.model)["layers"]
    for i in range(run.model.num_layers):
        own = jax.tree.map(lambda a, i=i: a[i], run.params["layers"])
        x = stack.block(run.model, stack, own, x, ctx, inputs, mask=stack.masks[i % len(stack.masks)])
    return np.asarray(layers.norm(run.model, run.params["final_norm"], x, ctx))


def test_openai_client_reads_embeddings_and_pictures(running):
    openai = pytest.importorskip("openai", reason="needs the package openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=KEY)
    found = client.embeddings.create(model="encoder", input=["one", "two"])  # asks for base64
    plain = client.embeddings.create(model="encoder", input=["one", "two"], encoding_format="float")
    np.testing.assert_allclose(found.data[1].embedding, plain.data[1].embedding, rtol=1e-6)
    pictures = client.images.generate(model="diffusion", prompt="3", n=2, size="8x8", extra_body={"seed": 5})
    assert len(pictures.data) == 2
    with pytest.raises(openai.NotFoundError, match=r"does not exist\. This server has encoder"):
        client.embeddings.create(model="other", input="x")
    assert {model.id for model in client.models.list()} == {*MODELS}


def test_contrastive_embeddings_are_the_features_of_the_run(running):
    texts = ["a three", "die Vier"]
    status, answer = running.ask("/v1/embeddings", {"model": "contrastive", "input": texts})
    assert status == 200, answer
    expected = running.runs["contrastive"].features(texts)
    np.testing.assert_allclose([row["embedding"] for row in answer["data"]], expected, atol=1e-6)


def test_fill_mask(running):
    """The first candidates of each mask are those of the logits; `sequence` has the token in its place."""
    text = "ab[MASK]d"
    status, answer = running.ask("/models/encoder", {"inputs": text, "parameters": {"top_k": 3}})
    assert status == 200, answer
    run = running.runs["encoder"]
    mask = run.config.data.mask_id
    (logits,) = TextEncoder.create(run.model, run.params, run.context).logits([[97, 98, mask, 100]])
    shares = np.exp(logits[2] - logits[2].max())
    shares /= shares.sum()
    order = [i for i in np.argsort(-shares)[:3] if i < 256]
    assert [one["token"] for one in answer] == order
    np.testing.assert_allclose([one["score"] for one in answer], shares[order], rtol=1e-4)
    assert all(one["sequence"] == run.tokenizer.decode([97, 98, one["token"], 100]) for one in answer)
    _, two = running.ask("/models/encoder", {"inputs": ["[MASK]x[MASK]", text], "parameters": {"top_k": 3}})
    assert [len(one) for one in two] == [2, len(answer)]
    assert [one["sequence"] for one in two[1]] == [one["sequence"] for one in answer]


def test_classification(running):
    status, answer = running.ask("/models/labels", {"inputs": ["What a lens!", "x"]})
    assert status == 200, answer
    run = running.runs["labels"]
    logits = TextEncoder.create(run.model, run.params, run.context).logits([list(b"What a lens!")])[0][0]
    shares = np.exp(logits) / np.exp(logits).sum()
    found = {one["label"]: one["score"] for one in answer[0]}
    np.testing.assert_allclose([found["bad"], found["good"]], shares, rtol=1e-5)
    assert answer[0][0]["score"] >= answer[0][1]["score"]
    _, first = running.ask("/models/labels", {"inputs": "x", "parameters": {"top_k": 1}})
    assert first == [answer[1][:1]]


def test_translation_searches_with_beams(running):
    body = {"inputs": ["one", "two"], "parameters": {"tgt_lang": "fr", "num_beams": 3, "max_new_tokens": 6}}
    status, answer = running.ask("/models/translator", body)
    assert status == 200, answer
    expected = running.runs["translator"].translate(
        ["one", "two"], language="fr", beams=3, tokens=6, temperature=0.0, repetition_penalty=1.0
    )
    assert [one["translation_text"] for one in answer] == expected
    body["parameters"] = {"tgt_lang": "fr", "generate_parameters": {"num_beams": 3, "max_new_tokens": 6}}
    assert running.ask("/models/translator", body)[1] == answer
    assert error(running.ask("/models/translator", {"inputs": "one"})) == (
        400, "the run writes several languages. Name one of de, fr with --language.",
    )  # fmt: skip


def test_pictures(running):
    from PIL import Image

    body = {"model": "diffusion", "prompt": "7", "n": 2, "seed": 3, "response_format": "b64_json"}
    status, answer = running.ask("/v1/images/generations", body)
    assert status == 200, answer
    expected = running.runs["diffusion"].draw(["7", "7"], seed=3)
    for one, pixels in zip(answer["data"], expected, strict=True):
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))), np.float32)
        np.testing.assert_allclose(picture / 127.5 - 1, pixels[..., 0].clip(-1, 1), atol=1 / 127)
    wrong = running.ask("/v1/images/generations", body | {"size": "9x9"})
    assert error(wrong) == (400, 'size="9x9" is not supported. Leave it out, or use "8x8" or "auto".')


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/embeddings", {"model": "labels", "input": []}, 400, "input=[] is neither"),
        (
            "/v1/embeddings",
            {"model": "contrastive", "input": []},
            400,
            "input=[] is not text. Send a text or a list of",
        ),
        ("/v1/embeddings", {"model": "encoder", "input": [""]}, 400, 'input has the item ""'),
        ("/v1/embeddings", {"model": "encoder", "input": "x", "dimensions": 4}, 400, "dimensions is not supported"),
        ("/v1/embeddings", {"model": "encoder", "input": [[999]]}, 400, "id 999"),
        ("/v1/embeddings", {"model": "diffusion", "input": "x"}, 400, "does text-to-image at /v1/images/generations"),
        ("/v1/embeddings", {"model": "encoder", "input": "x" * 6000}, 413, "the body has more than 5000 bytes"),
        ("/models/encoder", {"inputs": "no mask"}, 400, "has no [MASK]"),
        ("/models/encoder", {"inputs": "[MASK]", "parameters": {"top_k": 0}}, 400, "top_k=0 is not an integer"),
        ("/models/labels", {"inputs": 3}, 400, "inputs=3 is neither a text"),
        ("/models/labels", {"inputs": "x", "parameters": {"other": 1}}, 400, "other is not supported"),
        ("/models/none", {"inputs": "x"}, 404, 'the model "none" does not exist'),
        ("/v1/images/generations", {"model": "diffusion", "prompt": "cat"}, 400, "'cat' is not a class"),
        ("/nowhere", {"x": 1}, 404, "This server has /v1/embeddings"),
    ],
)
def test_errors_have_the_form_of_the_other_server(running, path, body, status, message):
    found = error(running.ask(path, body))
    assert found[0] == status
    assert message in found[1]


def test_a_key_is_needed(running):
    assert error(running.ask("/v1/models", key="other"))[0] == 401


def test_models_are_listed_with_their_tasks(running):
    _, answer = running.ask("/v1/models")
    tasks = {one["id"]: one["tasks"] for one in answer["data"]}
    assert tasks["encoder"] == ["feature-extraction", "fill-mask"]
    assert tasks["diffusion"] == ["text-to-image"]
    assert running.ask("/v1/models/labels")[1]["tasks"] == ["feature-extraction", "text-classification"]
    assert running.ask("/health")[1]["status"] == "ok"


def test_models_are_dropped_by_use_within_the_memory():
    """Three models of which two fit: the one that was not used for longest goes, and its arrays with it."""
    runs = {name: make_run("encoder") for name in ("a", "b", "c")}
    models = {name: run.config.model for name, run in runs.items()}
    size = parameter_bytes(models["a"])
    assert size == sum(array.nbytes for array in jax.tree.leaves(runs["a"].params))
    loaded = []

    def load(name: str) -> TrainedRun:
        run = make_run("encoder")
        loaded.append((name, weakref.ref(run)))
        return run

    catalog = Catalog(models, load, limit=2 * size)
    for name in ("a", "b", "a", "c"):
        catalog.get(name)
    assert catalog.resident == ["a", "c"]
    assert [name for name, _ in loaded] == ["a", "b", "c"]
    gc.collect()
    assert [ref() is None for _, ref in loaded] == [False, True, False]
    catalog.get("b")
    assert catalog.resident == ["c", "b"]
    assert catalog.loads == 4
    with pytest.raises(ConfigError, match="Raise it"):
        Catalog(models, load, limit=size - 1)

    def broken(name: str) -> TrainedRun:
        raise ConfigError("its checkpoint is damaged")

    with pytest.raises(ApiError, match="a cannot be read: its checkpoint is damaged"):
        Catalog(models, broken).get("a")


def test_texts_do_not_depend_on_the_mesh(rng):
    texts = [rng.integers(0, 256, size=n).tolist() for n in (3, 70, 9, 5, 64, 1, 2, 8, 30, 4)]
    assert len(texts) > ROWS
    one, many = make_run("encoder"), make_run("encoder", data=2, tensor=2)
    first, second = (TextEncoder.create(run.model, run.params, run.context) for run in (one, many))
    np.testing.assert_allclose(first.embeddings(texts), second.embeddings(texts), atol=1e-5)
    for a, b in zip(first.logits(texts), second.logits(texts), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_which_models_are_served():
    decoder = parse_config(SMALL).model
    with pytest.raises(ConfigError, match="is not served with other models"):
        kinds_of(decoder)
    with pytest.raises(ConfigError, match="Make a run of one with `jaxstack export RUN OUT --branch=generation`"):
        kinds_of(dataclasses.replace(decoder, family="branches"))
    with pytest.raises(ConfigError, match="labels of words are not served"):
        kinds_of(parse_config([*MODELS["labels"], "--model.label_each=token"]).model)


def test_mistakes_on_the_command_line(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name / "run").mkdir(parents=True)
    with pytest.raises(ConfigError, match="have the same name"):
        names_of([tmp_path / "x" / "run", tmp_path / "y" / "run"])
    both = [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]
    for each in both:
        (tmp_path / each / "config.yaml").write_text("run: {dir: run}")
        (tmp_path / each / "tokenizer.json").write_text('{"kind": "bytes"}')
    with pytest.raises(ConfigError, match="--rows=3 is for a server of one decoder"):
        execute(["serve", *both, "--rows=3"])
    with pytest.raises(ConfigError, match="--memory=2 is for several models"):
        execute(["serve", both[0], "--memory=2"])
