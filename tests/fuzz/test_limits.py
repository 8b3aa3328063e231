"""Files that are small and ask for much: each is refused in one line, within the limits of `fuzz_child.py`.

The inputs are written by hand, and each harmed an earlier version: it took gigabytes, hours, or ended in a traceback.
"""

import io
import json
import os
import struct
import subprocess
import sys
import threading
import zipfile
import zlib

import numpy as np
import pytest
from fuzz_readers import NEEDS
from fuzz_room import ROOT, Room

from jaxstack.common import host_memory, inputs
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data import chat, images
from jaxstack.data.chat import JinjaTemplate
from jaxstack.data.template_process import TemplateProcess


@pytest.fixture(scope="module")
def room():
    room = Room()
    yield room
    room.close()


def bomb(depth):
    """YAML with 9 ** depth values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return ("\n".join(lines) + f"\nmodel: *a{depth - 1}\n").encode()


def packed(**sizes):
    """An .npz file of zeros: pictures and labels."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (shape, dtype) in sizes.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, {"descr": dtype, "fortran_order": False, "shape": shape})
                left = int(np.prod(shape)) * np.dtype(dtype).itemsize
                while left:
                    member.write(bytes(min(left, 1 << 20)))
                    left -= min(left, 1 << 20)
    return file.getvalue()


def png(width, height):
    """A PNG of one colour, which a few kilobytes describe."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(row * 100) for _ in range(height // 100)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def tokenizer(last):
    """A tokenizer.json in which the last of three tokens has an id of one's own."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1, "b": last}, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()


