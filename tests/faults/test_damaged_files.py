"""Every file that a run reads at its start, under every damage: one line for the user, or a step that is skipped.

A test reads the files of a run directory as a start of `jaxstack train` does, without training.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxstack.checkpoint import manifest, run_dir, verify
from jaxstack.common import files
from jaxstack.common.errors import ConfigError, one_line
from jaxstack.config import Config, RunConfig, TrainConfig
from jaxstack.config.reading.parse import to_yaml
from jaxstack.data import tokenizers, tokens
from jaxstack.data.sources import Document
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.report import runs
from jaxstack.tracking import goodput, jsonl
from jaxstack.tracking.noise_scale import NoiseScale

RECORDS = [
    {"step": 1, "loss": 5.5, "time": 100.0, "seconds": {"start": 1.5, "step": 0.25}},
    {"step": 2, "loss": 5.25, "time": 101.0, "seconds": {"step": 0.25}},
    {"step": 3, "loss": None, "time": 102.0, "seconds": {"step": 0.25}, "skipped": 1},
    {"step": 4, "event": "skipped", "loss": None, "skipped": 2, "batch": "step 3: text.txt"},
    {"step": 4, "loss": 5.0, "time": 103.0, "seconds": {"step": 0.25, "checkpoint": 0.5}},
    {"step": 4, "eval_loss": 5.125, "eval_bits_per_byte": 7.4, "parameters": 1000},
    {"step": 5, "loss": 4.75, "time": 104.0, "seconds": {"step": 0.25}},
]


class Start(NamedTuple):
    """What a start has found: the step that it resumes from, the records of the log, and what it says."""

    step: int | None
    records: list[jsonl.Record]
    said: list[str]


def start(run: Path) -> Start:
    """Reads a run directory as `jaxstack train` and `jaxstack report` do."""
    cfg = Config(run=RunConfig(dir=str(run)), train=TrainConfig(steps=8))
    said = run_dir.prepare(cfg, ByteTokenizer().to_json())
    with run_dir.DirectoryLock(run) as lock:
        said += [lock.last_holder] if lock.last_holder else []
        scan = verify.scan(run_dir.checkpoints(run))
        said += [f"skipped {name}: {why}" for name, why in scan.reasons.items()]
        if scan.lost:
            raise scan.error(run_dir.checkpoints(run), "Restore a copy.")
        log = jsonl.JsonLines(run / "metrics.jsonl")
        said += log.damage
        goodput.resumed_record(4, log.records, [])
        NoiseScale(8, log.records)
    if any(map(jsonl.is_step, log.records)):
        (report,) = runs.read_runs([run])
        runs.summarize(report)
        runs.list_events(report)
    return Start(scan.step, log.records, said)


def checkpoint(run: Path, step: int) -> Path:
    """Creates files like those of a checkpoint, with a manifest."""
    path = run / "checkpoints" / str(step)
    (path / "state" / "d").mkdir(parents=True)
    (path / "state" / "d" / "array").write_bytes(bytes(range(200)))
    (path / "_METADATA").write_text("{}")
    manifest.write(path, manifest.hash_files(path, manifest.written_by(path, 0)))
    return path


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run directory without damage, of steps 4 and 8. It has no `config.yaml`, which takes long to parse."""
    run = tmp_path_factory.mktemp("intact") / "run"
    for step in (4, 8):
        checkpoint(run, step)
    (run / "tokenizer.json").write_text(json.dumps(ByteTokenizer().to_json()))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (run / ".lock").touch()
    (run / "evaluations").mkdir()
    evaluation = {"step": 4, "made": "2026-01-01", "results": []}
    (run / "evaluations" / "step_4_1.json").write_text(json.dumps(evaluation))
    tokens.write_token_file(run / "tokens", [Document("a", "some text " * 20)], ByteTokenizer())
    found = start(run)
    assert found == (8, RECORDS, [])
    return run


@pytest.fixture
def run(intact: Path, tmp_path: Path) -> Path:
    """Returns a copy of the run directory, to be damaged."""
    shutil.copytree(intact, tmp_path / "run")
    return tmp_path / "run"


