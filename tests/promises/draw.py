"""Cases drawn from one integer each: a pair, its configuration, and the requests that it is given."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args

from llm_spec.decoder.config import BuiltinStrategyName, StrategyName
from llm_spec.local.acceptance_name import AcceptanceName
from promises.drafts import BROKEN, DRAFTS, DraftKind
from promises.language import Language
from promises.local_drafts import LOCAL_DRAFTS, ODD_TOKENS, LocalDraftKind
from promises.target import FAILING_CALLS, ODD_TARGETS, FailingCall, Fault, Kind, OddTarget

__all__ = ["Ask", "Case", "draw_case", "simpler"]

Odd = Literal["", "presence_penalty", "frequency_penalty", "extra", "tools"]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request and how its consumer reads it.

    `start_s`: when it begins, where requests run together. `prefix`: characters of the answer that are there already.
    `whole`: by `decode`. `pause_s`: after each event. `leave_after`: so many events. `cancel_at_s`: from its start.
    """

    topic: int = 0
    quote: int = 0  # characters of the answer that stand in the prompt
    prefix: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = 0.0
    top_k: int | None = None
    seed: int | None = None
    odd: Odd = ""
    whole: bool = False
    start_s: float = 0.0
    pause_s: float = 0.0
    leave_after: int | None = None
    cancel_at_s: float | None = None
    fault: Fault | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that a case is made of; values are those of `Target`, `RandomDraft` and `SpeculativeConfig`."""

    seed: int
    strategy: StrategyName = "auto"
    asks: tuple[Ask, ...] = (Ask(),)
    together: bool = False
    # the target
    kind: Kind | Literal["local"] = "text"
    by: Literal["text", "ids"] = "text"
    longest: int = 20
    round_trip_s: float = 0.01
    first_token_s: float = 0.1
    token_s: float = 0.05
    frame: int = 1
    says_why: bool = True
    counts: bool = True
    counts_eos: bool = False
    takes_prediction: bool = False
    judgement: Literal["honest", "lenient", "none"] = "honest"
    discover_s: float | None = None
    continues: bool = True
    num_failing_trials: int = 0
    odd: OddTarget = ""
    failing: FailingCall = ""
    close_s: float = 0.0
    thinks: bool = False
    whole_answers: bool = False
    # the draft
    draft: DraftKind | LocalDraftKind = "right"
    broken: str = ""
    rate: float = 0.0
    at: int = 0
    draft_first_s: float = 0.01
    draft_piece_s: float = 0.005
    # the configuration
    acceptance: AcceptanceName = "coupled"
    lookahead: int | None = None
    baseline_every: int = 64
    max_draft_tokens: int | None = None
    max_total_tokens: int | None = None
    max_iterations: int | None = None
    max_concurrent_streams: int = 4
    max_extra_cost: float | None = None
    deadline_s: float | None = None
    draft_timeout_s: float = 0.5
    max_attempts: int = 3
    first_chunk_s: float | None = None
    between_chunks_s: float | None = None
    limit: int | None = None
    budget: int | None = None
    max_request_tokens: int | None = None
    stream_always: bool = True

    @property
    def waits_for_discovery(self) -> bool:
        """Whether the program waits until it is known what the target can do."""
        return self.seed % 2 == 1

    @property
    def is_local(self) -> bool:
        return self.kind == "local"

    def __str__(self) -> str:
        return f"Case({_differences(self)})"


def _differences(value: Any) -> str:
    """The fields that are not as usual."""
    shown: list[str] = []
    for f in fields(value):
        item = getattr(value, f.name)
        if f.name == "asks":
            shown.append(f"asks=({' '.join(f'Ask({_differences(ask)}),' for ask in item)})")
        elif f.name == "fault" and item is not None:
            shown.append(f"fault=Fault({_differences(item)})")
        elif item != f.default:
            shown.append(f"{f.name}={item!r}")
    return ", ".join(shown)


# ------------------------------------------------------------------------------------------ drawing


def draw_case(seed: int) -> Case:
    """The case of a seed: a pair, and some of what can be different about it or its requests."""
    rng = random.Random(f"case {seed}")  # noqa: S311 - reproducible cases, no secret
    case = _local_pair(rng, seed) if rng.random() < 0.12 else _remote_pair(rng, seed)
    num = rng.choice((1, 1, 1, 2, 3)) if case.strategy != "auto" else rng.choice((1, 2, 3, 4, 6))
    case = replace(
        case,
        asks=tuple(_ask(rng) for _ in range(num)),
        together=num > 1 and num <= 4 and rng.random() < 0.4,
    )
    twists = [_sampling, _stops, _caps, _faults, _draft_oddities, _consumers, _limits, _deadline, _wire, _streams]
    twists += [_target_oddities]
    for twist in rng.sample(twists, rng.choice((0, 1, 1, 2, 2, 3, 4))):
        case = twist(rng, case)
    if case.together:
        case = replace(case, asks=tuple(replace(ask, start_s=_skewed(rng, 1.0)) for ask in case.asks))
    return case


def _remote_pair(rng: random.Random, seed: int) -> Case:
    kind: Kind = rng.choice(("chat", "text", "text", "ids", "ids", "ids only", "scorer"))
    strategies: tuple[StrategyName, ...] = ("auto", "auto", "plain", "judge", "regenerate")
    takes_prediction = rng.random() < 0.3
    if kind in ("text", "ids", "scorer", "ids only"):
        strategies = (*strategies, "race", "race", "race")
    if kind in ("ids", "ids only", "scorer"):
        strategies = (*strategies, "probe", "probe", "probe")
    if kind == "scorer":
        strategies = (*strategies, "score", "score", "score", "score")
    if takes_prediction:
        strategies = (*strategies, "predict", "predict", "predict")
    strategy = rng.choice(strategies)
    if rng.random() < 0.02:
        strategy = rng.choice(get_args(BuiltinStrategyName))
    draft = rng.choice(DRAFTS) if rng.random() < 0.6 else rng.choice(("right", "right", "wrong", "given"))
    token_s = rng.choice((0.01, 0.05, 0.05, 0.2))
    return Case(
        seed=seed,
        strategy=strategy,
        kind=kind,
        by="ids" if kind in ("ids", "ids only", "scorer") and rng.random() < 0.4 else "text",
        longest=rng.choice((3, 12, 30, 60)) if strategy != "race" else rng.choice((3, 30, 90, 150)),
        max_concurrent_streams=rng.choice((4, 4, 8)),
        token_s=token_s,
        first_token_s=rng.choice((token_s, token_s, 2 * token_s, 8 * token_s)),
        round_trip_s=rng.choice((0.001, 0.01, 0.05)),
        takes_prediction=takes_prediction,
        draft=draft,
        broken=rng.choice(BROKEN) if draft == "broken" else "",
        rate=rng.choice((0.05, 0.3, 1.0)) if draft in ("wrong", "given", "from the start") else 0.0,
        at=rng.choice((0, 0, 1, 3, 7)) if draft in ("silent", "failing", "busy", "short", "broken") else 0,
        draft_first_s=rng.choice((0.0, 0.01, 0.2)),
        draft_piece_s=rng.choice((0.4, 2.0)) if draft == "trickling" else rng.choice((0.0, 0.0, 0.002, 0.05)),
    )


def _local_pair(rng: random.Random, seed: int) -> Case:
    draft = rng.choice(LOCAL_DRAFTS)
    return Case(
        seed=seed,
        strategy=rng.choice(("auto", "auto", "tokens", "tokens", "plain")) if draft != "none" else "auto",
        kind="local",
        longest=rng.choice((3, 12, 25)),
        draft=draft,
        broken=rng.choice(ODD_TOKENS) if draft == "odd" else "",
        rate=rng.choice((0.0, 0.1, 1.0)),
        at=rng.choice((0, 1, 5)) if draft == "odd" else 0,
    )


def _ask(rng: random.Random) -> Ask:
    return Ask(topic=rng.randrange(3), quote=rng.choice((0, 0, 8, 30)))


def _skewed(rng: random.Random, most: float) -> float:
    return round(most * rng.random() ** 2, 3)


# ------------------------------------------------------------------------------------------ what may differ


def _each(rng: random.Random, case: Case, change: Any) -> Case:
    """Change some of the requests."""
    share = rng.choice((0.4, 1.0))
    return replace(case, asks=tuple(change(ask) if rng.random() < share else ask for ask in case.asks))


def _sampling(rng: random.Random, case: Case) -> Case:
    acceptance = "coupled"
    if case.is_local and rng.random() < 0.4:
        acceptance = rng.choice(("rejection", "lossy_typical"))
    top_k = rng.choice((None, None, 2, 3, 5))
    seed = rng.choice((None, 7))

    def change(ask: Ask) -> Ask:
        way = rng.random()
        if way < 0.1 and not case.is_local:
            return replace(ask, odd=rng.choice(("presence_penalty", "frequency_penalty", "extra", "tools")))
        return replace(ask, temperature=rng.choice((None, 0.5, 1.0, 1.0)), top_k=top_k, seed=seed)

    return _each(rng, replace(case, acceptance=acceptance), change)


def _stops(rng: random.Random, case: Case) -> Case:
    language = Language(case.seed, by=case.by, longest=case.longest)

    def change(ask: Ask) -> Ask:
        answer = language.answer(f"topic{ask.topic}")
        stops: list[str] = []
        for _ in range(rng.choice((1, 1, 2))):
            start = rng.randrange(len(answer))
            stops.append(answer[start : start + rng.choice((1, 2, 3, 7))])
        if rng.random() < 0.3:
            stops.append(rng.choice(("never", "ab c", "\n\n\n")))
        return replace(ask, stop=tuple(stops))

    return _each(rng, case, change)


def _caps(rng: random.Random, case: Case) -> Case:
    changes: dict[str, Any] = {}
    for name, values in (
        ("max_total_tokens", (1, 2, 5, 17)),
        ("max_iterations", (1, 2, 5)),
        ("max_draft_tokens", (0, 1, 4, 20)),
        ("max_request_tokens", (1, 20, 40)),
        ("budget", (1, 30, 60, 1000)),
        ("max_extra_cost", (0.0, 0.5)),
    ):
        if rng.random() < 0.25:
            changes[name] = rng.choice(values)
    changed = replace(case, **changes)
    return _each(rng, changed, lambda ask: replace(ask, max_tokens=rng.choice((None, 1, 2, 3, 6, 15, 60))))


def _faults(rng: random.Random, case: Case) -> Case:
    if case.is_local:
        return case
    silent = rng.random() < 0.2
    case = replace(case, max_attempts=rng.choice((1, 3, 3, 3)))
    if silent or rng.random() < 0.2:
        case = replace(case, first_chunk_s=3.0, between_chunks_s=1.0)

    def change(ask: Ask) -> Ask:
        how = "silence" if silent else rng.choice(("break", "break", "status 500", "status 429", "error", "refuse"))
        if not silent and rng.random() < 0.1:
            how = rng.choice(("cut", "lost", "bug", "unsupported"))
        scope = rng.choice(("any", "any", "root", "continued", "ids", "verdict"))
        if how in ("lost", "unsupported"):
            scope = "ids"
        at = rng.choice((0, 0, 1, 2, 5, 9))
        fault = Fault(
            how=how,  # type: ignore[arg-type]
            scope=scope,  # type: ignore[arg-type]
            first=rng.choice((0, 0, 0, 1, 2)),
            count=rng.choice((1, 1, 2, 100)),
            at=0 if how in ("refuse", "lost", "unsupported") else at,  # which servers do before they answer
        )
        return replace(ask, fault=fault)

    return _each(rng, case, change)


def _draft_oddities(rng: random.Random, case: Case) -> Case:
    return replace(
        case,
        draft_timeout_s=rng.choice((0.05, 0.5, 5.0)),
        lookahead=rng.choice((None, 1, 4, 9)),
        baseline_every=rng.choice((0, 1, 3, 64)),
    )


def _consumers(rng: random.Random, case: Case) -> Case:
    def change(ask: Ask) -> Ask:
        match rng.choice(("slow", "leaves", "is cancelled", "whole", "whole and cancelled")):
            case "slow":
                return replace(ask, pause_s=rng.choice((0.01, 0.3)))
            case "leaves":
                return replace(ask, leave_after=rng.choice((0, 1, 2, 3, 5, 9)))
            case "is cancelled":
                return replace(ask, cancel_at_s=_skewed(rng, 2.0))
            case "whole":
                return replace(ask, whole=True)
            case _:
                return replace(ask, whole=True, cancel_at_s=_skewed(rng, 2.0))

    return _each(rng, case, change)


def _limits(rng: random.Random, case: Case) -> Case:
    return replace(case, limit=rng.choice((1, 1, 2, 3)), together=len(case.asks) > 1 and rng.random() < 0.7)


def _deadline(rng: random.Random, case: Case) -> Case:
    return replace(case, deadline_s=rng.choice((0.05, 0.2, 0.5, 1.0, 3.0)))


def _wire(rng: random.Random, case: Case) -> Case:
    case = replace(
        case,
        says_why=rng.random() < 0.5,
        counts=rng.random() < 0.7,
        counts_eos=rng.random() < 0.5,
        judgement=rng.choice(("honest", "lenient", "none")),
        stream_always=rng.random() < 0.7,
        discover_s=rng.choice((None, 0.1)) if not case.is_local else None,
        frame=rng.choice((1, 1, 2, 5)),
    )
    if rng.random() < 0.4 and case.kind in ("text", "ids", "scorer") and case.continues:
        case = _each(rng, case, lambda ask: replace(ask, prefix=rng.choice((0, 3, 10))))
    return case


def _target_oddities(rng: random.Random, case: Case) -> Case:
    if case.is_local:
        return case
    case = replace(
        case,
        close_s=rng.choice((0.0, 0.05)),
        thinks=rng.random() < 0.3,
        whole_answers=rng.random() < 0.3,
        discover_s=rng.choice((None, 0.1)),
        num_failing_trials=rng.choice((0, 0, 1)),
    )
    match rng.choice(("", "begins anew", "odd", "failing")):
        case "begins anew":
            return replace(case, continues=False, asks=tuple(replace(ask, prefix=0) for ask in case.asks))
        case "odd":
            return replace(case, odd=rng.choice(ODD_TARGETS))
        case "failing":
            return replace(case, failing=rng.choice(FAILING_CALLS))
        case _:
            return case


def _streams(rng: random.Random, case: Case) -> Case:
    return replace(case, max_concurrent_streams=rng.choice((1, 2, 3, 8)))


# ------------------------------------------------------------------------------------------ simpler cases


_SMALLEST: Final = Case(seed=0)
_PLAIN_ASK: Final = Ask()


def simpler(case: Case) -> list[Case]:
    """Cases that differ from a case in one thing, which is as usual there."""
    found: list[Case] = []
    if len(case.asks) > 1:
        found += [replace(case, asks=case.asks[:i] + case.asks[i + 1 :]) for i in range(len(case.asks))]
    for f in fields(Case):
        usual = getattr(_SMALLEST, f.name)
        if f.name not in ("seed", "asks", "strategy", "kind", "draft", "broken") and getattr(case, f.name) != usual:
            found.append(replace(case, **{f.name: usual}))
    if not case.is_local and case.draft not in ("right", "none"):
        found.append(replace(case, draft="right", broken=""))
    for index, ask in enumerate(case.asks):
        for f in fields(Ask):
            usual = getattr(_PLAIN_ASK, f.name)
            if getattr(ask, f.name) != usual:
                asks = (*case.asks[:index], replace(ask, **{f.name: usual}), *case.asks[index + 1 :])
                found.append(replace(case, asks=asks))
        if len(ask.stop) > 1:
            found += [
                replace(case, asks=(*case.asks[:index], replace(ask, stop=(stop,)), *case.asks[index + 1 :]))
                for stop in ask.stop
            ]
    return found
