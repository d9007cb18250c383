"""The contract: what a provider, a draft and a local token model are.

Everything here is a Protocol: a class fits by having the members, it inherits nothing. `llm_spec.testing.conformance`
checks an implementation against what the docstrings promise.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from llm_spec.chat import (
    ApiName,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    Finish,
    FinishReason,
    ReasoningDelta,
    Sampling,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from llm_spec.errors import TargetError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.floating[Any]]

__all__ = [
    "Capabilities",
    "ChatResponseBuilder",
    "ChunkStreaming",
    "DeviceRoundModel",
    "DeviceRoundResult",
    "DeviceRoundRunner",
    "Discoverable",
    "DraftPiece",
    "DraftProvider",
    "DraftToken",
    "Feature",
    "FeatureLossAware",
    "GrammarTokenizer",
    "InputTokenCounting",
    "LlmProvider",
    "PerClientDraft",
    "PerRequestDraft",
    "PrefixReusingSession",
    "ProviderEntry",
    "RequestLimitedModel",
    "SampledToken",
    "TokenDraft",
    "TokenDrafter",
    "TokenEndpoint",
    "TokenModel",
    "TokenSampler",
    "TokenScorer",
    "TokenSession",
    "Tokenizer",
    "TopTokens",
    "append_tool_call_delta",
    "complete_from_stream",
    "is_free",
    "open_for_client",
    "open_for_request",
    "prefill_prompt",
]

# Prompts are read in pieces of this many tokens, with and without speculation alike (so the caches agree), because
# a cancelled request should not have to wait for all of a long one.
_PREFILL_CHUNK_TOKENS: Final = 256


# ---------------------------------------------------------------------------------------------- chat


@runtime_checkable
class LlmProvider(Protocol):
    """A chat model. Safe for concurrent requests; whoever made it calls `aclose`."""

    @property
    def name(self) -> str:
        """What it is called in results and logs, `provider:model`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this model can do beyond chat, as far as is known now."""
        ...

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Answer piece by piece; the last event is a `Finish`.

        Leaving the context, by whatever way, ends the work behind it. Raises InvalidRequestError for what the model
        cannot serve and TargetError when it fails; cancellation passes through.
        """
        ...

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """Answer at once; the same text as `stream` would give."""
        ...

    async def aclose(self) -> None:
        """Release what the provider holds; calling it twice is harmless."""
        ...


class DraftPiece(NamedTuple):
    """The next piece of a draft. `token_ids` where the draft knows them; the last piece has a `finish_reason`.

    `is_free`: no model wrote it, though others of the same draft may be a model's.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    is_free: bool = False


@runtime_checkable
class DraftProvider(Protocol):
    """Where guesses at the answer come from. It may be wrong, slow or broken: the answer never depends on it.

    One that answers from the start whatever `request.prefix` says has an attribute `continues_prefix = False`: what it
    wrote is then realigned with the answer instead of asking it again. One that asks no model has an attribute
    `is_free = True`: what it drafts costs nothing.
    """

    @property
    def name(self) -> str: ...

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        """Guess how the answer goes on after `request.prefix`, at most `max_tokens` tokens, in pieces as they come.

        Leaving the context ends the work behind it.
        """
        ...

    async def aclose(self) -> None: ...


def is_free(draft: object) -> bool:
    """Whether a draft asks no model, as it says itself."""
    return bool(getattr(draft, "is_free", False))


@runtime_checkable
class PerRequestDraft(Protocol):
    """A draft that keeps what it knows of a conversation from one call to the next; optional beside `DraftProvider`."""

    def for_request(self) -> DraftProvider:
        """The draft for all calls of one request, one call at a time.

        It forgets with the request; closing it closes nothing. `draft` itself keeps nothing.
        """
        ...


@runtime_checkable
class PerClientDraft(Protocol):
    """A draft that learns from the answers it drafted for; optional beside `DraftProvider`."""

    def for_client(self) -> DraftProvider:
        """The same draft for those who may know of each other's answers: it begins with none, and keeps its own.

        Closing it closes nothing.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a model can do beyond chat. None or False: it cannot, or it is not known yet.

    `continue_prefix`: it goes on from `ChatRequest.prefix`. Of a `Discoverable` this is only what its kind does, until
    `discover("continue_prefix")` has tried it.
    `prediction`: it takes predicted outputs (`ChatRequest.prediction`) and answers faster where they are right.
    `whole_answers`: `complete` is one call of its own, which costs it less than a stream, and stops when it is left.
    `api`: whose words its server speaks. What a client says in them (`ChatMessage.native`, `ChatRequest.extra`) is sent
    to it as it is.
    """

    context_length: int | None = None
    tools: bool = False
    response_format: bool = False
    continue_prefix: bool = False
    prediction: bool = False
    whole_answers: bool = False
    api: ApiName = "chat"
    token_model: TokenModel | None = None
    token_endpoint: TokenEndpoint | None = None
    token_scorer: TokenScorer | None = None


@runtime_checkable
class ChunkStreaming(Protocol):
    """A provider that can pass on its server's own chunks; optional beside `LlmProvider`."""

    def stream_chunks(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[Mapping[str, Any]]]:
        """As `stream`, in JSON objects of OpenAI's streams: for what events cannot say (choices, log-probabilities)."""
        ...


