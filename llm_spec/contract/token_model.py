"""The contract of models in this process: tokenizers, token models and their sessions, drafting by token ids.

`llm_spec.testing.check_token_model_conformance` checks a model against what the docstrings promise.
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
    """Text to token ids and back. Equal `fingerprint`: the same ids mean the same text."""

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


@runtime_checkable
class VocabularyTokenizer(Tokenizer, Protocol):
    """A tokenizer that can list its tokens; takes the place of `GrammarTokenizer` where there is no tokenizer.json."""

    def list_tokens(self) -> Sequence[bytes]:
        """UTF-8 of each id's token within a text; of a control token its name."""
        ...

    def list_control_token_ids(self) -> Sequence[int]:
        """The ids that `decode` leaves out."""
        ...


@runtime_checkable
class MessageFormatTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows how its model writes reasoning and tool calls; needed for tools, else optional.

    `encode_chat` then puts `tools`, calls and their results into the prompt.
    """

    @property
    def message_format(self) -> MessageFormat | None:
        """How calls are written; None: its model is shown no tools."""
        ...

    @property
    def reasoning(self) -> ReasoningMarks | None:
        """What reasoning stands between; None: its model writes none."""
        ...

    @property
    def mark_tokens(self) -> Mapping[int, str]:
        """Control tokens, which `decode` leaves out, that belong to these marks; with their texts."""
        ...


@runtime_checkable
class BoundedTokenizer(Protocol):
    """A tokenizer that knows its longest token; optional beside `Tokenizer`.

    A prompt that cannot fit into a model is then refused before it is encoded, which may take seconds.
    """

    @property
    def max_token_chars(self) -> int:
        """Characters of the longest token."""
        ...


@runtime_checkable
class TokenBytesTokenizer(Protocol):
    """A tokenizer that knows what its tokens are made of; optional beside `Tokenizer`.

    Log-probabilities name tokens by it; without it, by the text that an id decodes to alone.
    """

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of a token within a text, which may be a part of a character; of a control token its name.

        Empty for an id that is not a token.
        """
        ...


class TokenModel(Protocol):
    """A decoder-only model in this process. Loaded once, shared by requests; each opens a session of its own.

    `same_text`: checked on this machine, the logits of a position do not depend on how many tokens a `forward` of at
    most `max_width` was given with it, nor on their values. Then one seed gives one text, with and without speculation.
    It may become False, never True: a model may look at long contexts when the first answer gets there.
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
    """One key-value cache, used by one thread at a time. The code that opened it closes it."""

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
class PassSharingSession(Protocol):
    """A session whose passes may be joined with those of others; optional beside `TokenSession`."""

    @property
    def forward_cost_s(self) -> float | None:
        """Seconds of the last `forward`: its part of passes, without waiting. None: those that it took.

        The lookahead weighs drafts by it. By the clock, a longer proposal costs nothing where others' are as long.
        """
        ...


@runtime_checkable
class RequestAdmittingModel(Protocol):
    """A token model that has room for so many requests at once; optional beside `TokenModel`."""

    def admit_request(self) -> AbstractAsyncContextManager[None]:
        """Wait for a place, first come, first served, and keep it while the context is open."""
        ...


class PassCosts(NamedTuple):
    """What a pass of several tokens takes longer than one of a single token, in times of that.

    `wide` however many they are, `per_token` for each token after the first: a pass of w takes
    `1 + wide + per_token * (w - 1)`. `wide` may be below 0, where the first of several tokens costs little.
    `deviations`: how far passes of 2, 3, … tokens are above that line, or below it (where kernels read several rows at
    once, or passes are padded, costs go up in steps); empty: not at all.
    """

    wide: float
    per_token: float
    deviations: tuple[float, ...] = ()


@runtime_checkable
class PassTimingModel(Protocol):
    """A token model that has timed its passes, when it was loaded; optional beside `TokenModel`."""

    @property
    def pass_costs(self) -> PassCosts | None:
        """What lookahead begins with, before a decoder has measured it in answers; None: not known."""
        ...


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
class SelfPacedTokenDraft(TokenDraft, Protocol):
    """A draft that weighs by itself what a part of its drafting costs; optional beside `TokenDraft`."""

    @property
    def self_paced_s(self) -> float:
        """Seconds of the last proposal that the lookahead is not to count as the price of its tokens."""
        ...

    def end_round(self, token_ids: Sequence[int], verify_s: float) -> None:
        """A round has ended, with or without a proposal of this draft: its tokens, and the seconds of the target."""
        ...


@runtime_checkable
class TokenDrafter(Protocol):
    """A draft that can propose token ids of a target's own vocabulary; optional beside `DraftProvider`."""

    def token_draft_refusal(self, target: TokenModel) -> str | None:
        """Why it cannot draft for this target; None: it can."""
        ...

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        """Begin drafting for one request (a model reads the prompt now). The caller closes it."""
        ...


@runtime_checkable
class RequestAwareDrafter(Protocol):
    """A token drafter that reads the texts of a request, not the prompt's ids alone; optional beside `TokenDrafter`."""

    def open_token_draft_for_request(
        self, request: ChatRequest, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]
    ) -> TokenDraft:
        """As `open_token_draft`, for an answer to `request`; called in its place where the request is known."""
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
        """Rounds by coupled acceptance after a prompt, which is read now, with or without a draft on the device.

        A draft that fails is left out. None where the model has no use for them here, or once `cancelled` says so.
        """
        ...
