"""The models that come with the package: draft and target in this process."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, Final

from promises.draw import draw_case

from behaviour.fixed import WorkClock, fixed_bytes
from behaviour.plain import decoder_stats_of
from behaviour.reading import read_request, run_steadily
from llm_spec import ChatRequest, PromptLookup, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, SuffixDraft
from llm_spec.decoder.entry_points import open_provider
from llm_spec.local.lookahead import CostAware, Fixed

__all__ = ["draw_pairs", "record_pair"]

_PROMPTS: Final = ("def area(radius):", "import json\n", "for i in range(3):", "class Shape:\n    def", "x = [")
_CODE: Final = "def area(radius):\n    return 3.14 * radius ** 2\n\nfor i in range(3):\n    print(i)\n"
_FORMATS: Final = ({"type": "json_object"}, {"type": "regex", "pattern": "[a-c ]{3,9}"})
_REQUESTS: Final = 2  # of a case
_FORWARD_S: Final = {"target": 0.02, "draft": 0.003}


def draw_pairs(num_requests: int) -> list[tuple[str, int]]:
    return [("builtin", number) for number in range(-(-num_requests // _REQUESTS))]


@cache
def _loaded(role: str) -> tuple[Any, list[WorkClock]]:
    """A model, and where the clock of the case under way is."""
    provider, clocks = open_provider(f"builtin:{role}"), list[WorkClock]()
    model: Any = provider.capabilities.token_model
    open_session = model.open

    def opened(*args: Any, **options: Any) -> Any:
        return _Timed(open_session(*args, **options), clocks[-1], _FORWARD_S[role])

    model.open = opened
    return provider, clocks


class _Timed:
    """A session whose forward passes move a clock on."""

    def __init__(self, session: Any, clock: WorkClock, forward_s: float) -> None:
        self._session = session
        self._clock = clock
        self._forward_s = forward_s

    def forward(self, token_ids: Any, **options: Any) -> Any:
        self._clock.advance(self._forward_s)
        return self._session.forward(token_ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def record_pair(name: str, number: int) -> dict[str, Any]:
    """A few requests of one decoder; sampling and acceptance are those of a case of `tests/promises`."""
    rng = random.Random(f"pair {number}")  # noqa: S311 - a reproducible case, no secret
    drawn = next(case for seed in range(1000 * number, 1000 * (number + 1)) if (case := draw_case(seed)).is_local)
    clock = WorkClock()
    drafts = {role: _loaded(role) for role in ("target", "draft")}
    for _, clocks in drafts.values():
        clocks[:] = [clock]
    what = rng.choice(("none", "draft", "draft", "draft", "lookup", "suffix", "given"))
    draft = {"none": None, "draft": drafts["draft"][0], "lookup": PromptLookup(), "suffix": SuffixDraft()}
    draft["given"] = ReferenceDraft(_CODE)
    lookahead = rng.choice((None, 1, 4, 9))
    config = SpeculativeConfig(
        strategy="auto" if what == "none" else rng.choice(("auto", "tokens", "tokens")),
        lookahead=CostAware() if lookahead is None else Fixed(lookahead),
        acceptance=drawn.acceptance,
        baseline_every=drawn.baseline_every,
        max_total_tokens=drawn.max_total_tokens,
        max_iterations=drawn.max_iterations,
    )
    requests = [_request(rng, drawn) for _ in range(_REQUESTS)]

    async def play() -> dict[str, Any]:
        decoder = SpeculativeDecoder(target=drafts["target"][0], draft=draft[what], config=config)
        read = [await read_request(decoder, request) for request in requests]
        return {"drawn": f"{what} {drawn}", "requests": read, "stats": decoder_stats_of(decoder.stats)}

    with fixed_bytes(f"{name} {number}"), clock.replacing():
        return run_steadily(play)


def _request(rng: random.Random, drawn: Any) -> ChatRequest:
    ask = rng.choice(drawn.asks)
    format_ = {"response_format": rng.choice(_FORMATS)} if rng.random() < 0.15 else {}
    return ChatRequest.create(
        rng.choice(_PROMPTS),
        max_tokens=rng.choice((ask.max_tokens or 30, 12, 40)),
        stop=rng.choice(((), (), ("\n\n",), ("return", ":"))),
        temperature=ask.temperature if ask.temperature is not None else rng.choice((None, 0.0, 0.8)),
        top_k=ask.top_k,
        top_p=rng.choice((None, None, 0.9)),
        min_p=rng.choice((None, None, 0.05)),
        repetition_penalty=rng.choice((None, None, 1.1)),
        presence_penalty=rng.choice((None, None, None, 0.5)),
        seed=rng.choice((ask.seed, None, 11)),
        prefix="" if format_ else rng.choice(("", "", "    return")),
        **format_,
    )
