"""What differs between servers that speak OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["Body", "Continuation", "Dialect", "assistant_message"]

Body: TypeAlias = dict[str, Any]
Continuation: TypeAlias = Callable[[Body, str], None]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One kind of server.

    base_url: where it listens by default; None: it must be said. key_variable: the environment variable that its
    vendor documents for the key. continuation: changes a request's body so that the answer continues the given
    assistant text; None: it cannot. repeats_prefix: whether such an answer may begin with that text again.
    """

    name: str
    summary: str
    base_url: str | None
    key_variable: str | None = None
    continuation: Continuation | None = None
    repeats_prefix: bool = False
    prediction: Literal["object"] | None = None


def assistant_message(**marks: object) -> Continuation:
    """A continuation by a last message of the assistant, with the vendor's mark on it."""

    def continue_from(body: Body, prefix: str) -> None:
        body["messages"] = [*body["messages"], {"role": "assistant", "content": prefix, **marks}]

    return continue_from
