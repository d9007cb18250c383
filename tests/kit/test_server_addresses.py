"""Addresses of servers: what requests are sent to, what goes into headers, and what is secret."""

from __future__ import annotations

import base64

import pytest

from llm_spec import ConfigError
from llm_spec.kit.server_addresses import parse_server_address, strip_credentials


@pytest.mark.parametrize(
    ("text", "url", "query"),
    [
        ("http://h/v1", "http://h/v1", ""),
        ("http://h/v1/", "http://h/v1", ""),
        ("HTTPS://h:8443", "https://h:8443", ""),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1", ""),
        ("http://h/v1?api-version=3", "http://h/v1", "api-version=3"),
        ("http://h/v1/?a=1&b=2", "http://h/v1", "a=1&b=2"),
        ("http://u:p@h/v1?a=1", "http://h/v1", "a=1"),
        ("http://@h/v1", "http://h/v1", ""),
    ],
)
def test_the_parts_of_an_address(text: str, url: str, query: str) -> None:
    """A query comes behind the path of each request."""
    address = parse_server_address(text)
    assert (address.url, address.query) == (url, query)
    assert address.add_query(f"{url}/models") == f"{url}/models{'?' if query else ''}{query}"


@pytest.mark.parametrize(
    ("credentials", "meant"),
    [
        ("svc:pw", "svc:pw"),
        ("svc", "svc:"),
        ("svc:", "svc:"),
        (":pw", ":pw"),
        ("svc%40org:p%2Fw%3a", "svc@org:p/w:"),
        ("svc:p@w", "svc:p@w"),
        ("svc:a:b", "svc:a:b"),
        ("svc:p%C3%A4ss", "svc:päss"),
    ],
)
def test_credentials_are_a_header(credentials: str, meant: str) -> None:
    """As RFC 7617 has it, of what the percent signs stand for."""
    address = parse_server_address(f"http://{credentials}@h/v1")
    assert address.authorization == "Basic " + base64.b64encode(meant.encode()).decode()
    assert str(address) == "http://***@h/v1"


def test_without_credentials_there_is_no_header() -> None:
    assert parse_server_address("http://h/v1/users/me@example").authorization is None
    assert parse_server_address("http://@h/v1").authorization is None


def test_what_is_secret() -> None:
    """In each form that a server could repeat; the version of an API is not."""
    address = parse_server_address("http://svc:p%2Fassword@h/v1?code=a%20b&api-version=2024-10-21")
    assert {"svc:p%2Fassword", "p%2Fassword", "p/assword", "a%20b", "a b"} < set(address.secrets)
    assert address.authorization is not None
    assert address.authorization.removeprefix("Basic ") in address.secrets
    assert "2024-10-21" not in address.secrets
    assert "a-token-alone" in parse_server_address("http://a-token-alone@h").secrets
    assert str(address) == "http://***@h/v1?***"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h:8000/v1", "does not begin with http:// or https://"),
        ("ftp://h/v1", "does not begin with http:// or https://"),
        ("", "does not begin with http:// or https://"),
        (" http://h/v1", "does not begin with http:// or https://"),
        ("http://", "has no host"),
        ("http://u:p@/v1", "has no host"),
        ("http://:8000/v1", "has no host"),
        ("http://h:x/v1", "has a host or a port that cannot be read"),
        ("http://h:/v1", "has a host or a port that cannot be read"),
        ("http://h:0/v1", "has a host or a port that cannot be read"),
        ("http://h\\@x/v1", "has a host or a port that cannot be read"),
        ("http://[::1/v1", "has a host or a port that cannot be read"),
        ("http://h/v 1", "has a space"),
        ("http://h/v1\t", "has a space"),
        ("http://h/v1\x00", "has a space"),
        ("http://h/v1#x", "has a fragment"),
    ],
)
def test_what_is_no_address(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_server_address(text)
    assert "write it as http://host:port/v1 or https://host/v1" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://h/v1", "http://h/v1"),
        ("http://u:p@h/v1", "http://***@h/v1"),
        ("HTTP://u:p@h/v1", "HTTP://***@h/v1"),
        ("vllm:a@http://u:p@h/v1 and b@c", "vllm:a@http://***@h/v1 and b@c"),
        ("vllm:a@http://u:p@ss@h/v1", "vllm:a@http://***@h/v1"),
        ("vllm:a@http://u:p/ss@h/v1", "vllm:a@http://***@h/v1"),
        ("vllm:a@http://u@h+vllm:b@https://u:p@h2", "vllm:a@http://***@h+vllm:b@https://***@h2"),
        ("vllm:a@http://h/v1+vllm:b@https://h2", "vllm:a@http://h/v1+vllm:b@https://h2"),
        ("vllm:a@http://h:8000/v1+vllm:b@https://h2", "vllm:a@http://h:8000/v1+vllm:b@https://h2"),
        ("http://h:8000/users/me@x", "http://h:8000/users/me@x"),
        ("http://[::1]:8000/users/me@x", "http://[::1]:8000/users/me@x"),
        ("openai:@cf/m@http://h", "openai:@cf/m@http://h"),
        ("openai:llama3:8b@http://h", "openai:llama3:8b@http://h"),
        ("openai:m@svc:p@h/v1", "openai:m@***@h/v1"),
        ("openai:m@svc:p@ss/w@h/v1", "openai:m@***@h/v1"),
        ("openai:m@svc@h/v1", "openai:m@***@h/v1"),
        ("openai:m@http:/svc:p@h/v1", "openai:m@***@h/v1"),
        ("openai:m@http//svc:p@h/v1", "openai:m@http//***@h/v1"),
        ("openai:m@ svc:p@h/v1", "openai:m@ ***@h/v1"),
        ("openai:svc:p@h/v1", "openai:svc:***@h/v1"),
        ("http://h/v1?key=p", "http://h/v1?***"),
        ("http://u:p@h?key=p&a=b", "http://***@h?***"),
        ("at 'http://h/v1?key=p', or (//h?p): none", "at 'http://h/v1?***', or (//h?***): none"),
        ("vllm:a@http://h/v1?key=p+vllm:b@https://h2?p", "vllm:a@http://h/v1?***+vllm:b@https://h2?***"),
        ("vllm:a@h:8000?key=p", "vllm:a@h:8000?***"),
        ("vllm:a@h.example/v1?key=p", "vllm:a@h.example/v1?***"),
        ("torch:org/name@main?dtype=bfloat16", "torch:org/name@main?dtype=bfloat16"),
        ("what is at http://h/v1? key", "what is at http://h/v1? key"),
    ],
)
def test_texts_without_credentials(text: str, shown: str) -> None:
    assert strip_credentials(text) == shown
    assert strip_credentials(shown) == shown
