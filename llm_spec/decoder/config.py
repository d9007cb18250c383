"""SpeculativeConfig: what a decoder may do. Frozen, keyword-only, validated."""

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
]  # for editors to offer; `strategies/registry.py` says which there are
StrategyName: TypeAlias = BuiltinStrategyName | str


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When a request is sent again because the target failed for a passing reason; nothing else retries.

    max_attempts: requests made for one answer, the first counted; 1: never again.
    first_wait_s, max_wait_s: the longest wait before the second attempt, twice that before the third, and so on up to
        the maximum; the real wait is drawn between 0 and that. A server that says how long to wait is obeyed.
    max_retry_after_s: a server that asks for longer is not waited for.
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
    """When calls to a server that keeps failing stop: its circuit opens.

    max_failures: requests in a row that failed because the server did; 0: the circuit never opens. Where they are all
        of one client (`SpeculativeDecoder.copy_for_new_client`), it opens to that client alone.
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
    """How long a target may be silent, in seconds; None: as its provider says (`Capabilities`).

    first_chunk_s: from the request to the first piece of its answer; comments that keep a connection alive are none.
    None: 600 at a server, 900 at a vendor's, whose models may reason in silence, and any time in this process.
    between_chunks_s: between two pieces. How long a connection may take is the provider's, how long a whole answer may
    is `SpeculativeConfig.deadline_s`.
    """

    first_chunk_s: float | None = None
    between_chunks_s: float | None = None

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        check_number(ConfigError, "first_chunk_s", self.first_chunk_s, 0.0, above=True)
        check_number(ConfigError, "between_chunks_s", self.between_chunks_s, 0.0, above=True)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Limits):
    """What a decoder may do.

    strategy: how the target verifies, by the name of a registered strategy; `auto` takes the strongest exact one that
        pair and request allow, else plain.
    lookahead: how many tokens a draft proposes a round (`CostAware`, `Threshold`, `Ewma`, `Fixed`).
    acceptance: `coupled` (one seed, one text), `rejection` (the same distribution, no such text), or
        `lossy_typical`, which may change the answer and says so in the result.
    baseline_every: requests after which one is answered without speculation, so that the target's own speed is known:
        `speedup` and `auto` compare with it. The interval grows with the speedup, so that measuring stays cheap;
        the first measurement comes early. For a local model, this counts rounds instead of requests. 0: never, and
        with a strategy chosen by name `speedup` stays None.
    max_draft_tokens: tokens that may be drafted for one request (in pieces of text where a draft gives no token ids);
        when they are spent the target goes on alone.
    max_total_tokens: tokens of one answer, over and above the request's own `max_tokens`. Where an answer is put
        together from text whose tokens are not known they are counted in pieces of about a word.
    max_iterations: rounds of one answer, plain steps counted; after so many the answer ends. What a server writes
        alone is one step, and never ends it; `regenerate` has the whole answer, and compares so many rounds of it.
    max_concurrent_streams: requests to the target that may be open at once for one answer (`race`, `probe`); one is
        open until it has been closed.
    max_extra_cost: tokens that may be read and thrown away beside each token that the target alone would read or write
        (`race`); None: no bound.
    deadline_s: seconds after which a request ends with the text verified so far.
    draft_timeout_s: seconds that a target waits for a draft (`judge`, `predict`, `regenerate`), and that a draft may be
        silent elsewhere, before the target goes on alone.
    judge: how far approval goes, with that strategy.
    retry: when a request is sent again. timeouts: how long it may be silent. breaker: when a
        target or draft that keeps failing is left alone (that of the first decoder of a pair holds for `with_config`).
    limit: places shared by all decoders that are given the same one; None: no bound.
    prices: of models, by provider name (`openai:gpt-4.1`) or model; they come before the built-in list.
    budget: tokens and money shared by all decoders that are given the same one.
    max_request_tokens, max_request_cost: the same for each request alone; its input counts.
    session_header: the header in which calls to targets and drafts on servers carry one id for each conversation, such
        as `x-session-id`, by which a balancer can keep them on one replica and its prefix cache. The id is that of the
        request (`ChatRequest.session_id`), else one derived from the conversation's beginning with a random key, from
        which nobody learns what was said. None: no such header.
    stream_always: ask a target for a stream also where the caller waits for the whole answer (`decode`). False: not
        where it can do otherwise (`Capabilities.whole_answers`) and nothing needs its pieces: without a draft, a
        deadline, timeouts and budgets. An answer that breaks off then starts over, and all of the text comes at once.
    seed: for requests that sample and bring none; None draws a new one each time (the result tells it).
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
