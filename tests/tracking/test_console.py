"""Tests of what the console prints."""

from jaxstack.tracking.console import Console, printable


def test_a_terminal_gets_no_control_characters(capsys):
    text = "a\x1b[31mb\x07\r\x7f\x85\u202e\u2028[red]\té\U0001f642\n"
    escaped = "a\\x1b[31mb\\x07\\r\\x7f\\x85\\u202e\\u2028[red]\té\U0001f642\n"
    assert printable(text) == escaped
    Console(10).print(text, bold="a\x1b")
    assert capsys.readouterr().out == f"{escaped}\n".expandtabs()


def test_the_beginning_is_bold_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    Console(10).print("a\x00bc", bold="a\x00b")
    assert capsys.readouterr().out == "\x1b[1ma\\x00b\x1b[0mc\n"
