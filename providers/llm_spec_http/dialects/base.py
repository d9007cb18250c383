"""The differences between servers that have OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

from llm_spec.contract.endpoint import DecodingConstraint, SampledToken
from llm_spec.contract.events import FinishReason

__all__ = [
    "Body",
    "Continuation",
    "MessageApiDialect",
    "PostJson",
    "ServerDialect",
    "TokenApiDialect",
    "make_continuation",
    "read_choices_in_order",
]

Body: TypeAlias = dict[str, Any]
Continuation: TypeAlias = Callable[[Body, str], None]
PostJson: TypeAlias = Callable[[str, Body], Awaitable[Any]]


class TokenApiDialect(Protocol):
    """The calls with token ids of a kind of server.

    `post_json` posts a body to a path and returns the answer's JSON. An answer in an unexpected
    form raises AttributeError, LookupError, TypeError or ValueError.

    With `build_token_id_fields`, a completion or a chat returns its token ids. With
    `build_score_fields(top)`, it returns the likeliest tokens at every position of its prompt, at
    most `max_top`; if that is 0, the server cannot score.
    """

    @property
    def max_top(self) -> int: ...

    def build_token_id_fields(self, *, chat: bool) -> Body: ...

    def build_score_fields(self, top: int) -> Body: ...

    async def encode(self, post_json: PostJson, text: str) -> list[int]: ...

    async def decode(self, post_json: PostJson, token_ids: Sequence[int]) -> str: ...

    async def encode_chat(self, post_json: PostJson, body: Body) -> tuple[list[int], int | None]:
        """Return the token ids of a chat's prompt, and the context length, or None if not given."""
        ...

    async def sample_next(
        self, post_json: PostJson, prefixes: Sequence[Sequence[int]], sampling: Body
    ) -> list[SampledToken]:
        """Sample one token after each prefix, in one call; `sampling` has the dialect's names."""
        ...

    def read_token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the ids of a streamed piece of a choice, or None if some are missing."""
        ...


class MessageApiDialect(Protocol):
    """The calls that parse token ids into a message as the server's chat endpoint does.

    `body` is a chat request with the dialect's names. Errors are as in `TokenApiDialect`.
    """

    async def parse(
        self,
        post_json: PostJson,
        body: Body,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        *,
        num_read: int = 0,
    ) -> Mapping[str, Any]:
        """Return a choice of chat's stream with the whole message.

        With a `finish_reason`, the choice has the finish reason that chat would give. With
        `num_read`, it holds what follows that many tokens, which were read one by one.
        """
        ...

    async def parse_whole(
        self,
        post_json: PostJson,
        body: Body,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason,
    ) -> Mapping[str, Any]:
        """Return the choice of chat's answer without streaming, as a stream's choice."""
        ...

    async def render(self, post_json: PostJson, body: Body) -> tuple[list[int], DecodingConstraint | None]:
        """Return the prompt's ids, and the constraint on the answer."""
        ...

    def build_constrained_stream(
        self,
        constraint: DecodingConstraint,
        prompt_ids: Sequence[int],
        written_ids: Sequence[int],
        *,
        max_tokens: int | None,
        seed: int | None,
    ) -> tuple[str, Body]:
        """Return path and body of a stream that continues as chat would.

        The stream has the form of a completion; see `ConstrainedStreaming`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ServerDialect:
    """One kind of server.

    `base_url`: its default address, or None if it has none.
    `key_variable`: the environment variable that its vendor documents for the key.
    `continuation`: changes a request's body so that the answer continues a text, or None if it
    cannot.
    `repeats_prefix`: True if such an answer may begin with that text again.
    `prediction`: True if it takes predicted outputs.
    `token_api`: how to call it with token ids, or None if it cannot.
    `message_api`: how to let it parse an answer's ids into a message, or None if it cannot.
    `sampling_names`: its own names for fields of `Sampling`, if they differ.
    `reuses_connections`: False if it closes connections that it promised to keep.
    `shares_prompt_cache`: True if calls with the same beginning share what was read of their
    prompts by default.
    `stops_when_reader_leaves`: True if it stops generating an answer without streaming when the
    reader has gone. All do with a stream.
    `reasoning_fields`: the fields for the reasoning of an earlier turn; empty if it refuses such
    fields.
    `renders_templates`: True if it renders the model's own chat template, which hardly ever knows
    the role `developer`.
    """

    name: str
    summary: str
    base_url: str | None
    key_variable: str | None = None
    continuation: Continuation | None = None
    repeats_prefix: bool = False
    prediction: bool = False
    token_api: TokenApiDialect | None = None
    message_api: MessageApiDialect | None = None
    sampling_names: Mapping[str, str] = field(default_factory=dict[str, str])
    reuses_connections: bool = True
    shares_prompt_cache: bool = False
    stops_when_reader_leaves: bool = False
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    renders_templates: bool = False

    @property
    def is_vendor(self) -> bool:
        """True if the models are a vendor's service, not on a server of one's own."""
        return self.base_url is not None and self.base_url.startswith("https://")


def make_continuation(*, fields: Mapping[str, object] | None = None, **marks: object) -> Continuation:
    """Continue by a last assistant message with the vendor's `marks`, or `fields` in the body."""

    def add_prefix_to_body(body: Body, prefix: str) -> None:
        body["messages"] = [*body["messages"], {"role": "assistant", "content": prefix, **marks}]
        body.update(fields or {})

    return add_prefix_to_body


def read_choices_in_order(answer: Any) -> list[Mapping[str, Any]]:
    """Return a completion's choices, in the order of its prompts."""
    choices = cast("list[Mapping[str, Any]]", answer.get("choices") or [])
    return sorted(choices, key=lambda choice: int(choice.get("index") or 0))
