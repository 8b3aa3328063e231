"""Where a run reads on after a checkpoint: with equal sizes, with others, and after checkpoints of older versions."""

import hashlib
import itertools
import json
import re
from dataclasses import asdict

import jax
import numpy as np
import pytest

from jaxstack import data
from jaxstack.checkpoint import run_dir, store
from jaxstack.config import ConfigError, DataConfig, DenoiserConfig, resolve
from jaxstack.config.reading.parse import parse_config
from jaxstack.config.sentences import SentencesConfig
from jaxstack.data.buckets import BucketReader, whole_documents
from jaxstack.data.images import ImageReader, Images
from jaxstack.data.loader import DataLoader
from jaxstack.data.masking import BranchWindows, Masking
from jaxstack.data.mixture import MixtureReader, WindowSizes
from jaxstack.data.pairs import PairTokens
from jaxstack.data.position import Start
from jaxstack.data.sentences import SentenceTasks
from jaxstack.data.spans import SpanCorruption
from jaxstack.data.windows import full_windows
from jaxstack.debug.replay import Replay
from jaxstack.train import main


def documents(count, seed):
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, 60, count))
    starts = np.append(0, ends[:-1])
    return data.Tokens(rng.integers(0, 250, ends[-1]).astype(np.uint16), starts, ends, 256)