@runtime_checkable
class InputTokenCounting(Protocol):
    """A provider whose server counts the tokens of a request without answering it; optional beside `LlmProvider`."""

    async def count_input_tokens(self, request: ChatRequest) -> int:
        """The tokens of a request's input; raises as `stream`."""
        ...


Feature: TypeAlias = Literal["token_endpoint", "token_scorer", "continue_prefix"]


@runtime_checkable
class Discoverable(Protocol):
    """A provider that has to ask its server what it can do; optional beside `LlmProvider`."""

    async def discover(self, feature: Feature) -> None:
        """Try a feature: afterwards `capabilities` tells whether it is there.

        A feature that is there is not tried; one that was not, or was lost, is again after a while. Callers at the same
        time share a trial, and each may leave it to the others. Raises TransientError where the server cannot answer
        now: nothing is known then, and the next call tries again.
        """
        ...


@runtime_checkable
class FeatureLossAware(Protocol):
    """A `Discoverable` that hears of what its calls cannot tell; optional beside it."""

    def mark_unsupported(self, feature: Feature) -> None:
        """A call that needs a feature was refused, and the same request was answered without it.

        It is not there any more, until `discover` finds it again.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ProviderEntry:
    """What a package registers in the entry-point group `llm_spec.providers`: how to make a provider or a draft.

    `load(model, base_url)` makes it; model is "" and base_url None where the string has none. `load_with_key` takes an
    API key besides; None: it has no use for one. `requires` are import names that `install` (a command) brings.
    `is_free`: a draft that asks no model. `strategies(model)` names those by which such a target can verify drafts,
    beside `judge`, which needs nothing: for `llm-spec plan`, which asks no server. None: not known.
    """

    load: Callable[[str, str | None], LlmProvider | DraftProvider]
    summary: str
    load_with_key: Callable[[str, str | None, str], LlmProvider | DraftProvider] | None = None
    requires: tuple[str, ...] = ()
    install: str = ""
    is_free: bool = False
    strategies: Callable[[str], Sequence[str]] | None = None

    @property
    def missing_modules(self) -> tuple[str, ...]:
        """The modules of `requires` that are not installed."""
        return tuple(name for name in self.requires if importlib.util.find_spec(name) is None)


# ----------------------------------------------------------------------------- token ids over a wire


class SampledToken(NamedTuple):
    """The target's own token after a prefix; `is_end`: with it the answer is over (its text is empty).

    The text of a token that ends inside a character may be empty or hold U+FFFD: then only `decode` can tell.
    """

    token_id: int
    text: str
    is_end: bool = False


class TopTokens(NamedTuple):
    """The likeliest tokens at one position: `(token id, log-probability)`, best first, by the model's own logits."""

    top: tuple[tuple[int, float], ...]


