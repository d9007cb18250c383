"""What `llm-spec` shows on a terminal: the answer as it arrives, a spinner and a progress bar."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from types import TracebackType
from typing import Final, Self, TextIO

from llm_spec.contract.events import Origin, TextDelta

__all__ = ["AnswerScreen", "ProgressBar", "Spinner", "escape_control_characters"]

_COLOURS: Final[dict[Origin, str]] = {"accepted": "32", "correction": "33", "bonus": "36", "plain": "0"}
_LEGEND: Final[dict[Origin, str]] = {
    "accepted": "drafted and accepted",
    "correction": "the target's correction",
    "bonus": "the target's bonus",
    "plain": "plain step",
}
_FRAMES: Final = "|/-\\"
_PATIENCE_S: Final = 0.2  # no spinner is shown for shorter waits
_FRAME_S: Final = 0.1
_BAR_WIDTH: Final = 24


class AnswerScreen:
    """Shows the answer: in colours on a terminal, as plain text in a pipe or file."""

    def __init__(self, out: TextIO, *, silent: bool) -> None:
        self._out = out
        self._silent = silent
        self._terminal = out.isatty() and not silent
        self._colours = self._terminal and "NO_COLOR" not in os.environ

    def print_colour_legend(self) -> None:
        if self._colours:
            self._write_and_flush(
                "  ".join(self._colour_text(text, origin) for origin, text in _LEGEND.items()) + "\n\n"
            )

    def print_answer_delta(self, delta: TextDelta) -> None:
        if not self._silent:
            self._write_and_flush(
                self._colour_text(escape_control_characters(delta.text), delta.origin) if self._terminal else delta.text
            )

    def end_line(self) -> None:
        if self._terminal:
            self._write_and_flush("\n")

    def _colour_text(self, text: str, origin: Origin) -> str:
        return f"\033[{_COLOURS[origin]}m{text}\033[0m" if self._colours else text

    def _write_and_flush(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def escape_control_characters(text: str) -> str:
    """Replace control characters, so that a model's text cannot control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() or c == "\u00a0" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Spinner:
    """A moving line on a terminal that disappears when the `with` block ends or `stop` is called.

    Without a terminal, only the lines of `print_line` are shown. It is a `FetchDisplay`.
    """

    def __init__(self, line: str, out: TextIO) -> None:
        self._line = line
        self._out = out
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._width = 0
        self._thread = threading.Thread(target=self._run_animation, daemon=True)

    def __enter__(self) -> Self:
        if self._out.isatty() and os.environ.get("TERM") != "dumb":
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the line; calling it twice is harmless."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def change_line(self, line: str) -> None:
        """Show another text from the next frame on."""
        self._line = line

    def print_line(self, line: str) -> None:
        """Print a permanent line above the moving one."""
        with self._writing:
            self._take_line_away()
            self._out.write(f"{line}\n")
            self._out.flush()

    def _run_animation(self) -> None:
        if self._ended.wait(_PATIENCE_S):
            return
        for frame in itertools.cycle(_FRAMES):
            with self._writing:
                # a line that wraps could not be removed
                line = f"{frame} {self._line} ..."[: shutil.get_terminal_size().columns - 1]
                self._out.write(f"\r{line}{' ' * (self._width - len(line))}")
                self._out.flush()
                self._width = len(line)
            if self._ended.wait(_FRAME_S):
                break
        with self._writing:
            self._take_line_away()
            self._out.flush()

    def _take_line_away(self) -> None:
        if self._width:
            self._out.write(f"\r{' ' * self._width}\r")
            self._width = 0


class ProgressBar:
    """A line on a terminal that shows how much of the work is done, and disappears at the end.

    Without a terminal, nothing is shown.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_shown = out.isatty() and os.environ.get("TERM") != "dumb"
        self._began_s = time.monotonic()
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rewrite_line("")

    def show_progress(self, num_done: int, num_planned: int, label: str) -> None:
        """Show that `num_done` of `num_planned` parts are done, and the label of the next."""
        share, taken_s = num_done / max(1, num_planned), time.monotonic() - self._began_s
        left = f", {_format_duration(taken_s / share - taken_s)} left" if share else ""
        filled = round(_BAR_WIDTH * share)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        self._rewrite_line(f"[{bar}] {num_done} of {num_planned}{left}: {escape_control_characters(label)}")

    def _rewrite_line(self, line: str) -> None:
        if self._is_shown:
            line = line[: shutil.get_terminal_size().columns - 1]
            self._out.write(f"\r{line}{' ' * (self._width - len(line))}" + ("" if line else "\r"))
            self._out.flush()
            self._width = len(line)


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
