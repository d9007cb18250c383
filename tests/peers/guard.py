"""Runs a server for as long as somebody holds the other end of standard input, then ends it and all that it started.

python guard.py PROGRAM [ARGUMENT ...]

A test run can end in ways that run no fixture's teardown: it is killed, or it crashes. The pipe to standard input is
closed in all of them.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

_LOOK_S = 0.2  # how often to look whether the server still runs
_GRACE_S = 10.0  # from SIGTERM to SIGKILL


def main() -> int:
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while server.poll() is None and not _let_go():
            pass
        return server.poll() or 0
    finally:
        _end_group(server)


def _let_go() -> bool:
    """Whether standard input has ended; nothing is ever written to it."""
    return bool(select.select([sys.stdin], [], [], _LOOK_S)[0])


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, and kill what is left of its process group."""
    with suppress(ProcessLookupError):  # it has ended, and with it its group
        os.killpg(leader.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(_GRACE_S)
        os.killpg(leader.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
