"""The proxy through which a server is reached, by the environment: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.

As httpx reads them, so that all providers go the same way: names in lower case come first, the proxy of the address's
scheme comes before ALL_PROXY, and an address of this machine is one like any other. NO_PROXY has hosts (`example.com`
with all below it, `.example.com` or `*.example.com` only what is below it), addresses, networks (`10.0.0.0/8`), each
with a port or without, and `*` for all.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import SplitResult, urlsplit

from llm_spec.contract.errors import ConfigError
from llm_spec.kit.addresses import ServerAddress, parse_server_address

__all__ = ["Proxy", "find_proxy"]

_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_SCHEMES: Final = ("http", "https", "socks5", "socks5h")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\]]*\]|[^:/]*)(?::(?P<port>\d+))?/?")


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """A proxy, and the environment variable that names it."""

    address: ServerAddress
    variable: str

    @property
    def is_socks(self) -> bool:
        """Whether it speaks SOCKS, not HTTP."""
        return self.address.url.startswith("socks")

    def __str__(self) -> str:
        """For errors: without its user and password."""
        return f"the proxy {self.address} ({self.variable})"


def find_proxy(url: str) -> Proxy | None:
    """The proxy for an address; None: it is reached directly. Raises ConfigError for a proxy that cannot be one."""
    from urllib.request import getproxies  # not for those who only read a config

    found = getproxies()
    target = urlsplit(url)
    scheme = target.scheme if found.get(target.scheme) else "all"
    written = found.get(scheme)
    if not written or any(_is_exempt(target, entry.strip().lower()) for entry in found.get("no", "").split(",")):
        return None
    variable = f"{scheme.upper()}_PROXY"
    try:
        address = parse_server_address(written if "://" in written else f"http://{written}", _SCHEMES)
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from None
    return Proxy(address=address, variable=variable)


# ---------------------------------------------------------------------------------------------- inside


def _is_exempt(target: SplitResult, entry: str) -> bool:
    """Whether an entry of NO_PROXY names the address."""
    scheme, has_scheme, pattern = entry.rpartition("://")
    if not pattern or entry == "*":
        return entry == "*" or scheme == target.scheme
    if has_scheme and scheme not in ("all", target.scheme):
        return False
    network = _parse_network(pattern)
    if network is not None:
        address = _parse_network(target.hostname or "")
        return address is not None and address.version == network.version and address[0] in network
    match = _HOST_AND_PORT.fullmatch(pattern)
    if match is None:
        return False
    port = None if match["port"] is None else int(match["port"])
    if port not in (None, _DEFAULT_PORTS.get(scheme), _get_port(target)):
        return False
    is_host = has_scheme or match["host"].startswith(("[", "*.")) or pattern == "localhost"
    return _matches_host(match["host"] if is_host else f"*{match['host']}", target.hostname or "")


def _get_port(target: SplitResult) -> int | None:
    """None: that of its scheme."""
    return None if target.port == _DEFAULT_PORTS.get(target.scheme) else target.port


def _matches_host(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and host != pattern[1:]
    if pattern.startswith("*"):
        return host == pattern[1:] or host.endswith(f".{pattern[1:]}") or pattern == "*"
    return host == pattern.strip("[]") or not pattern


def _parse_network(text: str) -> _Network | None:
    """A network, or an address as a network of one; None: it is a name."""
    address, slash, bits = text.partition("/")
    if slash and not bits.isdecimal():
        return None
    try:
        return ipaddress.ip_network(f"{address.removeprefix('[').removesuffix(']')}{slash}{bits}", strict=False)
    except ValueError:
        return None