DEEP = b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
LONG = b"1" * 10_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("yaml", bomb(12), "it has, with its aliases, more than 20,000 values. Write fewer values."),
        ("yaml", b"model: &a {moe: *a}", "the alias a contains itself"),
        ("yaml", b"model: " + b"[" * 5000, "nested more than 100 levels deep"),
        ("yaml", b"optim: {warmup_steps: " + LONG + b"}", "the integer 111111111111... has 10,000 digits"),
        ("yaml", b"x: " + b"a" * (2 << 20), "more than 1,048,576 bytes"),
        ("flags", b"--optim.warmup_steps=" + LONG, "is an integer of 10,000 digits. Use at most 100."),
        ("flags", b"--optim.warmup_steps=0x" + b"f" * 9000, "is an integer of 9,002 digits"),
        ("flags", b"--optim.lr\n" + b"9" * 400, "is an integer of 400 digits"),
        ("flags", b"--data.mixture=[" + bomb(12).replace(b"\n", b", ") + b"]", "data.mixture="),
        ("conversations", b'{"prompt": ' + LONG + b"}", "line 1 is not JSON (the integer 111111111111... has 10,000"),
        ("conversations", DEEP, "nested more than 100 levels deep"),
        ("token_header", b'{"count": ' + LONG + b"}", "the integer 111111111111... has 10,000 digits"),
        ("token_header", DEEP, "nested more than 100 levels deep"),
        ("tokenizer_file", tokenizer(3 * 10**8), "has 3 tokens, but gives 'b' the id 300,000,000"),
        ("tokenizer_file", tokenizer(2**32 - 1), "has 3 tokens, but gives 'b' the id 4,294,967,295"),
        ("tokenizer_file", DEEP, "nested more than 100 levels deep"),
        ("tokenizer_config", b'{"chat_template": ' + LONG + b"}", "has 10,000 digits"),
        ("hf_config", b'{"vocab_size": ' + LONG + b"}", "has 10,000 digits"),
        ("report_config", bomb(12), "it has, with its aliases, more than 20,000 values"),
        ("safetensors_index", DEEP, "nested more than 100 levels deep"),
        ("npz", packed(images=((300, 512, 512), "|u1"), labels=((300,), "<i8")), "bytes expand to 78,6"),
        ("npz", packed(images=((3, 4, 4), "|u1"), labels=((3,), "<i8"))[:-30], "is not an .npz file"),
        ("npz", packed(images=((3, 4, 4), "|u1"), labels=((3,), "<i8"))[:150], "is not an .npz file"),
        ("npz", b"", "is not an .npz file"),
        ("picture", b"png\n" + png(30_000, 30_000), "has more than 16,777,216 pixels. Shrink"),
        ("picture", b"png\n" + png(30_000, 3_000), "has more than 16,777,216 pixels. Shrink"),
        ("nanogpt", b"\x80\x04\x8e" + bytes([0, 0, 0, 0, 0x10, 0, 0, 0]) + b"a", "is not the list of characters"),
        ("nanogpt", b"\x80\x02Nr\xff\xff\xff\xff.", "it numbers a value 4,294,967,295"),
        ("chat_template", b"{{ 'a' * 10**10 }}", "takes more than 1024 MB of memory"),
    ],
)  # fmt: skip
def test_a_small_file_that_asks_for_much_is_refused(name, content, message, room):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="needs the extra [hf]")
    outcome = room.check(name, content)
    assert outcome["outcome"] == "refused"
    assert message in outcome["message"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("yaml", b"model: {windows: &a [4, 0]}\ndata: {seq_len: 16}\n"),
        ("report_config", bomb(4)),
        ("tokenizer_file", tokenizer(60_000)),
        ("tokenizer_config", b'{"chat_template": "x", "model_max_length": 1000000000000000019884624838656}'),
        ("npz", packed(images=((10, 512, 512), "|u1"), labels=((10,), "<i8"))),
        ("picture", b"png\n" + png(4096, 4000)),
        ("conversations", b'{"prompt": "a", "completion": "b", "id": ' + b"1" * 100 + b"}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_allowed_is_still_read(name, content, room):
    """The neighbours of the limits: aliases, gaps in a vocabulary, numbers that mean no limit, and large pictures."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="needs the extra [hf]")
    assert room.check(name, content)["outcome"] == "value"


@pytest.fixture
def limited(monkeypatch):
    """Gives templates a limit of one second."""
    process = TemplateProcess(seconds=1)
    monkeypatch.setattr(chat, "_PROCESS", process)
    yield process
    process.close()


LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 9**(9**9) }}",
]
BUILDS = [
    "{{ 'a' * 10**10 }}",
    "{{ '%2000000000d' % 1 }}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ 'a'.ljust(3000000000) }}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
]


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_cannot_loop_for_ever(source, limited):
    pytest.importorskip("jinja2")
    with pytest.raises(ConfigError, match=r"it takes more than 1 s\. (Change them or|Use) the template"):
        JinjaTemplate("the template", {"source": source, "tokens": {}}).prompt([])
    # The process that the limit has ended is started again.
    assert JinjaTemplate("the template", {"source": "{{ 1 + 1 }}", "tokens": {}}).prompt([]) == "2"


@pytest.mark.parametrize("source", BUILDS)
def test_a_template_cannot_build_a_text_of_any_size(source, limited):
    pytest.importorskip("jinja2")
    with pytest.raises(
        ConfigError, match=r"it takes more than (1024 MB of memory|1 s)\.|it writes more than 16,777,216 characters\."
    ):
        JinjaTemplate("the template", {"source": source, "tokens": {}}).prompt([])


def test_a_template_whose_process_was_ended_is_run_again(limited):
    pytest.importorskip("jinja2")
    template = JinjaTemplate("the template", {"source": "{{ messages[0].content }}", "tokens": {}})
    message = {"role": "user", "content": "\ud83d\ude42 a\nb"}
    first = template.prompt([message])
    limited._process.terminate()
    limited._process.wait()
    assert template.prompt([message]) == first
    texts = [None] * 8  # threads of a server take turns

    def ask(i):
        texts[i] = template.prompt([{"role": "user", "content": f"text {i}"}])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [f"text {i}" for i in range(8)]


def test_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "x.png")
    with pytest.raises(ConfigError, match=r"x\.png cannot be read: it is not a regular file\. Repair"):
        images.read_images(DataConfig(source="images", path=str(tmp_path)))
    for path in (tmp_path / "cat" / "x.png", "/dev/zero"):
        with pytest.raises(ValueError, match="it is not a regular file"):
            inputs.read_bytes(path)
        with pytest.raises(ValueError, match="it is not a regular file"):
            inputs.read_npz(tmp_path / "cat" / "x.png")


def test_pictures_that_do_not_fit_into_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    (tmp_path / "cat").mkdir()
    for i in range(3):
        (tmp_path / "cat" / f"{i}.png").write_bytes(png(200, 100))
    monkeypatch.setattr(host_memory, "total_and_free", lambda: (1e6, 3 * 100 * 200 * 4))
    read, _ = images.read_images(DataConfig(source="images", path=str(tmp_path)))
    assert read.pixels.shape == (3, 100, 200, 1)
    monkeypatch.setattr(host_memory, "total_and_free", lambda: (1e6, 3 * 100 * 200 * 4 - 1))
    with pytest.raises(ConfigError, match=r"has 3 pictures of 200x100 with 1 channel: it needs 0\.0 GB of memory"):
        images.read_images(DataConfig(source="images", path=str(tmp_path)))


def test_the_command_line_says_it_in_one_line(tmp_path):
    """No traceback, and exit code 2, from a process as a user starts it."""
    (tmp_path / "bomb.yaml").write_bytes(bomb(9))
    for flag, words in (
        (f"--config={tmp_path / 'bomb.yaml'}", "its aliases, more"),
        (f"--train.steps={'7' * 5000}", "5,000"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "jaxstack", "train", flag],
            capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.count("\n") <= 2
        assert words in done.stderr