def readers():
    """A reader of each kind."""
    text, other = documents(60, 1), documents(30, 2)
    chat = whole_documents(text, 24)
    middles = (text.starts + text.ends) // 2
    mask = np.ones(text.ids.size, bool)
    pairs = PairTokens(text.ids, text.starts, text.ends, 256, None, None, loss_mask=mask, middles=middles, start_id=0,
                       lengths=(40, 40)).documents(text.ends - text.starts >= 2)  # fmt: skip
    bert = Masking(0.3, 255, 256)
    denoisers = (DenoiserConfig(), DenoiserConfig(0.5, 3))
    spans = SpanCorruption.of(DataConfig(denoisers=denoisers, seq_len=16), data.make_tokenizer("bytes", ()))
    tasks = SentenceTasks(SentencesConfig(("next", "reordering")), 16)

    def mixed(texts, seq_len=16, packing=False, weights=((0, (1.0,)),), **more):
        names = [str(i) for i in range(len(texts))]
        sizes = {"seq_len": seq_len, "batch_size": 4, "packing": packing, **more}
        return MixtureReader(texts, names, weights, sizes, 3)

    sizes = [WindowSizes(seq_len=n, batch_size=48 // n, packing=False) for n in (8, 12, 24)]
    pixels = np.random.default_rng(1).random((7, 4, 4, 1), np.float32)
    pictures = Images(pixels, np.arange(7, dtype=np.int32) % 3, tuple("abcdefg"))
    return {
        "text": mixed([text]),
        "packed": mixed([text], packing=True),
        "documents": mixed([chat], 24),
        "best_fit": mixed([chat], 24, True),
        "pairs": mixed([pairs], 40, True),
        "masked": mixed([text], masking=bert),
        "masked_packed": mixed([text], packing=True, masking=bert),
        "spans": mixed([text], spans.text_len, masking=spans),
        "sentences": mixed([text], masking=bert, sentences=tasks),
        "branches": mixed([text], 32, masking=BranchWindows(bert, (1, 1))),
        "first_of_mixture": mixed([text, other], weights=[(0, (3.0, 1.0)), (5, (1.0, 0.0))]),
        "buckets": BucketReader([whole_documents(text, 24)], ["a"], [(0, (1.0,))], sizes, 3),
        "pictures": ImageReader(pictures, 5, 4, 2, 100, 3, 0.5),
    }


BEFORE = {
    "text": "39e737740243 2fccc37d31e7 f52eefb55d0b",
    "packed": "3d88de563e4d fe99b48dc49a 61350f8457e4",
    "documents": "8e7ef40cc407 3ff57bbe458c 5d7804a1e72e",
    "best_fit": "7f7b0184dfa0 77e61f72547a e5f2aa267234",
    "pairs": "95cb262a489f 01f181724a30 a339eaf2f529",
    "masked": "fa4bc2559f99 9a4e0a05bdf5 3fc1a5ef8d4d",
    "masked_packed": "3620567786dd 6bea1bf7eb33 5ca309b0ecfd",
    "spans": "2c3461c0f9ed 960cd933a948 a8f6c8c0fc44",
    "sentences": "300989446c15 d99e2e91123b 895fb51083ba",
    "branches": "38e59843cf65 344942babd52 4f0fdfd3a58b",
    "first_of_mixture": "fce1519d53b2 a695eb57f4d5 9ddcda3f8e68",
    "buckets": "212dd6df96bc 523a4c8c17e8 eba38ffa21ba",
    "pictures": "dd35da6e4e72 be6ec9103707 bdf38c48e83d",
}
"""The first 12 digits of the SHA-256 of some batches of each reader, by the version before positions were saved."""


def test_batches_are_what_they_were():
    """Of the first pass, with batches of one size. Those of a mixture are of its first source."""
    for name, reader in readers().items():
        steps, found = (5, 6, 8) if name == "first_of_mixture" else (0, 3, 7), []
        for step in steps:
            batch, digest = reader.batches()[step], hashlib.sha256()
            for key in sorted(batch):
                digest.update(key.encode() + str((batch[key].dtype, batch[key].shape)).encode() + batch[key].tobytes())
            found.append(digest.hexdigest()[:12])
        assert " ".join(found) == BEFORE[name], name


FLAGS = ["--data.source=path", "--train.ngram_baseline=false", "--data.eval_fraction=0.2", "--train.eval_steps=1"]
ENCODER = ["--model.family=encoder", "--model.tied_embeddings=true", "--model.vocab_size=260", "--data.mask_id=259"]
KINDS = {
    "text": [],
    "packed": ["--data.packing=true"],
    "best_fit": ["--data.packing=best_fit"],
    "masked": ENCODER,
    "spans": ["--model.family=encoder_decoder", "--data.denoisers=[{rate: 0.15, span: 3}]"],
    "buckets": ["--data.buckets=[8, 16]"],
}


@pytest.fixture
def folder(tmp_path, rng):
    """Texts in folders, whose files have random lengths."""
    for name, count in (("a", 30), ("b", 12)):
        (tmp_path / name).mkdir()
        for i in range(count):
            text = rng.integers(32, 127, rng.integers(2, 60)).astype(np.uint8).tobytes()
            (tmp_path / name / f"{i:02}.txt").write_bytes(text)
    return tmp_path


def loader_of(folder, *flags, batch_size=4, seq_len=16):
    path = [] if any("mixture" in flag for flag in flags) else [f"--data.path={folder}/a"]
    flags = [*(FLAGS if path else FLAGS[1:]), *path, *flags]
    cfg = parse_config([*flags, f"--data.seq_len={seq_len}", f"--data.batch_size={batch_size}"])
    dataset = data.load_for(cfg.model, cfg.data)
    cfg = resolve(cfg, dataset.vocab_size, dataset.image)
    return DataLoader(cfg, dataset, jax.sharding.SingleDeviceSharding(jax.devices()[0])), cfg, dataset


def saved(loader, cfg, dataset, index, record=True):
    """The metadata of a checkpoint, by this version or an older one."""
    metadata = {"config": asdict(cfg), "data": dataset.fingerprint, "next_batch": index}
    metadata |= {"position": loader.position(index)} if record else {}
    return json.loads(json.dumps(metadata))


def rows_of(batches):
    """Each row as bytes, in order."""
    return [b"".join(batch[key][i].tobytes() for key in sorted(batch)) for batch in batches
            for i in range(len(batch["tokens"]))]  # fmt: skip


def by_length(rows):
    found = {}
    for row in rows:
        found.setdefault(len(row), []).append(row)
    return found


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_another_batch_size_reads_on_where_the_run_stopped(folder, kind, record):
    """5 batches of 4, 3 of 8, 4 of 2: no row is skipped or repeated. In each bucket, for buckets.

    Also after a checkpoint of an older version.
    """
    flags, index, read = KINDS[kind], 0, []
    first, cfg, dataset = loader_of(folder, *flags)
    whole = rows_of(first.iterate(0, 13 + 5 * (kind == "buckets")))
    metadata = saved(first, cfg, dataset, 5, record)
    for size, count in ((4, 5), (8, 3), (2, 4)):
        loader, *rest = loader_of(folder, *flags, batch_size=size)
        if index:
            assert loader.resume(index, metadata) == []
        read += rows_of(loader.iterate(index, count))
        index += count
        if index > 5:
            metadata = saved(loader, *rest, index)
    if kind == "buckets":
        for length, rows in by_length(read).items():
            assert rows == by_length(whole)[length][: len(rows)]
    else:
        assert read == whole[: len(read)]
        assert len(read) == 52


def mixture(folder, first, second, names=("a", "b")):
    sources = zip(names, (first, second), strict=True)
    each = ", ".join(f"{{source: path, path: {folder}/{name}, weight: {weight}}}" for name, weight in sources)
    return f"--data.mixture=[{each}]"


def places(loader, index, count):
    """The source of each row of some batches, and its sequence within the source."""
    reader = loader._reader
    found = [reader._locate(reader._sequences(number)) for number in range(index, index + count)]
    return [(int(s), int(n)) for sources, numbers in found for s, n in zip(sources, numbers, strict=True)]


def test_a_mixture_reads_on_with_another_batch_size_and_other_weights(folder):
    """Each source continues behind its last sequence. Changes hold from their steps on, whatever sizes batches had."""
    changes = "--data.mixture_changes=[{step: 3, weights: [1, 1]}, {step: 9, weights: [0, 1]}]"
    first, *rest = loader_of(folder, mixture(folder, 3, 1), changes)
    read, metadata = places(first, 0, 6), saved(first, *rest, 6)
    assert [sum(s == k for s, _ in read) for k in (0, 1)] == [15, 9]  # 9 of the first 12 sequences, and half of 12
    second, *rest = loader_of(folder, mixture(folder, 3, 1), changes, batch_size=8)
    assert second.resume(6, metadata) == []
    read += places(second, 6, 5)  # 24 sequences with equal weights, and 16 of the second source
    metadata = saved(second, *rest, 11)
    third, *rest = loader_of(folder, mixture(folder, 1, 4), batch_size=5)
    assert third.resume(11, metadata) == []
    read += places(third, 11, 4)
    counts = [sum(s == k for s, _ in read) for k in (0, 1)]
    assert counts == [15 + 12 + 4, 9 + 12 + 16 + 16]
    for k in (0, 1):
        assert [n for s, n in read if s == k] == list(range(counts[k]))
    # A source that is new begins, one that is gone is forgotten, and one with another place has another order.
    fourth, *_ = loader_of(folder, mixture(folder, 1, 1, names=("b", "a")))
    notes = fourth.resume(15, saved(third, *rest, 15))
    assert len(notes) == 2
    assert notes[0].startswith("b: the rest of pass ")
    assert notes[0].endswith("the run now reads other sequences (place in the mixture: 1 before, 0 now). Pass 5 begins")


def test_rows_have_other_masks_after_another_batch_size(folder):
    """What is drawn for a row depends on its number in the run, which counts on, also in a mixture."""
    flags = [*ENCODER, mixture(folder, 1, 1), "--data.mask_share=0.5"]
    first, *rest = loader_of(folder, *flags, seq_len=32)
    one = [batch["loss_weights"] for batch in first.iterate(0, 8)]
    second, *_ = loader_of(folder, *flags, batch_size=8, seq_len=32)
    second.resume(8, saved(first, *rest, 8))
    masks = np.concatenate([*one, *(batch["loss_weights"] for batch in second.iterate(8, 4))])
    assert len(np.unique(masks, axis=0)) == 64  # the last rows of a pass have 16 tokens or more


@pytest.mark.parametrize(
    ("flags", "now", "reason"),
    [
        ([], {"seq_len": 8}, "tokens of a row: 16 before, 8 now"),
        ([], {"flags": ["--run.seed=1"]}, "run.seed: 0 before, 1 now"),
        ([], {"flags": ["--data.packing=true"]}, "data.packing: False before, True now"),
        ([], {"flags": ["--data.eval_fraction=0.4"]}, r"tokens of the text: \d+ before, \d+ now"),
        (["--data.packing=best_fit"], {"seq_len": 8}, "tokens of a row: 16 before, 8 now"),
        (KINDS["spans"], {"seq_len": 32}, "tokens of a row: 17 before, 34 now"),
        (KINDS["buckets"], {"flags": ["--data.buckets=[4, 16]"]}, r"tokens of the text: \d+ before, \d+ now"),
        (KINDS["buckets"], {"flags": ["--data.buckets=[4, 8, 16]"]}, "lengths of rows: 2 before, 3 now"),
    ],
)
@pytest.mark.parametrize("record", [True, False])
def test_other_sequences_begin_a_pass_and_say_what_is_left_out(folder, flags, now, reason, record):
    """What was read of the passes before is complete, so a text of which a pass is complete loses nothing."""
    first, *rest = loader_of(folder, *flags)
    rows = sum(order["sequences of a pass"] for (order,) in first._reader.orders())
    index = 9
    read = sum(count for (count,) in first._reader.read_before(index))
    assert read < rows, "the first pass is not complete"
    changed = [*[flag for flag in flags if not now.get("flags") or "buckets" not in flag], *now.get("flags", [])]
    second, *_ = loader_of(folder, *changed, seq_len=now.get("seq_len", 16))
    (note,) = second.resume(index, saved(first, *rest, index, record))
    assert re.fullmatch(
        rf"\S+/a: the rest of pass 1, {rows - read} of {rows} sequences, is left out, because the run now reads other "
        rf"sequences \({reason}\)\. Pass 2 begins",
        note,
    )
    fresh = loader_of(folder, *changed, seq_len=now.get("seq_len", 16))[0]
    for (count,), (order,) in zip(second._reader.read_before(index), fresh._reader.orders(), strict=True):
        assert count == order["sequences of a pass"]
    if "--data.packing=best_fit" in flags or not flags:
        later = fresh._reader.with_start(Start(index, second._reader.read_before(index)))
        assert rows_of(second.iterate(index, 2)) == rows_of(later.batches()[i] for i in (index, index + 1))


def test_a_complete_pass_leaves_nothing_out(folder):
    first, *rest = loader_of(folder, batch_size=1)
    rows = first._reader.orders()[0][0]["sequences of a pass"]
    second, *_ = loader_of(folder, seq_len=8)
    assert second.resume(rows, saved(first, *rest, rows)) == []
    assert second._reader.read_before(rows) == [[second._reader.orders()[0][0]["sequences of a pass"]]]


def test_conversations_of_one_row_each_continue_with_longer_rows(tmp_path):
    lines = [json.dumps({"prompt": f"What is {i}?", "completion": f"It is {i}."}) for i in range(40)]
    (tmp_path / "a").write_text("\n".join(lines))
    first, *rest = loader_of(tmp_path, "--data.source=chat", seq_len=64)
    second, *_ = loader_of(tmp_path, "--data.source=chat", seq_len=80, batch_size=8)
    assert second.resume(3, saved(first, *rest, 3)) == []
    assert second._reader.read_before(3) == [[12]]


@pytest.mark.parametrize("packing", [False, True])
def test_a_checkpoint_of_an_older_version_in_its_third_pass(folder, packing):
    """An epoch of that version had only the windows that are permuted, which are the first ones of an epoch now."""
    flags = [f"--data.packing={str(packing).lower()}"]
    loader, cfg, dataset = loader_of(folder, *flags)
    windows = full_windows(len(dataset.train), 16, packing)
    index, done = divmod(2 * windows + 7, 4)
    assert done < 4
    metadata = saved(loader, cfg, dataset, index, record=False)
    rows = loader._reader.orders()[0][0]["sequences of a pass"]
    assert rows > windows
    assert loader.resume(index, metadata) == []
    passes, place = divmod(4 * index, windows)
    assert loader._reader.read_before(index) == [[passes * rows + place]]
    # It has that order as of its first pass, so it reads what that version would have read.
    reader = data.windows.SequenceReader(dataset.train, seq_len=16, seed=0, packing=packing)
    want = reader.read(passes * rows + place + np.arange(4))
    assert rows_of([next(loader.iterate(index, 1))]) == rows_of([want])


def test_a_mixture_of_an_older_version_says_that_other_sources_have_their_own_order_now(folder):
    first, *rest = loader_of(folder, mixture(folder, 3, 1))
    second, *_ = loader_of(folder, mixture(folder, 3, 1))
    (note,) = second.resume(2, saved(first, *rest, 2, record=False))
    assert note.startswith("b: the rest of pass 1, ")
    assert "(place in the mixture: 0 before, 1 now)" in note
    assert second._reader.read_before(2)[0][0] == 6


def test_pictures_continue_with_another_batch_size(tmp_path, rng):
    np.savez(tmp_path / "a", images=rng.integers(0, 256, (50, 4, 4), np.uint8), labels=np.arange(50) % 3)
    pictures = ["--data.source=images", "--model.family=diffusion", "--model.diffusion.patch_size=2"]
    pictures += [f"--data.path={tmp_path}/a.npz", "--data.eval_fraction=0.2"]

    def loader_with(size):
        return loader_of(tmp_path, *pictures, batch_size=size, seq_len=4)

    first, *rest = loader_with(4)
    whole = [*first.iterate(0, 20)]
    second, *_ = loader_with(10)
    for record in (True, False):
        assert second.resume(4, saved(first, *rest, 4, record)) == []
        batches = [*whole[:4], *second.iterate(4, 5)]
        for name in whole[0]:
            want = np.concatenate([batch[name] for batch in whole])[:66]
            np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), want)


