"""One pair of servers for all clients, and keys that no service knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_servers import two_servers


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with two_servers(tmp_path_factory.mktemp("servers")) as address:
        yield address


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would ask another server than the one given fails there."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none-such")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
