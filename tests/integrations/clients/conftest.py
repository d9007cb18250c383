"""One pair of servers for all clients, and keys that no service knows."""

from two_servers import no_keys, url  # noqa: F401 - fixtures