class TokenEndpoint(Protocol):
    """A target on a server that takes and tells token ids of its own vocabulary. Safe for concurrent requests.

    Every call raises TargetError when the server fails, and InvalidRequestError for what it calls invalid; a call that
    the server does not know any more takes the capability away, until it is found again.
    """

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; None: unknown."""
        ...

    async def encode(self, text: str) -> list[int]:
        """Ids whose text this is, a stretch of an answer; not always those that the model itself would choose."""
        ...

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out; undecodable bytes become U+FFFD."""
        ...

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        """The prompt: chat template applied, ready for the answer, or for what follows `request.prefix`."""
        ...

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        """One token after each of several prefixes, in one call. A seed in `sampling` is the seed of every one."""
        ...

    def stream_chat(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """As the provider's own `stream`, every `TextDelta` with its `token_ids` (a text may be empty)."""
        ...

    def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """What follows `token_ids`, with the sampling and `max_tokens` of `request`, in events as `stream_chat`."""
        ...


class TokenScorer(Protocol):
    """A target on a server that says how likely it finds given tokens (teacher forcing)."""

    @property
    def max_top(self) -> int:
        """Most tokens that it reports for a position."""
        ...

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        """The `top` likeliest tokens after each of the last `num_rows` of `token_ids`: [num_rows]."""
        ...


# ------------------------------------------------------------------------------------ local token models


class Tokenizer(Protocol):
    """Text to token ids and back. Equal `fingerprint`: the same ids mean the same text.

    One that knows it has an attribute `max_token_chars`, the characters of its longest token: a prompt that cannot fit
    into a model is then refused before it is encoded, which may take seconds.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a stretch of the answer; nothing is added, and control tokens in the text are only text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out; undecodable bytes become U+FFFD."""
        ...

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """The prompt: chat template applied, ready for the answer, or for what follows `request.prefix`."""
        ...


@runtime_checkable
class GrammarTokenizer(Tokenizer, Protocol):
    """A tokenizer that can tell a grammar what its ids are; needed for `ChatRequest.response_format`, else optional."""

    def to_tokenizer_json(self) -> str:
        """The vocabulary and how it is decoded, as the text of a Hugging Face tokenizer.json."""
        ...


class TokenModel(Protocol):
    """A decoder-only model in this process. Loaded once, shared by requests; each opens a session of its own.

    `same_text`: checked on this machine, the logits of a position do not depend on how many tokens a `forward` of at
    most `max_width` was given with it, nor on their values. Then one seed gives one text, with and without speculation.
    """

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def context_length(self) -> int: ...

    @property
    def max_width(self) -> int:
        """Most tokens that one verifying `forward` may be given."""
        ...

    @property
    def same_text(self) -> bool: ...

    def open(self, *, exact: bool = True) -> TokenSession:
        """A new, empty key-value cache. `exact=False`: whatever is fastest, rows may depend on the width."""
        ...


class TokenSession(Protocol):
    """One key-value cache, used by one thread at a time; whoever opened it closes it."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        """Append tokens; return the logits after each of the last `num_rows` of them.

        [num_rows, vocab_size], float32, valid until the next call. Longer calls than `max_width` are prefill: they
        are split as the model likes, and `num_rows` must be 1.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class PrefixReusingSession(Protocol):
    """A session that can begin with what an earlier one has left; optional beside `TokenSession`."""

    def reuse_prefix(self, token_ids: Sequence[int]) -> int:
        """Take over a cache of the first tokens of a prompt, if there is one; how many need not be read any more.

        Called once, while the session is empty.
        """
        ...


@runtime_checkable
class RequestLimitedModel(Protocol):
    """A token model that has room for so many requests at once; optional beside `TokenModel`."""

    def admit_request(self) -> AbstractAsyncContextManager[None]:
        """Wait for a place, first come, first served, and keep it while the context is open."""
        ...


class DeviceRoundResult(NamedTuple):
    """What came of a round on a device; `next_token_id` is the target's own after the accepted ones."""

    drafted_ids: tuple[int, ...]
    num_accepted: int
    next_token_id: int
    draft_s: float
    verify_s: float


class DeviceRoundRunner(Protocol):
    """One request's rounds where the target lives, sampling and acceptance (`coupled`) included.

    Used by one thread at a time; whoever opened it closes it. Every call raises what the target raises.
    """

    @property
    def has_device_draft(self) -> bool:
        """Whether a draft lives there, too."""
        ...

    @property
    def open_draft_s(self) -> float:
        """Seconds of opening these rounds that the draft took, by this process's clock; 0 without one."""
        ...

    def draft_and_verify(self, lookahead: int, room: int) -> DeviceRoundResult:
        """Draft and verify `lookahead` tokens.

        At most `room` tokens may be drafted before the answer ends, so that the next round may begin before this one
        is read; when it has, the next call must be this one, too, and gives that round.
        """
        ...

    def verify(self, drafted_ids: Sequence[int]) -> DeviceRoundResult:
        """Verify tokens drafted elsewhere."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DeviceRoundModel(Protocol):
    """A token model that can do whole rounds where it lives; optional beside `TokenModel`."""

    def open_rounds(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
        draft: TokenModel | None,
        cancelled: Callable[[], bool],
    ) -> DeviceRoundRunner | None:
        """Rounds by coupled acceptance behind a prompt, which is read now, with or without a draft that lives there.

        A draft that fails is left out. None where the model has no use for them here, or once `cancelled` says so.
        """
        ...


# ----------------------------------------------------------------------------------- drafting by token


class DraftToken(NamedTuple):
    """One drafted token.

    `confidence` in 0..1 is how sure the draft is of it (None: it cannot say); it only steers the lookahead. `probs` is
    the distribution that the token was drawn from ([vocab_size], sums to 1), None where it was not drawn but given:
    all mass on the token. Rejection sampling keeps the target's distribution as far as that is true.
    """

    token_id: int
    confidence: float | None = None
    probs: FloatArray | None = None


class TokenSampler(Protocol):
    """How a drafting model picks its token; the request's own sampling, so that draft and target agree often."""

    def __call__(self, logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:
        """Pick the token after `context_ids` from its logits ([vocab_size])."""
        ...


class TokenDraft(Protocol):
    """Drafting for one request; used by one thread at a time."""

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        """Yield guesses for the tokens that follow prompt and confirmed answer, one by one, for as long as asked.

        `context_ids` is read-only and grows with the answer: until `close` a draft may read there what became of its
        guesses, and in `close` what the answer was. A token that was drawn must be yielded, whatever was drawn: to keep
        it back because it is unlikely changes the distribution of the answer.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class TokenDrafter(Protocol):
    """A draft that can propose token ids of a target's own vocabulary; optional beside `DraftProvider`."""

    def token_draft_refusal(self, target: TokenModel) -> str | None:
        """Why it cannot draft for this target; None: it can."""
        ...

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        """Begin drafting for one request (a model reads the prompt now); whoever opened it closes it."""
        ...


# ------------------------------------------------------------------------------------------- helpers


class ChatResponseBuilder:
    """Puts the events of one answer together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCall] = {}

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def add(self, event: StreamEvent) -> ChatResponse | None:
        """Take the next event in; gives the response with the last."""
        match event:
            case TextDelta():
                self._texts.append(event.text)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallDelta():
                self._calls[event.index] = append_tool_call_delta(self._calls.get(event.index), event)
            case Finish():
                calls = tuple(call for _, call in sorted(self._calls.items()))
                return ChatResponse(
                    message=ChatMessage("assistant", self.text or None, tool_calls=calls),
                    finish_reason=event.finish_reason,
                    usage=event.usage,
                    reasoning="".join(self._reasoning),
                    stopped_by=event.stopped_by,
                )
            case _:
                pass
        return None


async def complete_from_stream(provider: LlmProvider, request: ChatRequest) -> ChatResponse:
    """`complete` for a provider whose native form is `stream`."""
    builder = ChatResponseBuilder()
    async with provider.stream(request) as events:
        async for event in events:
            response = builder.add(event)
            if response is not None:
                return response
    raise TargetError(f"{provider.name} ended its stream without a finish reason", partial_text=builder.text)


def open_for_request(draft: DraftProvider) -> DraftProvider:
    """The draft for one request: one that remembers its calls where there is such, else the draft itself."""
    return draft.for_request() if isinstance(draft, PerRequestDraft) else draft


def open_for_client(draft: DraftProvider) -> DraftProvider:
    """The draft with a memory of its own where it has one, else the draft itself."""
    return draft.for_client() if isinstance(draft, PerClientDraft) else draft


def append_tool_call_delta(call: ToolCall | None, delta: ToolCallDelta) -> ToolCall:
    """A tool call with one more piece of it."""
    if call is None:
        return ToolCall(delta.id or "", delta.name or "", delta.arguments)
    return ToolCall(call.id or delta.id or "", call.name or delta.name or "", call.arguments + delta.arguments)


def prefill_prompt(
    session: TokenSession, token_ids: Sequence[int], cancelled: Callable[[], bool] | None = None
) -> None:
    """Let an empty session read a prompt, piece by piece, until it is read or `cancelled` says so."""
    adopted = session.reuse_prefix(token_ids) if isinstance(session, PrefixReusingSession) else 0
    for start in range(adopted, len(token_ids), _PREFILL_CHUNK_TOKENS):
        if cancelled is not None and cancelled():
            return
        session.forward(token_ids[start : start + _PREFILL_CHUNK_TOKENS], num_rows=1)
