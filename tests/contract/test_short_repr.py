"""What one prints to see what is in it is short, and shows no secrets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from llm_spec import (
    Budget,
    ChatMessage,
    ChatRequest,
    ConcurrencyLimit,
    CostAware,
    Finish,
    Fixed,
    Price,
    RetryPolicy,
    Sampling,
    SpeculativeConfig,
    SpeculativeStats,
    TextDelta,
    Timings,
    Usage,
)
from llm_spec.contract.short_repr import format_short_repr


@dataclass
class Example:
    needed: int
    text: str = "a"
    parts: list[int] = field(default_factory=list[int])
    secret: str = field(default="", repr=False)

    __repr__ = format_short_repr


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Example(1), "Example(needed=1)"),
        (Example(1, "b", [1, 2, 3, 4], "s"), "Example(needed=1, text='b', parts=[1, 2, 3, ...])"),
        (Usage(), "Usage()"),
        (Usage(input_tokens=3, output_tokens=5), "Usage(input_tokens=3, output_tokens=5)"),
        (Finish("stop", stopped_by="eos"), "Finish(finish_reason='stop', stopped_by='eos')"),
        (TextDelta("So", "accepted"), "TextDelta(text='So', origin='accepted')"),
        (SpeculativeStats(num_rounds=2, draft_s=0.123456789), "SpeculativeStats(num_rounds=2, draft_s=0.123457)"),
        (ChatMessage("user", "Hi"), "ChatMessage(role='user', content='Hi')"),
        (Sampling(seed=0), "Sampling(seed=0)"),
        (CostAware(), "CostAware()"),
        (Price(input=1.0, output=2.0), "Price(input=1, output=2)"),
        (ConcurrencyLimit(3), "ConcurrencyLimit(3)"),
        (Budget(max_tokens=9, max_cost=0.5), "<Budget(max_tokens=9, max_cost=0.5): 0 tokens, cost 0 spent>"),
        (
            Timings(total_s=1.5, first_text_s=None, draft_s=0.0, verify_s=0.25),
            "Timings(total_s=1.5, first_text_s=None, draft_s=0, verify_s=0.25)",
        ),
        (SpeculativeConfig(), "SpeculativeConfig()"),
        (
            SpeculativeConfig(strategy="race", lookahead=Fixed(2), retry=RetryPolicy(max_attempts=1)),
            "SpeculativeConfig(lookahead=Fixed(lookahead=2), strategy='race', retry=RetryPolicy(max_attempts=1))",
        ),
    ],
)
def test_only_what_differs_from_the_defaults_is_shown(value: object, shown: str) -> None:
    assert repr(value) == shown


def test_a_long_request_is_cut() -> None:
    request = ChatRequest.create([{"role": "user", "content": "long " * 1000}] * 50, tools=[{"type": "x"}] * 50)
    assert "'long long" in repr(request)
    assert len(repr(request)) < 1000


def test_what_goes_to_the_server_untouched_is_not_shown() -> None:
    """It may have a key."""
    request = ChatRequest.create("Hi", extra={"api_key": "sk-secret"})
    assert repr(request) == "ChatRequest(messages=(ChatMessage(role='user', content='Hi'),))"