def test_the_ngram_model_reads_as_much_text_as_the_run(folder):
    """5 batches of 4 and 3 of 8 are 44 sequences: six batches of 8, of the 5.5 that they fill."""
    first, *rest = loader_of(folder)
    second, *_ = loader_of(folder, batch_size=8)
    second.resume(5, saved(first, *rest, 5))
    assert rows_of(second.first_batches(8))[:44] == rows_of(first.iterate(0, 11))
    assert len([*second.first_batches(8)]) == 6


SMALL = ["--model.num_layers=1", "--model.d_model=16", "--model.d_ff=32", "--model.num_heads=2", "--run.log_every=1",
         "--train.eval_every=100", "--sample.prompts=[]", "--optim.name=sgd", "--optim.lr=0.1",
         "--checkpoint.every=2", "--mesh.data=4", "--mesh.tensor=2"]  # fmt: skip


@pytest.mark.matrix
def test_a_run_resumes_with_other_sizes(folder, capsys):
    """Three starts: batches of 4, then of 8, then rows of 8 tokens. `debug` refuses steps of the sizes before."""
    run = folder / "run"

    def start(steps, batch_size, seq_len):
        sizes = [f"--data.batch_size={batch_size}", f"--data.seq_len={seq_len}", f"--train.steps={steps}"]
        main(parse_config([*FLAGS, *SMALL, *sizes, f"--data.path={folder}/a", f"--run.dir={run}"]))
        metadata = store.metadata(run_dir.checkpoints(run), steps)
        assert metadata["next_batch"] == steps
        return metadata["position"], capsys.readouterr().out

    position, _ = start(4, 4, 16)
    assert (position["start_batch"], position["read"]) == (0, [[16]])
    position, out = start(6, 8, 16)
    assert (position["start_batch"], position["start_read"], position["read"]) == (4, [[16]], [[32]])
    assert "is left out" not in out
    pass_rows = position["orders"][0][0]["sequences of a pass"]
    position, out = start(8, 8, 8)
    assert f"the rest of pass 1, {pass_rows - 32} of {pass_rows} sequences, is left out" in " ".join(out.split())
    rows = position["orders"][0][0]["sequences of a pass"]
    assert (position["start_batch"], position["start_read"], position["read"]) == (6, [[rows]], [[rows + 16]])
    cfg = parse_config([f"--config={run}/config.yaml"])
    again = Replay(cfg)
    batch = again.before(8)[1]
    reader = data.windows.SequenceReader(again._dataset.train, seq_len=8, seed=0, packing=False)
    np.testing.assert_array_equal(batch["tokens"], reader.read(rows + 8 + np.arange(8))["tokens"])
    with pytest.raises(ConfigError, match=r"step 5 of .* had other batches .* changed at batch 6\. Set these keys"):
        Replay(cfg).before(5)


