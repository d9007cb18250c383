"""The command `llm-spec`.

It is outside of `llm_spec` so that Ctrl-C during its import ends the program without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> int:
    """Run `llm_spec.cli.main.main`, and handle Ctrl-C while it is imported."""
    # False if the program was started with SIGINT ignored.
    is_listening = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_listening:
        signal.signal(signal.SIGINT, _exit_on_signal)
    from llm_spec.cli.main import main as run

    if is_listening:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _exit_on_signal(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's signature
    """Exit at once: nothing is open yet, and an exception would show a traceback."""
    os.write(2, b"\nllm-spec: interrupted\n" if sys.stderr.isatty() else b"llm-spec: interrupted\n")
    os._exit(130)
