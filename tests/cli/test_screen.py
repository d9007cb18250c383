"""What `llm-spec run` shows."""

from __future__ import annotations

import io

import pytest

from llm_spec.cli.screen import AnswerScreen
from llm_spec.contract.events import TextDelta


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def show(out: io.StringIO, *, silent: bool = False) -> str:
    screen = AnswerScreen(out, silent=silent)
    screen.print_answer_delta(TextDelta("drafted\x1b[2J", "accepted"))
    screen.end_line()
    return out.getvalue()


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Escape sequences of an answer are shown as symbols, inside this program's own colour."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert show(Terminal()) == "\033[32mdrafted\N{REPLACEMENT CHARACTER}[2J\033[0m\n"


def test_colours_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As https://no-color.org asks."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert show(Terminal()) == "drafted\N{REPLACEMENT CHARACTER}[2J\n"


def test_a_pipe_gets_the_text_alone() -> None:
    """Byte for byte what the model wrote."""
    assert show(io.StringIO()) == "drafted\x1b[2J"


def test_a_silent_screen_shows_nothing() -> None:
    assert show(Terminal(), silent=True) == ""
