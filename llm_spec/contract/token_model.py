"""The contract of models in this process: tokenizers, token models, sessions, token drafts.

`llm_spec.testing.check_token_model_conformance` checks that a model keeps the promises of the
docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from llm_spec.contract.formats import MessageFormat, ReasoningMarks
from llm_spec.contract.request import ChatRequest, Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.floating[Any]]

__all__ = [
    "BoundedTokenizer",
    "DeviceRoundModel",
    "DeviceRoundResult",
    "DeviceRoundRunner",
    "DraftToken",
    "GrammarTokenizer",
    "MessageFormatTokenizer",
    "PassCosts",
    "PassSharingSession",
    "PassTimingModel",
    "PrefixReusingSession",
    "RequestAdmittingModel",
    "RequestAwareDrafter",
    "SelfPacedTokenDraft",
    "TokenBytesTokenizer",
    "TokenDraft",
    "TokenDrafter",
    "TokenModel",
    "TokenSampler",
    "TokenSession",
    "Tokenizer",
    "VocabularyTokenizer",
]


class Tokenizer(Protocol):
    """Text to token ids and back.

    Equal `fingerprint`: the same ids mean the same text.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]:
        """Return ids of a part of the answer.

        Nothing is added, and control tokens in the text are ordinary text.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without control tokens; undecodable bytes become U+FFFD."""
        ...

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """Return the ids of the prompt, with the chat template applied.

        They end where the answer begins, or after `request.prefix`.
        """
        ...


@runtime_checkable
class GrammarTokenizer(Tokenizer, Protocol):
    """A tokenizer that can describe its ids to a grammar.

    Needed for `ChatRequest.response_format`, otherwise optional.
    """

    def to_tokenizer_json(self) -> str:
        """Return the vocabulary and its decoding, as the text of a Hugging Face tokenizer.json."""
        ...


@runtime_checkable
class VocabularyTokenizer(Tokenizer, Protocol):
    """A tokenizer that can list its tokens.

    It replaces `GrammarTokenizer` if there is no tokenizer.json.
    """

    def list_tokens(self) -> Sequence[bytes]:
        """Return the UTF-8 of each id's token within a text; for a control token, its name."""
        ...

    def list_control_token_ids(self) -> Sequence[int]:
        """Return the ids that `decode` leaves out."""
        ...


@runtime_checkable
class MessageFormatTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows its model's format of reasoning and tool calls.

    Needed for tools, otherwise optional. Its `encode_chat` puts `tools`, calls and their results
    into the prompt.
    """

    @property
    def message_format(self) -> MessageFormat | None:
        """The format of calls, or None if the model is shown no tools."""
        ...

    @property
    def reasoning(self) -> ReasoningMarks | None:
        """The marks around reasoning, or None if the model writes none."""
        ...

    @property
    def mark_tokens(self) -> Mapping[int, str]:
        """The control tokens that belong to these marks, with their texts.

        `decode` leaves them out.
        """
        ...


@runtime_checkable
class BoundedTokenizer(Protocol):
    """A tokenizer that knows its longest token; optional beside `Tokenizer`.

    A prompt that cannot fit into a model is then refused before it is encoded, which may take
    seconds.
    """

    @property
    def max_token_chars(self) -> int:
        """The number of characters of the longest token."""
        ...


@runtime_checkable
class TokenBytesTokenizer(Protocol):
    """A tokenizer that knows the bytes of its tokens; optional beside `Tokenizer`.

    Log-probabilities name tokens by these bytes. Without them, they name a token by the text that
    its id alone decodes to.
    """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 of a token within a text; for a control token, its name.

        The bytes may be a part of a character. They are empty for an id that is not a token.
        """
        ...


class TokenModel(Protocol):
    """A decoder-only model in this process.

    It is loaded once and shared by requests; each request opens its own session.

    `same_text`: True if it was checked on this machine that the logits of a position depend neither
    on the number of other tokens in a `forward` (up to `max_width`), nor on their values. Then one
    seed gives one text, with and without speculation. It may become False, but never True again: a
    model may check long contexts when the first answer gets there.
    """

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int:
        """The number of columns of the logits."""
        ...

    @property
    def context_length(self) -> int: ...

    @property
    def max_width(self) -> int:
        """The most tokens in one verifying `forward`."""
        ...

    @property
    def same_text(self) -> bool: ...

    def open(self, *, exact: bool = True) -> TokenSession:
        """Open a new, empty key-value cache.

        With `exact=False` the fastest computation is used, and rows may depend on the width.
        """
        ...


