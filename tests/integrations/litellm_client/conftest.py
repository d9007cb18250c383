"""One pair of servers for all clients, and keys that no service knows."""

import warnings

import pytest
from support.two_servers import no_keys, url  # noqa: F401 - fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Connections that a client's library leaves open are its own; the servers are other processes."""
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")  # in tests …
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")
    warnings.simplefilter("ignore", ResourceWarning)  # … and when all have ended
