"""Tests marked `virtual_clock` run on a loop whose time passes only where something waits for it.

So neither a busy machine nor a slow one makes anything late: what takes no timer takes no time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llm_spec.testing import VirtualClockEventLoop

MARK = "virtual_clock: by a clock that jumps to the next timer, sockets on 127.0.0.1 included"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has its background jobs ignore it, and their own
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):  # a machine's proxy is not for loopback
        os.environ.pop(name, None)
        os.environ.pop(name.lower(), None)
    # programs that tests start find the names of doubles (`*.dist-info` here) as the tests do
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["LLM_SPEC_CACHE_DIR"] = ""  # what a test finds out about this machine is not kept
    if config.pluginmanager.hasplugin("hypothesispytest"):  # not in the environments of other frameworks
        from hypothesis import settings

        settings.register_profile("any machine", deadline=None)  # how long an example takes is the machine's
        settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _each_test_has_new_servers() -> None:
    """What a process knows of servers that are gone does not matter to others at their addresses."""
    discovery = sys.modules.get("llm_spec_http.discovery")
    if discovery is not None:
        discovery.forget_all_server_findings()


def pytest_collection() -> None:
    gc.disable()  # modules and tests stay: looking through them again and again finds nothing


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # so that a test's own `gc.collect()` looks through what tests make


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config,  # noqa: ARG001 - the hook's own parameters
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_clock"):
        return {"virtual clock": partial(VirtualClockEventLoop, socket_grace_s=0.001)}  # both ends are in this loop
    return {"real clock": asyncio.new_event_loop}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which the environments of other frameworks do not have
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Neighbours run in one worker, which loads their models once; who has ended takes over of another's."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)