class TokenSession(Protocol):
    """One key-value cache, used by one thread at a time. The code that opened it closes it."""

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        ...

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        """Append tokens; return the logits after each of the last `num_rows` of them.

        The result is [num_rows, vocab_size], float32, valid until the next call. Calls with more
        than `max_width` tokens are prefill: the model may split them, and `num_rows` must be 1.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class PrefixReusingSession(Protocol):
    """A session that can begin with the cache of an earlier one; optional beside `TokenSession`."""

    def reuse_prefix(self, token_ids: Sequence[int]) -> int:
        """Take over a cache of the first tokens of a prompt, if there is one.

        Returns the number of tokens that need not be read again. Called once, while the session is
        empty.
        """
        ...


@runtime_checkable
class PassSharingSession(Protocol):
    """A session whose forward passes may be shared with others.

    Optional beside `TokenSession`.
    """

    @property
    def forward_cost_s(self) -> float | None:
        """Seconds of the last `forward`: its share of passes, without waiting, or None.

        None means the elapsed time. The lookahead weighs drafts by this cost. Measured by the
        clock, a longer proposal would cost nothing if other requests' proposals are as long.
        """
        ...


@runtime_checkable
class RequestAdmittingModel(Protocol):
    """A token model that limits the number of requests at once; optional beside `TokenModel`."""

    def admit_request(self) -> AbstractAsyncContextManager[None]:
        """Wait for a place, first come, first served; keep it while the context is open."""
        ...


class PassCosts(NamedTuple):
    """The extra time of a pass of several tokens, in units of a pass of one token.

    A pass of w tokens takes `1 + wide + per_token * (w - 1)`.

    `wide`: the cost of any pass of several tokens. It may be below 0, if the second token costs
    little.
    `per_token`: the cost of each token after the first.
    `deviations`: the differences of passes of 2, 3, … tokens from that line. Costs go up in steps
    if kernels read several rows at once, or passes are padded. Empty if there are none.
    """

    wide: float
    per_token: float
    deviations: tuple[float, ...] = ()


@runtime_checkable
class PassTimingModel(Protocol):
    """A token model that timed its passes when it was loaded; optional beside `TokenModel`."""

    @property
    def pass_costs(self) -> PassCosts | None:
        """The costs that lookahead begins with, before a decoder has measured answers, or None."""
        ...


class DraftToken(NamedTuple):
    """One drafted token.

    `confidence`: the draft's confidence in it, from 0 to 1, or None if it has none. It only steers
    the lookahead.
    `probs`: the distribution that the token was drawn from ([vocab_size], sums to 1). None if it
    was given, not drawn: then all probability is on the token. Rejection sampling keeps the
    target's distribution only if this is true.
    """

    token_id: int
    confidence: float | None = None
    probs: FloatArray | None = None


class TokenSampler(Protocol):
    """Picks a token of a drafting model.

    It uses the request's own sampling, so that draft and target agree often.
    """

    def __call__(self, logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:
        """Pick the token after `context_ids` from its logits ([vocab_size])."""
        ...


class TokenDraft(Protocol):
    """A draft of token ids for one request; used by one thread at a time."""

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        """Yield guesses for the tokens that follow prompt and confirmed answer, one by one.

        `context_ids` is read-only and grows with the answer. Until `close`, a draft may read there
        which of its guesses were confirmed; in `close` it may read the whole answer. Every token
        that was drawn must be yielded: leaving out an unlikely one changes the distribution of the
        answer.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class SelfPacedTokenDraft(TokenDraft, Protocol):
    """A draft that accounts for a part of its cost itself; optional beside `TokenDraft`."""

    @property
    def self_paced_s(self) -> float:
        """Seconds of the last proposal that the lookahead must not count as its tokens' cost."""
        ...

    def end_round(self, token_ids: Sequence[int], verify_s: float) -> None:
        """Report the end of a round, with or without a proposal of this draft.

        `token_ids` are the round's tokens; `verify_s` are the seconds of the target.
        """
        ...


@runtime_checkable
class TokenDrafter(Protocol):
    """A draft that can propose ids of a target's vocabulary; optional beside `DraftProvider`."""

    def token_draft_refusal(self, target: TokenModel) -> str | None:
        """Return why it cannot draft for this target, or None if it can."""
        ...

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        """Begin drafting for one request (a model reads the prompt now). The caller closes it."""
        ...


@runtime_checkable
class RequestAwareDrafter(Protocol):
    """A token drafter that reads a request's texts, not only the prompt's ids.

    Optional beside `TokenDrafter`.
    """

    def open_token_draft_for_request(
        self, request: ChatRequest, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]
    ) -> TokenDraft:
        """Begin drafting for an answer to `request`.

        It is called in place of `open_token_draft` if the request is known.
        """
        ...


class DeviceRoundResult(NamedTuple):
    """The result of a round on a device.

    `next_token_id`: the target's own token after the accepted ones.
    """

    drafted_ids: tuple[int, ...]
    num_accepted: int
    next_token_id: int
    draft_s: float
    verify_s: float


class DeviceRoundRunner(Protocol):
    """One request's rounds on the target's device, with sampling and acceptance (`coupled`).

    Used by one thread at a time; the code that opened it closes it. Every call raises the target's
    errors.
    """

    @property
    def has_device_draft(self) -> bool:
        """True if a draft runs on the device, too."""
        ...

    @property
    def open_draft_s(self) -> float:
        """Seconds that opening the draft took, by this process's clock; 0 without a draft."""
        ...

    def draft_and_verify(self, lookahead: int, room: int) -> DeviceRoundResult:
        """Draft and verify `lookahead` tokens.

        At most `room` tokens may be drafted before the answer ends. So the next round may begin
        before this one is read. If it has begun, the next call must be this one, too, and returns
        that round.
        """
        ...

    def verify(self, drafted_ids: Sequence[int]) -> DeviceRoundResult:
        """Verify tokens drafted elsewhere."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DeviceRoundModel(Protocol):
    """A token model that can run whole rounds on its device; optional beside `TokenModel`."""

    def open_rounds(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
        draft: TokenModel | None,
        cancelled: Callable[[], bool],
    ) -> DeviceRoundRunner | None:
        """Open rounds by coupled acceptance after a prompt, which is read now.

        They run with or without a draft on the device; a draft that fails is left out. Returns None
        if the model cannot use them here, or once `cancelled` returns True.
        """
        ...