def replace_with(content: bytes) -> Callable[[Path], None]:
    return lambda path: [path.write_bytes(content), None][1]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def insert(content: bytes) -> Callable[[Path], None]:
    """Returns a damage: the content is inserted in the middle of the file."""

    def damage(path: Path) -> None:
        before = path.read_bytes()
        path.write_bytes(before[: len(before) // 2] + content + before[len(before) // 2 :])

    return damage


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": replace_with(b""),
    "cut": cut,
    "not UTF-8": insert(b"\xff"),
    "zero block": insert(bytes(64)),
    "nested": replace_with(b"[" * 100_000),
    "list": replace_with(b"[1]"),
    "number": replace_with(b"7"),
    "huge integer": replace_with(b'{"step": ' + b"9" * 5000 + b', "files": {"a": [' + b"9" * 5000 + b', ""]}}'),
    "half a surrogate pair": replace_with(b'{"step": 1, "kind": "\\ud800", "files": {"\\ud800": [1, "\\ud800"]}}'),
    "a directory": make_directory,
}
ANY = ""
REFUSED: dict[str, dict[str, str]] = {
    "tokenizer.json": {
        "empty": "tokenizer.json is empty. Restore it from a copy",
        "cut": "tokenizer.json is not JSON",
        "not UTF-8": "tokenizer.json cannot be read: it is not UTF-8 text (byte 8)",
        "zero block": "tokenizer.json is not JSON",
        "nested": "tokenizer.json cannot be read: it is nested more than 100 levels deep",
        "list": "differs from",
        "number": "differs from",
        "huge integer": "digits, and 100 are allowed",
        "half a surrogate pair": "differs from",
        "a directory": "tokenizer.json is not a file",
    },
    "metrics.jsonl": {"a directory": "metrics.jsonl is not a file"},
    ".lock": {"a directory": "Is a directory"},
}
"""Damages that end a start, with words of the error."""

KEPT: dict[str, dict[str, str]] = {
    "metrics.jsonl": {
        "empty": ANY,
        "cut": ANY,
        "not UTF-8": "line 4 is not JSON",
        "zero block": "line 4 is not JSON",
        "nested": ANY,
        "list": "line 1 is not a JSON object",
        "number": "line 1 is not a JSON object",
        "huge integer": ANY,
        "half a surrogate pair": ANY,
    },
    ".lock": {
        "empty": ANY,
        "cut": ANY,
        "not UTF-8": "did not shut down cleanly (\ufffd)",
        "zero block": "did not shut down cleanly",
        "nested": "did not shut down cleanly ([[[",
        "list": "did not shut down cleanly ([1])",
        "number": "did not shut down cleanly (7)",
        "huge integer": "did not shut down cleanly",
        "half a surrogate pair": "did not shut down cleanly",
    },
    "checkpoints/8/seal.json": {
        "empty": "skipped 8: its manifest cannot be read",
        "cut": "skipped 8: its manifest cannot be read",
        "not UTF-8": "skipped 8: its manifest cannot be read",
        "zero block": "skipped 8: its manifest cannot be read",
        "nested": "skipped 8: its manifest cannot be read (it is nested too deeply)",
        "list": "skipped 8: its manifest cannot be read",
        "number": "skipped 8: its manifest cannot be read",
        "huge integer": "skipped 8: its manifest cannot be read",
        "half a surrogate pair": r"skipped 8: \ud800 is missing",
        "a directory": "skipped 8: its manifest cannot be read",
    },
    "evaluations/step_4_1.json": dict.fromkeys(DAMAGES, ANY),
}
"""Damages after which a start continues, with words of what it says."""

TABLE = [(file, damage) for file in (*REFUSED, "checkpoints/8/seal.json", "evaluations/step_4_1.json")
         for damage in DAMAGES]  # fmt: skip


@pytest.mark.parametrize(("file", "damage"), TABLE)
def test_a_damaged_file_is_named_in_one_line(file, damage, run):
    DAMAGES[damage](run / file)
    words = REFUSED.get(file, {}).get(damage)
    if words is not None:
        with pytest.raises(ConfigError) as raised:
            start(run)
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
        return
    found = start(run)
    assert KEPT[file][damage] in "\n".join(found.said)
    assert found.step == (4 if "seal" in file else 8)
    if file != "metrics.jsonl":
        assert found.records == RECORDS


@pytest.mark.parametrize("damage", ["empty", "not UTF-8", "zero block", "list", "number", "a directory"])
def test_a_damaged_configuration_is_named(damage, run):
    """The reader of YAML has more tests of its own."""
    (run / "config.yaml").write_text(to_yaml(Config()))
    DAMAGES[damage](run / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        start(run)


def lines_of(run: Path) -> list[bytes]:
    return (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def with_line(content: bytes) -> Callable[[Path], None]:
    """Returns a damage: the third line is replaced."""

    def damage(run: Path) -> None:
        lines = lines_of(run)
        (run / "metrics.jsonl").write_bytes(b"".join([*lines[:2], content, *lines[3:]]))

    return damage


def join_lines(run: Path, between: bytes = b"") -> None:
    """Removes the newline between the third and the fourth line."""
    lines = lines_of(run)
    lines[2] = lines[2].rstrip(b"\n") + between
    (run / "metrics.jsonl").write_bytes(b"".join(lines))


def flip_a_newline(run: Path) -> None:
    join_lines(run, bytes([ord("\n") ^ 0x40]))


def zero_a_block(run: Path) -> None:
    """Writes zeros over the end of the third line and the begin of the fourth, as after a power failure."""
    lines = lines_of(run)
    content = bytearray(b"".join(lines))
    end = len(b"".join(lines[:3]))
    content[end - 20 : end + 20] = bytes(40)
    (run / "metrics.jsonl").write_bytes(content)


def append_zeros(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(bytes(512))


THIRD, FOURTH = RECORDS[2], RECORDS[3]
LINES: dict[str, tuple[Callable[[Path], None], list[jsonl.Record], str]] = {
    "a flipped bit": (with_line(b'{"step": 3, "loss": 5.0" "time": 102.0}\n'), [THIRD], "line 3 is not JSON"),
    "a blank line": (with_line(json.dumps(THIRD).encode() + b"\n\n"), [], "line 4 is empty"),
    "zero bytes": (with_line(json.dumps(THIRD).encode() + b"\n" + bytes(9) + b"\n"), [], "line 4 has 9 zero bytes"),
    "zero bytes before": (with_line(bytes(9) + json.dumps(THIRD).encode() + b"\n"), [], "line 3 is not JSON"),
    "zero bytes over two": (zero_a_block, [THIRD, FOURTH], "line 3 is not JSON"),
    "zero bytes at the end": (append_zeros, [], "line 8 has 512 zero bytes"),
    "two lines joined": (join_lines, [], "line 3 is not JSON"),
    "a flipped newline": (flip_a_newline, [], "line 3 is not JSON"),
    "byte 0xff": (with_line(b'{"step": 3, "event": "\xff"}\n'), [THIRD], "line 3 is not JSON"),
    "a list": (with_line(b"[3]\n"), [THIRD], "line 3 is not a JSON object"),
    "no step": (with_line(b'{"loss": 3.0}\n'), [THIRD], "line 3 has no step"),
    "a textual step": (with_line(b'{"step": "3"}\n'), [THIRD], 'line 3 has the step "3"'),
    "a step of null": (with_line(b'{"step": null}\n'), [THIRD], "line 3 has the step null"),
    "a negative step": (with_line(b'{"step": -3}\n'), [THIRD], "line 3 has the step -3"),
    "a huge step": (with_line(b'{"step": 1' + b"0" * 400 + b"}\n"), [THIRD], "the step too large a number"),
    "a huge integer": (with_line(b'{"step": 3, "x": [1' + b"0" * 400 + b"]}\n"), [THIRD], "line 3 has x=[1000"),
    "too many digits": (with_line(b'{"step": ' + b"1" * 5000 + b"}\n"), [THIRD], "line 3 is not JSON"),
    "nested": (with_line(b'{"step": 3, "x": ' + b"[" * 100_000 + b"\n"), [THIRD], "line 3 is not JSON"),
    "textual seconds": (with_line(b'{"step": 3, "seconds": {"step": "1"}}\n'), [THIRD], "line 3 has seconds="),
    "a textual time": (with_line(b'{"step": 3, "time": "now"}\n'), [THIRD], 'line 3 has time="now"'),
    "a textual loss": (with_line(b'{"step": 3, "eval_loss": "1"}\n'), [THIRD], 'line 3 has eval_loss="1"'),
    "cut short at the end": (lambda run: cut_by(run, 7), [RECORDS[-1]], ""),
}


def cut_by(run: Path, count: int) -> None:
    os.truncate(run / "metrics.jsonl", (run / "metrics.jsonl").stat().st_size - count)


@pytest.mark.parametrize("damage", LINES)
def test_a_bad_line_of_the_log_loses_no_other_line(damage, run):
    """The damaged line is named. A line that a crash has cut short at the end is expected, and not named."""
    harm, lost, words = LINES[damage]
    harm(run)
    found = start(run)
    assert found.records == [record for record in RECORDS if record not in lost]
    assert len(found.said) == bool(words)
    assert words in "".join(found.said)


def test_the_log_is_written_without_its_damage_and_a_copy_is_kept(run):
    """Twice: the copies have different names."""
    log = run / "metrics.jsonl"
    for name in ("metrics.jsonl", "metrics.jsonl.1"):
        before = log.read_bytes() + b"\n"
        log.write_bytes(before)
        opened = jsonl.JsonLines(log)
        assert jsonl.describe_damage(opened.damage) == "line 8 is empty"
        assert jsonl.keep_copy(log, run / "quarantine") == run / "quarantine" / name
        opened.rewind(5)
        assert (run / "quarantine" / name).read_bytes() == before
        assert jsonl.read_log(log) == (RECORDS, [])
    assert jsonl.describe_damage([f"line {i} is empty" for i in range(1, 6)]).endswith("line 3 is empty; and 2 more")


def test_any_flipped_bit_of_any_file_is_survived(run, rng):
    """Random bits of every file: the start is refused in one line, or it keeps all records of other lines."""
    names = ["tokenizer.json", "metrics.jsonl", "checkpoints/8/seal.json", "evaluations/step_4_1.json"]
    refused = 0
    for name in names:
        path = run / name
        before = path.read_bytes()
        for _ in range(40):
            content = bytearray(before)
            content[rng.integers(len(content))] ^= 1 << rng.integers(8)
            path.write_bytes(content)
            reason = ""
            records: list[jsonl.Record] = []
            try:
                records = start(run).records
            except ConfigError as error:
                reason = str(error)
            refused += bool(reason)
            assert one_line(reason) == reason
            assert reason or len(records) >= len(RECORDS) - (2 if name == "metrics.jsonl" else 0)
        path.write_bytes(before)
    assert refused >= 20, "any flipped bit in the tokenizer is noticed"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("0900", "if it is step 900, rename it to 900"),
        ("\u0661\u0662", "if it is step 12, rename it to 12"),
        ("\uff11", "if it is step 1, rename it to 1"),
        ("9" * 200, "a larger number than any step"),
        ("4294967299", "a larger number than any step"),
    ],
)
def test_a_directory_that_is_not_named_as_a_step_is_skipped(name, reason, run):
    (run / "checkpoints" / "8").rename(run / "checkpoints" / name)
    found = start(run)
    assert found.step == 4
    assert found.said == [said for said in found.said if said.startswith(f"skipped {name}: ") and reason in said]
    assert len(found.said) == 1
    shutil.rmtree(run / "checkpoints" / "4")
    with pytest.raises(ConfigError, match=reason):  # it was complete once, so the run does not begin again
        start(run)
    assert manifest.quarantine(run / "checkpoints" / name, run / "quarantine").name == name


@pytest.mark.parametrize("name", ["+9", "-9", "9.0", "9a", "\u00b2", "9 ", "notes"])
def test_other_names_in_checkpoints_are_not_steps(name, run):
    (run / "checkpoints" / name).mkdir()
    assert start(run) == (8, RECORDS, [])


TOKENIZERS: dict[str, tuple[Any, str]] = {
    "a list": ([1], "is not of a known kind"),
    "no kind": ({}, "is not of a known kind"),
    "an unknown kind": ({"kind": "x"}, "is not of a known kind"),
    "ids without a size": ({"kind": "ids"}, "is not of a known kind"),
    "a size of true": ({"kind": "ids", "vocab_size": True}, "is not of a known kind"),
    "a huge size": ({"kind": "ids", "vocab_size": 10**30}, "is not of a known kind"),
    "no characters": ({"kind": "chars", "alphabet": ""}, "is not of a known kind"),
    "half a pair": ({"kind": "chars", "alphabet": "\ud800"}, "is not of a known kind"),
    "classes of numbers": ({"kind": "classes", "names": [1], "image": [8, 8, 1]}, "is not of a known kind"),
    "a textual image": ({"kind": "classes", "names": ["a"], "image": ["8"]}, "is not of a known kind"),
    "a name of null": ({"kind": "hf", "name": None, "tokenizer": {}}, "is not of a known kind"),
    "a chat template of numbers": ({"kind": "hf", "name": "x", "tokenizer": {}, "chat": 5}, "template '5' is damaged"),
    "a token of null": (
        {"kind": "hf", "name": "x", "tokenizer": {}, "chat": {"source": "", "tokens": {"bos_token": None}}},
        "is damaged",
    ),
}


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_the_tokenizer_of_a_run_is_checked(damage, run):
    saved, words = TOKENIZERS[damage]
    (run / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=words) as raised:
        tokenizers.read_saved_tokenizer(run)
    assert str(run / "tokenizer.json") in str(raised.value)


HF_TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}  # fmt: skip


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "a directory"])
def test_a_damaged_tokenizer_file_is_named(damage, tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(HF_TOKENIZER))
    assert tokenizers.make_tokenizer(str(path), ()).vocab_size == 2
    DAMAGES[damage](path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as raised:
        tokenizers.make_tokenizer(str(path), ())
    assert "\n" not in one_line(str(raised.value))


def test_an_empty_vocabulary_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    empty = HF_TOKENIZER | {"model": {"type": "BPE", "vocab": {}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(empty))
    with pytest.raises(ConfigError, match="has an empty vocabulary"):
        tokenizers.make_tokenizer(str(tmp_path / "tokenizer.json"), ())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["tokens.json", "tokens.starts.npy", "tokens.bin"])
def test_a_damaged_token_file_is_named(part, damage, run):
    tokens.read_token_file(run / "tokens")
    DAMAGES[damage](run / part)
    with pytest.raises(ConfigError, match="tokens"):
        tokens.read_token_file(run / "tokens")


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": [1]}, {"sha256": {"bin": 1}}, {"sha256": {}}, {"sha256": None}, {"count": True}, {"count": 10**30},
        {"count": "9"}, {"documents": 10**12}, {"documents": 1.0}, {"vocab_size": 10**20}, {"vocab_size": -1},
        {"tokenizer": [1]}, {"tokenizer": None}, {"tokenizer": {"kind": "ids"}}, {"dtype": ["uint16"]},
        {"dtype": "uint8"}, {"version": "1"}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_in_the_header_of_tokens_is_named(change, run):
    path = run / "tokens.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=r"tokens\.(json|bin|starts)") as raised:
        tokens.read_token_file(run / "tokens")
    assert "\n" not in str(raised.value)


MANIFESTS: dict[str, tuple[Any, str]] = {
    "no files": ({"files": {}}, "it lists no files"),
    "an infinite size": ('{"files": {"_METADATA": [1e999, "x"]}}', "its manifest cannot be read"),
    "a size of null": ({"files": {"_METADATA": [None, "x"]}}, "its manifest cannot be read"),
    "a name outside": ({"files": {"../4/_METADATA": [2, "x"]}}, "is missing"),
    "an absolute name": ({"files": {"/etc/hostname": [2, "x"]}}, "is missing"),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_manifest_that_lists_nonsense_skips_the_step(damage, run):
    content, words = MANIFESTS[damage]
    path = run / "checkpoints" / "8" / manifest.NAME
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    found = start(run)
    assert found.step == 4
    assert words in found.said[0]


def test_a_pipe_in_a_step_does_not_block_the_start(run):
    """It has no bytes, as the file that it replaces, and reading it would never end."""
    path = run / "checkpoints" / "8"
    (path / "none").touch()
    (path / manifest.NAME).unlink()
    manifest.write(path, manifest.hash_files(path, manifest.written_by(path, 0)))
    (path / "none").unlink()
    os.mkfifo(path / "none")
    assert start(run).said == ["skipped 8: none is not a file"]


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
def test_a_name_that_is_not_utf8_can_be_printed(run):
    """The names of files are bytes. What a start says about one must not end in an error of its encoding."""
    (run / "checkpoints" / "8" / os.fsdecode(b"caf\xe9")).touch()
    (said,) = start(run).said
    assert said == r"skipped 8: caf\udce9 is not in its manifest"
    said.encode()


# Files that operating systems, file systems and editors leave in any directory.

FOREIGN = [
    ".DS_Store", "._array", ".AppleDouble", ".Spotlight-V100", ".Trashes", ".fseventsd", "__MACOSX", "Icon\r",
    ".localized", "Thumbs.db", "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "Desktop.ini",
    "$RECYCLE.BIN", "System Volume Information", ".nfs000000000001", ".fuse_hidden0001", ".snapshot", ".snapshots",
    ".zfs", "lost+found", "@eaDir", ".Trash-1000", ".directory", "array~", "#array#", ".#array", ".array.swp",
    "~$array", ".~lock.array#", ".nextcloudsync.log", ".array.Ab12Cd", ".git", ".idea",
]  # fmt: skip
OURS = ["array", "_METADATA", "ocdbt.process_0", "manifest.ocdbt", "d", "a.swp.b", "thumbs", "a~b", "#a", "7", "state"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_invalidates_no_step(name, run, tmp_path):
    """In every directory of a run, also while a step is saved: then it is not in the manifest, and may change."""
    assert files.is_foreign(name)
    places = [run, run / "checkpoints", run / "checkpoints" / "8", run / "checkpoints" / "8" / "state" / "d"]
    for place in (*places, run / "evaluations"):
        (place / name).write_bytes(b"x")
    assert start(run) == (8, RECORDS, [])
    path = run / "checkpoints" / "8"
    (path / manifest.NAME).unlink()
    (path / "state" / name).mkdir()
    (path / "state" / name / "inside").touch()
    manifest.write(path, manifest.hash_files(path, manifest.written_by(path, 0)))
    assert manifest.read(path).keys() == {"_METADATA", "state/d/array"}
    (path / name).write_bytes(b"other")
    assert manifest.corruption(path) is None
    folder = tmp_path / "folder"
    (folder / name).mkdir(parents=True)
    (folder / name / "inside").touch()
    cfg = Config(run=RunConfig(dir=str(folder)))
    assert run_dir.prepare(cfg, {}) == [], "a folder with nothing of the user's"


@pytest.mark.parametrize("name", OURS)
def test_what_a_run_or_a_user_writes_is_not_foreign(name, run):
    assert not files.is_foreign(name)
    (run / "checkpoints" / "8" / "more").mkdir()
    (run / "checkpoints" / "8" / "more" / name).touch()
    assert start(run).said == [f"skipped 8: more/{name} is not in its manifest"]


def test_a_step_that_has_only_foreign_files_is_empty(run):
    """Nothing is lost with such a directory: the run begins again."""
    for step in ("4", "8"):
        shutil.rmtree(run / "checkpoints" / step)
        (run / "checkpoints" / step).mkdir()
        (run / "checkpoints" / step / ".DS_Store").touch()
    found = start(run)
    assert found.step is None
    assert found.said == ["skipped 8: it is an empty directory", "skipped 4: it is an empty directory"]


def test_a_file_in_use_does_not_stop_the_deletion_of_a_step(run, monkeypatch):
    """Over NFS a file that another process reads stays as `.nfs...`, and its directory with it until the next start."""
    remove = os.rmdir
    busy = []

    def rmdir(path, *args, **kwargs):
        if not busy:
            busy.append(path)
            raise OSError(39, "Directory not empty")
        remove(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", rmdir)
    manifest.remove(run / "checkpoints" / "4")
    assert manifest.complete_steps(run / "checkpoints") == [8]
    checkpoint(run, 4)
    busy.clear()
    manifest.remove(run / "checkpoints" / "4")  # the name of what is left is taken
    assert len(list((run / "checkpoints").glob(".removed-*"))) == 2
    manifest.remove_partial(run / "checkpoints")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["8"]


def test_foreign_files_are_not_data(tmp_path):
    """Neither pictures nor texts: `._a.png` of macOS is not a picture, and `.snapshot` is not a class."""
    image = pytest.importorskip("PIL.Image")
    from jaxstack.config import DataConfig
    from jaxstack.data import images, sources

    for name in ("cats", "dogs", ".snapshot", "__MACOSX", "@eaDir", "lost+found"):
        (tmp_path / name).mkdir()
        image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name / "1.png")
        for other in ("._1.png", "~$2.png"):
            (tmp_path / name / other).write_bytes(b"no picture")
        (tmp_path / name / "1.txt").write_text("text")
        for other in ("Thumbs.db", "1.txt~", "#1.txt#", "desktop.ini"):
            (tmp_path / name / other).write_bytes(b"\0")
    found, classes = images._folder(tmp_path)
    assert classes.names == ("cats", "dogs")
    assert found.names == ("cats/1.png", "dogs/1.png")
    read = sources._path(DataConfig(source="path", path=str(tmp_path), glob="**/*.txt"), [])
    assert [document.name for document in read] == ["cats/1.txt", "dogs/1.txt"]
