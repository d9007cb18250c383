"""Addresses of servers: parsing, their secrets, their text in errors, and the proxy for each.

An address is `http://` or `https://`, a host, and a path that an HTTP client extends. Its
credentials and its query are split off, so that no library that gets the rest can repeat them.

The environment names the proxy for a server: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY. They
are read as httpx reads them, so that all providers use the same proxy. Names in lower case come
first, and the proxy of the address's scheme comes before ALL_PROXY. Addresses of this machine get
no special treatment. NO_PROXY has hosts (`example.com` includes subdomains, `.example.com` and
`*.example.com` are only subdomains), addresses, networks (`10.0.0.0/8`), each with a port or
without, and `*` for all.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from urllib.parse import SplitResult, unquote, unquote_plus, urlsplit

from llm_spec.contract.errors import ConfigError

__all__ = [
    "Proxy",
    "ServerAddress",
    "find_proxy",
    "parse_server_address",
    "strip_credentials",
]

# Everything before the last @ of a host. A password with a slash is recognized if it cannot be a
# port. Strings joined by + have an @ before each address.
_CREDENTIALS: Final = re.compile(r"//(?:[^/\s]*|[^/\s:\[]*:(?!\d{0,5}/)(?:(?!//)\S)*)@(?!https?://)", re.IGNORECASE)
# The same without a scheme: `name:model@user:password@host`, `name:user:password@host`,
# `model@user@host`.
_CREDENTIALS_ALONE: Final = re.compile(
    r"(?:(?<=@)(?<!\*@)(?!https?://)(?:[^@\s/:]*:\S*|[^@/\s]*)"
    r"|(?<=@ )[^@\s/:]*:\S*|(?<![\w./-])(?P<kept>[\w-]+:[^\s:@/]*:)[^\s@/\]]*)@(?!https?://)",
    re.IGNORECASE,
)
# Up to the end of the word, or to the next of strings joined by +. The options of a model's folder
# are not a query.
_QUERY: Final = re.compile(
    r"(?P<address>(?:https?:/|//|@[^\s/?#@]*:\d{1,5}(?=[/?])|@[\w.-]+\.[a-z]{2,}(?=[/?]))[^\s?#]*)\?\S+?"
    r"(?=['\"),;:]{0,9}(?:\s|$)|\+[\w-]+:)",
    re.IGNORECASE,
)
_FORM: Final = "write it as http://host:port/v1 or https://host/v1"


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """The address of a server.

    `url`: the address without credentials, query, and trailing slash.
    `query`: the text behind the path of each request.
    `authorization`: the header made from the credentials (Basic), or None if there are none.
    `secrets`: texts that no error may repeat.
    """

    url: str
    query: str = field(default="", repr=False)
    authorization: str | None = field(default=None, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        """Return the address for errors, without its secrets."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{'***@' if self.authorization else ''}{rest}{'?***' if self.query else ''}"

    def add_query(self, url: str) -> str:
        """Return a request's URL with the address's query behind its path."""
        return f"{url}?{self.query}" if self.query else url


def parse_server_address(text: str, schemes: Sequence[str] = ("http", "https")) -> ServerAddress:
    """Split an address into its parts.

    Raises ConfigError for an address that no request can be sent to. The error has no secrets.
    """
    parts = _split_address(text, schemes)
    credentials, _, host = parts.netloc.rpartition("@")
    url = f"{parts.scheme}://{host}{parts.path}".rstrip("/")
    secrets = _list_query_secrets(parts.query)
    if not credentials:
        return ServerAddress(url=url, query=parts.query, secrets=_sort_secrets(secrets))
    user, _, password = (unquote(part) for part in credentials.partition(":"))
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    secrets += [credentials, token, credentials.partition(":")[2], password or user]
    return ServerAddress(url=url, query=parts.query, authorization=f"Basic {token}", secrets=_sort_secrets(secrets))


def strip_credentials(text: str) -> str:
    """Return an address, or a text with some, without users, passwords and queries."""
    text = _CREDENTIALS.sub("//***@", text)
    text = _CREDENTIALS_ALONE.sub(lambda found: f"{found['kept'] or ''}***@", text)
    return _QUERY.sub(r"\g<address>?***", text)


# ------------------------------------------------------------------------------------------- inside


def _split_address(text: str, schemes: Sequence[str]) -> SplitResult:
    if not text.lower().startswith(tuple(f"{scheme}://" for scheme in schemes)):
        raise _build_address_error(text, f"does not begin with {':// or '.join(schemes)}://")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise _build_address_error(text, "has a space, a line break or another character that no address has")
    if "#" in text:
        raise _build_address_error(text, "has a fragment (#…), which is never sent to a server")
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise _build_address_error(text, "has a host or a port that cannot be read") from None
    if not host or "\\" in text or port == 0 or parts.netloc.endswith(":"):
        raise _build_address_error(text, "has no host" if not host else "has a host or a port that cannot be read")
    return parts


def _build_address_error(text: str, problem: str) -> ConfigError:
    """Return the error.

    It quotes only the part of the address after the last @ and before a query or a fragment.
    """
    _, at, rest = text.rpartition("@")
    shown = ("***@" if at else "") + re.split(r"[?#]", rest, maxsplit=1)[0]
    return ConfigError(f"the address {shown!r} {problem}; {_FORM}")


def _list_query_secrets(query: str) -> list[str]:
    """Return the values of a query, both encoded and decoded: a server may take its key there."""
    pairs = [pair.partition("=") for pair in query.split("&")]
    # a server's message may be about `api-version`, which is not secret
    values = [value for name, _, value in pairs if name.lower() != "api-version"]
    return [form for value in values for form in (value, unquote_plus(value))]


def _sort_secrets(secrets: list[str]) -> tuple[str, ...]:
    """Sort the longest first: one may contain another."""
    return tuple(sorted({secret for secret in secrets if secret}, key=len, reverse=True))


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
        """True if it speaks SOCKS, not HTTP."""
        return self.address.url.startswith("socks")

    def __str__(self) -> str:
        """Return the proxy for errors, without its user and password."""
        return f"the proxy {self.address} ({self.variable})"


def find_proxy(url: str) -> Proxy | None:
    """Return the proxy for an address, or None if it is reached directly.

    Raises ConfigError for a proxy whose address is invalid.
    """
    from urllib.request import getproxies  # late: reading a config does not need it

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


# ------------------------------------------------------------------------------------------- inside


def _is_exempt(target: SplitResult, entry: str) -> bool:
    """True if an entry of NO_PROXY matches the address."""
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
    """Return the port, or None if it is the scheme's default."""
    return None if target.port == _DEFAULT_PORTS.get(target.scheme) else target.port


def _matches_host(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and host != pattern[1:]
    if pattern.startswith("*"):
        return host == pattern[1:] or host.endswith(f".{pattern[1:]}") or pattern == "*"
    return host == pattern.strip("[]") or not pattern


def _parse_network(text: str) -> _Network | None:
    """Return a network, or None for a host name.

    A single address is a network of one.
    """
    address, slash, bits = text.partition("/")
    if slash and not bits.isdecimal():
        return None
    try:
        return ipaddress.ip_network(f"{address.removeprefix('[').removesuffix(']')}{slash}{bits}", strict=False)
    except ValueError:
        return None
