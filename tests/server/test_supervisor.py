"""Workers that die are started again, later and later; who never serves is given up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llm_spec import ConfigError
from llm_spec.server.supervisor import WorkerSupervisor, get_restart_wait_s
from llm_spec.server.worker_process import READY, send_worker_report


def dies(_: int, __: socket.socket) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def says_why(_: int, channel: socket.socket) -> None:
    send_worker_report(channel, "models.fast: no such folder")


def tells_what_is_inheritable(number: int, _: int, channel: socket.socket) -> None:
    send_worker_report(channel, str([os.get_inheritable(number), channel.get_inheritable()]))


def dies_at_first(folder: str, worker: int, channel: socket.socket) -> None:
    """Serves once it has been started three times."""
    starts = Path(folder, str(worker))
    with starts.open("a") as file:
        file.write(".")
    if len(starts.read_text()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    send_worker_report(channel, READY)
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
    supervisor = WorkerSupervisor(1, dies, (), on_death=deaths.append)
    with pytest.raises(ConfigError, match="worker 0 ended 3 times before it could serve, with code -11"):
        supervisor.start_workers()
    supervisor.stop_workers(10.0)
    assert deaths == [0, 0]


def test_what_keeps_a_worker_from_serving_is_told_in_its_words() -> None:
    supervisor = WorkerSupervisor(2, says_why, ())
    with pytest.raises(ConfigError, match=r"^models\.fast: no such folder$"):
        supervisor.start_workers()
    supervisor.stop_workers(10.0)


def test_quick_deaths_do_not_end_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llm_spec.server.supervisor.get_restart_wait_s", lambda _: 0.0)
    supervisor = WorkerSupervisor(1, dies_at_first, (str(tmp_path),))
    supervisor.start_workers()
    supervisor.stop_workers(10.0)
    assert (tmp_path / "0").read_text() == "..."


def test_workers_know_the_classes_of_the_main_program(tmp_path: Path) -> None:
    """Also where it finds its modules by a path of its own, and with the interpreter's options."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "helper.py").write_text("class Base:\n    what = 'found'\n")
    program = tmp_path / "program.py"
    program.write_text("""if True:
        import sys
        from pathlib import Path

        sys.path.insert(0, str(Path(__file__).parent / "modules"))
        import helper
        from llm_spec import ConfigError
        from llm_spec.server.supervisor import WorkerSupervisor
        from llm_spec.server.worker_process import send_worker_report

        class Mine(helper.Base):
            pass

        def tell(mine, worker, channel):
            send_worker_report(channel, f"{mine.what} {worker} {sys.flags.optimize} {__debug__}")

        if __name__ == "__main__":
            supervisor = WorkerSupervisor(1, tell, (Mine(),))
            try:
                supervisor.start_workers()
            except ConfigError as error:
                print(error)
            supervisor.stop_workers(10.0)
        """)
    command = [sys.executable, "-O", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "found 0 1 False\n"


def test_workers_keep_what_they_inherit_to_themselves() -> None:
    """A process that a worker starts has neither the channel nor the descriptors."""
    with open(os.devnull, "rb") as file:
        supervisor = WorkerSupervisor(1, tells_what_is_inheritable, (file.fileno(),), inherited=(file.fileno(),))
        with pytest.raises(ConfigError, match=r"^\[False, False\]$"):
            supervisor.start_workers()
        supervisor.stop_workers(10.0)
