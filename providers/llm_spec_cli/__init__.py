"""The command `llm-spec`. Outside of `llm_spec`, so that Ctrl-C while that is imported ends it without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> int:
    """Run `llm_spec.cli.main.main`, whatever is interrupted."""
    is_listening = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if started with it ignored
    if is_listening:
        signal.signal(signal.SIGINT, _exit_on_signal)
    from llm_spec.cli.main import main as run

    if is_listening:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _exit_on_signal(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
    """End here: nothing is open yet, and an exception inside an import would show how imports work."""
    os.write(2, b"\nllm-spec: interrupted\n" if sys.stderr.isatty() else b"llm-spec: interrupted\n")
    os._exit(130)
