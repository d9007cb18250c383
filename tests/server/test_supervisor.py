"""Workers that die are started again, later and later; who never serves is given up."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from llm_spec import ConfigError
from llm_spec.server.supervisor import READY, Supervisor, get_restart_wait_s


def dies(_: int, __: Connection) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def says_why(_: int, reports: Connection) -> None:
    reports.send("models.fast: no such folder")


def dies_at_first(folder: str, worker: int, reports: Connection) -> None:
    """Serves once it has been started three times."""
    starts = Path(folder, str(worker))
    with starts.open("a") as file:
        file.write(".")
    if len(starts.read_text()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    reports.send(READY)
    signal.pause()


def test_waits_grow_up_to_half_a_minute() -> None:
    """Who lived long is started again at once."""
    waits_s = [get_restart_wait_s(number) for number in range(100)]
    assert waits_s[:4] == [0.0, 0.5, 1.0, 2.0]
    assert waits_s == sorted(waits_s)
    assert max(waits_s) == 30.0


def test_who_never_serves_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how it ended; it was tried more than once."""
    monkeypatch.setattr("llm_spec.server.supervisor.get_restart_wait_s", lambda _: 0.0)
    deaths: list[int] = []
    supervisor = Supervisor(1, dies, (), on_death=deaths.append)
    with pytest.raises(ConfigError, match="worker 0 ended 3 times before it could serve, with code -11"):
        supervisor.start()
    supervisor.stop(10.0)
    assert deaths == [0, 0]


def test_what_keeps_a_worker_from_serving_is_told_in_its_words() -> None:
    supervisor = Supervisor(2, says_why, ())
    with pytest.raises(ConfigError, match=r"^models\.fast: no such folder$"):
        supervisor.start()
    supervisor.stop(10.0)


def test_quick_deaths_do_not_end_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llm_spec.server.supervisor.get_restart_wait_s", lambda _: 0.0)
    supervisor = Supervisor(1, dies_at_first, (str(tmp_path),))
    supervisor.start()
    supervisor.stop(10.0)
    assert (tmp_path / "0").read_text() == "..."
