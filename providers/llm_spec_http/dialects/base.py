"""What differs between servers that speak OpenAI's chat completions."""

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
    """How to call a kind of server with token ids. `post_json` posts a body to a path and gives the answer's JSON.

    An answer in another form raises AttributeError, LookupError, TypeError or ValueError.

    With `build_token_id_fields` a completion (or a chat) holds its token ids; with `build_score_fields(top)` the
    likeliest tokens at every position of its prompt, at most `max_top` (0: it cannot).
    """

    @property
    def max_top(self) -> int: ...

    def build_token_id_fields(self, *, chat: bool) -> Body: ...

    def build_score_fields(self, top: int) -> Body: ...

    async def encode(self, post_json: PostJson, text: str) -> list[int]: ...

    async def decode(self, post_json: PostJson, token_ids: Sequence[int]) -> str: ...

    async def encode_chat(self, post_json: PostJson, body: Body) -> tuple[list[int], int | None]:
        """The ids of a chat request's prompt, and the context length where the server tells it."""
        ...

    async def sample_next(
        self, post_json: PostJson, prefixes: Sequence[Sequence[int]], sampling: Body
    ) -> list[SampledToken]:
        """One token after each of several prefixes, in one call; `sampling` is in the dialect's fields."""
        ...

    def read_token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The ids of a streamed piece of a choice; None: the server does not tell them all."""
        ...


class MessageApiDialect(Protocol):
    """How to ask a kind of server what message its chat endpoint makes of token ids; as `TokenApiDialect`.

    `body`: a chat request, in the dialect's fields.
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
        """A choice of chat's streams that holds all of the message, and with a finish reason also chat's.

        `num_read`: it holds what comes after so many tokens, which were read one by one.
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
        """The same of a whole answer as chat gives it without streaming, as if it were a stream's."""
        ...

    async def render(self, post_json: PostJson, body: Body) -> tuple[list[int], DecodingConstraint | None]:
        """The prompt's ids, and what constrains the answer."""
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
        """Path and body of a stream, in completions' form, that goes on as chat would; see `ConstrainedStreaming`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServerDialect:
    """One kind of server.

    base_url: where it listens by default; None: it must be said. key_variable: the environment variable that its
    vendor documents for the key. continuation: changes a request's body so that the answer continues the given
    assistant text; None: it cannot. repeats_prefix: whether such an answer may begin with that text again. prediction:
    whether it takes predicted outputs. token_api: how to call it with token ids; None: it cannot. message_api: how to
    have it read the message of an answer's ids; None: it cannot. sampling_names: its
    own names for fields of `Sampling`, where they differ. reuses_connections: whether it keeps the connections that it
    says it keeps. shares_prompt_cache: whether calls that begin alike share what was read of their prompts, unless it
    was started otherwise. stops_when_reader_leaves: whether it stops writing when the reader of a whole answer has
    gone, as all do with a stream. reasoning_fields: by which names it reads the reasoning of an earlier turn in its
    message; none: it refuses such fields. renders_templates: whether it puts messages into a model's own chat template,
    of which hardly any knows the role `developer`.
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
        """Whether its models are served by who sells them, not by a server of one's own."""
        return self.base_url is not None and self.base_url.startswith("https://")


def make_continuation(*, fields: Mapping[str, object] | None = None, **marks: object) -> Continuation:
    """A continuation by a last message of the assistant, with the vendor's marks on it, or `fields` of the body."""

    def add_prefix_to_body(body: Body, prefix: str) -> None:
        body["messages"] = [*body["messages"], {"role": "assistant", "content": prefix, **marks}]
        body.update(fields or {})

    return add_prefix_to_body


def read_choices_in_order(answer: Any) -> list[Mapping[str, Any]]:
    """The choices of a completion, in the order of its prompts."""
    choices = cast("list[Mapping[str, Any]]", answer.get("choices") or [])
    return sorted(choices, key=lambda choice: int(choice.get("index") or 0))
