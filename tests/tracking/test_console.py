"""Tests of what the console prints."""

import re
import time

import pytest

from jaxstack.tracking.console import Console, printable


def test_a_terminal_gets_no_control_characters(capsys):
    text = "a\x1b[31mb\x07\r\x7f\x85\u202e\u2028[red]\té\U0001f642\n"
    escaped = "a\\x1b[31mb\\x07\\r\\x7f\\x85\\u202e\\u2028[red]\té\U0001f642\n"
    assert printable(text) == escaped
    Console(10).print_sample(text, bold="a\x1b")
    assert capsys.readouterr().out == f"{escaped}\n".expandtabs()


def test_the_beginning_is_bold_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    Console(10).print_sample("a\x00bc", bold="a\x00b")
    assert capsys.readouterr().out == "\x1b[1ma\\x00b\x1b[0mc\n"


def screen(output: str) -> list[str]:
    """Returns the lines that a terminal shows up to its cursor, after an output that may move it and erase lines."""
    rows, at, column = [""], 0, 0
    for code, character in re.findall(r"\x1b\[([?0-9;]*[A-Za-z])|([^\x1b])", output):
        if character == "\n":
            at, column = at + 1, 0
            rows += [""] * (at == len(rows))
        elif character == "\r":
            column = 0
        elif character:
            rows[at] = f"{rows[at][:column].ljust(column)}{character}{rows[at][column + 1 :]}"
            column += 1
        elif code.endswith("A"):
            at -= int(code[:-1] or 1)
        elif code == "2K":
            rows[at] = ""
        else:
            assert code.endswith("m") or code in ("?25l", "?25h"), f"the test does not know {code}"
    assert not any(rows[at + 1 :]), "something is left below the cursor"
    return rows[: at + 1]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_the_spinner_counts_and_leaves_nothing(capsys, terminal):
    with Console(4) as console:
        console.start_spinner(9.6)
        time.sleep(1.1)  # a refresh of the spinner's thread, ten times a second
        during = capsys.readouterr().out
        console.print("resumed from step 2")
        console.start(2)
        console.show_step(3, 1.5, 1000.0)
        console.show_step(4, 1.25)
        console.stop()
        console.print("done")
    shown = screen(during)
    assert len(shown) == 1
    assert re.fullmatch(r". compiling the first step \(10 s the last time\): 1 s *", shown[0])
    output = during + capsys.readouterr().out
    assert screen(output) == ["resumed from step 2", "done", ""]
    assert "4/4" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is visible again"


def test_an_error_removes_the_spinner(capsys, terminal):
    def fail() -> None:
        with Console(4) as console:
            console.start_spinner(None)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert screen(capsys.readouterr().out) == [""]


def test_a_terminal_breaks_messages_at_spaces(capsys, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    Console(1).print("kernels  attention chunked, linear barrier\nrun      a/path/that/is/longer/than/the/terminal/")
    Console(1).print_sample("one  line of a text of the model, as it is")
    assert capsys.readouterr().out == (
        "kernels  attention chunked,\n         linear barrier\n"
        "run      a/path/that/is/longer/than/the/terminal/\n"
        "one  line of a text of the model, as it is\n"
    )


def test_a_file_gets_messages_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    Console(1).print("kernels  attention chunked, linear barrier, norm xla")
    assert capsys.readouterr().out == "kernels  attention chunked, linear barrier, norm xla\n"


@pytest.mark.parametrize("term", [None, "dumb"], ids=["file", "dumb terminal"])
def test_without_a_terminal_a_plain_line_stands_for_the_spinner(term, capsys, monkeypatch):
    if term:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", term)
    with Console(2) as console:
        console.start_spinner(None)
        console.start(0)
        console.show_step(1, 1.5)
        console.show_step(2, 1.25)
    assert capsys.readouterr().out == (
        "compiling the first step\nstep      1 of 2  loss 1.500\nstep      2 of 2  loss 1.250\n"
    )
