"""What differs between servers that speak OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Body", "Continuation", "Dialect", "assistant_message"]

Body: TypeAlias = dict[str, Any]
Continuation: TypeAlias = Callable[[Body, str], None]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One kind of server.

    base_url: where it listens by default; None: it must be said. key_variable: the environment variable that its
    vendor documents for the key. continuation: changes a request's body so that the answer continues the given
    assistant text; None: it cannot. repeats_prefix: whether such an answer may begin with that text again. prediction:
    whether it takes predicted outputs.
    """

    name: str
    summary: str
    base_url: str | None
    key_variable: str | None = None
    continuation: Continuation | None = None
    repeats_prefix: bool = False
    prediction: bool = False


def assistant_message(*, fields: Mapping[str, object] | None = None, **marks: object) -> Continuation:
    """A continuation by a last message of the assistant, with the vendor's marks on it, or `fields` of the body."""

    def continue_from(body: Body, prefix: str) -> None:
        body["messages"] = [*body["messages"], {"role": "assistant", "content": prefix, **marks}]
        body.update(fields or {})

    return continue_from
