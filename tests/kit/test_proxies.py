"""Which proxy an address is reached through: the same as httpx finds."""

from __future__ import annotations

import os

import httpx2
import pytest

from llm_spec import ConfigError
from llm_spec.kit.server_addresses import find_proxy

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
URLS = (
    "http://model.example/v1",
    "http://model.example:8000/v1",
    "https://model.example/v1",
    "https://model.example:8443/v1",
    "http://a.model.example/v1",
    "http://xmodel.example/v1",
    "http://MODEL.example:80/v1",
    "http://localhost:8000/v1",
    "http://a.localhost:8000/v1",
    "http://127.0.0.1:8000/v1",
    "http://10.1.2.3/v1",
    "https://[::1]:8443/v1",
    "http://[fe80::1]/v1",
)
PROXIES = (
    {"http_proxy": "http://p:1"},
    {"https_proxy": "http://p:2"},
    {"all_proxy": "http://p:3"},
    {"http_proxy": "p:1", "https_proxy": "https://p:2", "all_proxy": "http://p:3"},
    {"HTTP_PROXY": "http://p:1", "ALL_PROXY": "http://p:3"},
    {"HTTP_PROXY": "http://p:1", "http_proxy": "http://p:4"},
    {"HTTP_PROXY": "http://p:1", "http_proxy": ""},
    {"HTTP_PROXY": "http://p:1", "REQUEST_METHOD": "GET"},
    {},
)
EXEMPTIONS = (
    "",
    "*",
    "other.example, *",
    "model.example",
    "MODEL.example",
    ".model.example",
    "*.model.example",
    "example",
    "other.example",
    "model.example:8000",
    "model.example:80",
    "model.example:443",
    "other.example,model.example:8443",
    "localhost",
    "localhost:8000",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.0.0.0/8",
    "10.0.0.0/8,fe80::/10",
    "10.0.0.0/x",
    "::1",
    "[::1]",
    "[::1]:8443",
    "[::1]:1",
    "http://model.example",
    "https://model.example",
    "all://model.example",
    "http://model.example:80",
    "http://*.model.example",
    "http://*model.example",
    "http://",
    "ws://model.example",
    "model.example/v1",
    ":8000",
    " , ,",
)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def find_by_httpx(url: str) -> str | None:
    """The proxy that httpx chooses, by the transport that it would use."""
    with httpx2.Client() as client:
        transport = client._transport_for_url(httpx2.URL(url))
        for pattern, mounted in client._mounts.items():
            if mounted is transport and transport is not client._transport:
                key = pattern.pattern.removesuffix("://")
                found = {name.lower(): value for name, value in os.environ.items() if name != name.lower()}
                found |= {name: value for name, value in os.environ.items() if name == name.lower()}
                return found[f"{key}_proxy"]
    return None


@pytest.mark.parametrize("exempt", EXEMPTIONS)
@pytest.mark.parametrize("proxies", PROXIES, ids=lambda proxies: ",".join(proxies) or "none")
def test_as_httpx(proxies: dict[str, str], exempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every address the same proxy, or none."""
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", exempt)
    for url in URLS:
        expected, proxy = find_by_httpx(url), find_proxy(url)
        assert (proxy and proxy.address.url) == (
            expected and (expected if "://" in expected else f"http://{expected}")
        ), url


def test_what_names_a_proxy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its variable, and without its password."""
    monkeypatch.setenv("https_proxy", "http://svc:s3cr3t-pw@p:3128")
    proxy = find_proxy("https://model.example/v1")
    assert proxy is not None
    assert str(proxy) == "the proxy http://***@p:3128 (HTTPS_PROXY)"
    assert "s3cr3t" not in repr(proxy)
    assert proxy.address.authorization is not None


@pytest.mark.parametrize(
    ("written", "words"), [("ftp://p:1", "begin with"), ("http://", "has no host"), ("p:x", "port")]
)
def test_what_cannot_be_a_proxy(written: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", written)
    with pytest.raises(ConfigError, match=rf"ALL_PROXY: the address .* {words}"):
        find_proxy("http://model.example/v1")