def test_rows_have_at_most_as_many_documents_as_the_key_allows(folder):
    """Training and held-out rows; the error names the batch. Attention by cuDNN reads no more."""
    loader, *_ = loader_of(folder, "--data.packing=true")
    batches = [*loader.iterate(0, 12)]
    runs = [[len([*itertools.groupby(row)]) for row in batch["segment_ids"].tolist()] for batch in batches]
    most = max(map(max, runs))
    first = next(i for i, rows in enumerate(runs) if max(rows) == most)
    held_out = [batch["segment_ids"] for one in loader.held_out for batch in one.local_batches]
    assert most > max(len([*itertools.groupby(row)]) for ids in held_out for row in ids.tolist())
    enough, *_ = loader_of(folder, "--data.packing=true", f"--data.max_documents={most}")
    assert len([*enough.iterate(0, 12)]) == 12
    scarce, *_ = loader_of(folder, "--data.packing=true", f"--data.max_documents={most - 1}")
    with pytest.raises(ConfigError, match=f"batch {first} has a row of {most} documents, but .*={most - 1}"):
        [*scarce.iterate(0, 12)]
    assert len([*scarce.iterate(0, first)]) == first
    with pytest.raises(ConfigError, match=r"a held-out batch of .* has a row of"):
        loader_of(folder, "--data.packing=true", "--data.max_documents=1")
