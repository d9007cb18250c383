"""SpeculativeConfig: a decoder's settings. Frozen, keyword-only, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.short_repr import format_short_repr
from llm_spec.decoder.budget import Budget
from llm_spec.decoder.pricing import Price
from llm_spec.decoder.session import check_session_header_name
from llm_spec.strategies.limits import Limits
from llm_spec.strategies.registry import AUTO, find_strategy

if TYPE_CHECKING:
    from llm_spec.decoder.concurrency_limit import ConcurrencyLimit

__all__ = [
    "BreakerPolicy",
    "BuiltinStrategyName",
    "RetryPolicy",
    "SpeculativeConfig",
    "StrategyName",
    "Timeouts",
]

BuiltinStrategyName: TypeAlias = Literal[
    "auto", "plain", "tokens", "probe", "score", "race", "predict", "judge", "regenerate"
]  # for editors; `strategies/registry.py` lists all
StrategyName: TypeAlias = BuiltinStrategyName | str


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Retries of a request whose target failed for a temporary reason; nothing else retries.

    max_attempts: requests made for one answer, including the first; 1: never again.
    first_wait_s, max_wait_s: the longest wait before the second attempt; it doubles before each
        further attempt, up to the maximum. The real wait is drawn between 0 and that. A wait that
        the server asks for takes precedence.
    max_retry_after_s: a server that asks for a longer wait is not waited for.
    """

    max_attempts: int = 3
    first_wait_s: float = 0.5
    max_wait_s: float = 8.0
    max_retry_after_s: float = 60.0

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        check_number(ConfigError, "max_attempts", self.max_attempts, 1, integer=True)
        check_number(ConfigError, "first_wait_s", self.first_wait_s, 0.0)
        check_number(ConfigError, "max_wait_s", self.max_wait_s, self.first_wait_s)
        check_number(ConfigError, "max_retry_after_s", self.max_retry_after_s, 0.0)


@dataclass(frozen=True, kw_only=True)
class BreakerPolicy:
    """Stops calls to a server that keeps failing: its circuit opens.

    max_failures: requests in a row that failed because of the server; 0: the circuit never opens.
        If they all belong to one client (`SpeculativeDecoder.copy_for_new_client`), it opens to
        that client alone.
    open_s: seconds until one request is let through again, as a trial.
    """

    max_failures: int = 5
    open_s: float = 30.0

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        check_number(ConfigError, "max_failures", self.max_failures, 0, integer=True)
        check_number(ConfigError, "open_s", self.open_s, 0.0, above=True)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Limits on a target's silence, in seconds; None: as its provider says (`Capabilities`).

    first_chunk_s: from the request to the first piece of its answer; keep-alive comments do not
        count. None: 600 for a server, 900 for a vendor, whose models may reason in silence, and no
        limit in this process.
    between_chunks_s: between two pieces. The provider limits the connection time,
        `SpeculativeConfig.deadline_s` the whole answer.
    """

    first_chunk_s: float | None = None
    between_chunks_s: float | None = None

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        check_number(ConfigError, "first_chunk_s", self.first_chunk_s, 0.0, above=True)
        check_number(ConfigError, "between_chunks_s", self.between_chunks_s, 0.0, above=True)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Limits):
    """A decoder's settings.

    strategy: how the target verifies, by the name of a registered strategy; `auto` takes the
        strongest exact one that pair and request allow, else plain.
    lookahead: how many tokens a draft proposes per round (`CostAware`, `Threshold`, `Ewma`,
        `Fixed`).
    acceptance: `coupled` (one seed, one text), `rejection` (the same distribution, but the text
        depends on the draft), or `lossy_typical`, which may change the answer and says so in the
        result.
    baseline_every: after this many requests one is answered without speculation, to measure the
        target's own speed; `speedup` and `auto` compare with it. The interval grows with the
        speedup, so that measuring stays cheap; the first measurement comes early. For a local
        model, this counts rounds instead of requests. 0: never, and with a strategy chosen by name
        `speedup` stays None.
    max_draft_tokens: tokens that may be drafted for one request (in pieces of text if a draft gives
        no token ids); when they are spent, the target continues alone.
    max_total_tokens: tokens of one answer, in addition to the request's own `max_tokens`. Text
        whose tokens are not known is counted in pieces of about a word.
    max_iterations: rounds of one answer, including plain steps; the answer ends after the last.
        Text that a server writes alone is one step, and never ends it; `regenerate` has the whole
        answer, and compares this many rounds of it.
    max_concurrent_streams: requests to the target that may be open at once for one answer (`race`,
        `probe`). A request is open until it has been closed.
    max_extra_cost: tokens that may be read and thrown away for each token that the target alone
        would read or write (`race`); None: no bound.
    deadline_s: seconds after which a request ends with the text verified so far.
    draft_timeout_s: seconds that a target waits for a draft (`judge`, `predict`, `regenerate`), and
        that a draft may be silent elsewhere, before the target continues alone.
    judge: how far approval goes, with that strategy.
    retry: when a request is sent again.
    timeouts: how long a target may be silent.
    breaker: when calls to a target or draft that keeps failing stop. That of a pair's first decoder
        holds for `with_config`.
    limit: places shared by all decoders that are given the same one; None: no bound.
    prices: of models, by provider name (`openai:gpt-4.1`) or model; they come before the built-in
        list.
    budget: tokens and money shared by all decoders that are given the same one.
    max_request_tokens, max_request_cost: the same for each request alone; its input counts.
    session_header: a header such as `x-session-id`, in which calls to servers carry one id per
        conversation. With it a balancer can keep them on one replica and its prefix cache. The id
        is the request's `ChatRequest.session_id`, else it is derived from the conversation's
        beginning with a random key, and reveals nothing of it. None: no such header.
    stream_always: stream from the target even if the caller waits for the whole answer (`decode`).
        False: not if the target can answer at once (`Capabilities.whole_answers`) and nothing needs
        pieces, so without a draft, a deadline, timeouts and budgets. An answer that breaks off then
        starts over, and all of the text comes at once.
    seed: for requests that sample and have none; None draws a new one each time (the result
        contains it).
    log_content: put message text into log events (off: only counts and times).
    """

    strategy: StrategyName = "auto"
    max_total_tokens: int | None = None
    deadline_s: float | None = None
    retry: RetryPolicy = RetryPolicy()
    timeouts: Timeouts = Timeouts()
    breaker: BreakerPolicy = BreakerPolicy()
    limit: ConcurrencyLimit | None = None
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    budget: Budget | None = None
    max_request_tokens: int | None = None
    max_request_cost: float | None = None
    session_header: str | None = None
    stream_always: bool = True
    seed: int | None = None
    log_content: bool = False

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy != AUTO:
            find_strategy(self.strategy)
        check_number(ConfigError, "max_total_tokens", self.max_total_tokens, 1, integer=True)
        check_number(ConfigError, "deadline_s", self.deadline_s, 0.0, above=True)
        check_number(ConfigError, "max_request_tokens", self.max_request_tokens, 1, integer=True)
        check_number(ConfigError, "max_request_cost", self.max_request_cost, 0.0)
        check_session_header_name(self.session_header)
        check_number(ConfigError, "seed", self.seed, 0, 2**64 - 1, integer=True)
