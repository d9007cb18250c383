"""SpeculativeConfig and the lookahead policies: frozen, keyword-only, and refusing by name."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from llm_spec import (
    Budget,
    ConcurrencyLimit,
    ConfigError,
    CostAware,
    Ewma,
    Fixed,
    PromptLookup,
    SpeculativeConfig,
    SuffixDraft,
    Threshold,
)
from llm_spec.local.lookahead import LookaheadPolicy
from llm_spec.testing import RandomDraft

LOOSE: Any = SpeculativeConfig  # for what a type checker would not let through


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy", "fast"),
        ("strategy", None),
        ("acceptance", "typical"),
        ("lookahead", 5),
        ("lookahead", None),
        ("max_draft_tokens", -1),
        ("max_draft_tokens", 1.5),
        ("max_total_tokens", 0),
        ("max_total_tokens", -1),
        ("max_iterations", 0),
        ("max_iterations", True),
        ("deadline_s", 0.0),
        ("deadline_s", -1.0),
        ("deadline_s", float("inf")),
        ("draft_timeout_s", 0),
        ("draft_timeout_s", "soon"),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    """The error is one line that names the field, the value and what it may be, and is a ValueError."""
    with pytest.raises(ConfigError) as caught:
        LOOSE(**{field: value})
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert field in text
    assert repr(value) in text
    assert "must be" in text
    assert "\n" not in text


@pytest.mark.parametrize("value", [0, 33, -1, 2.5, True])
@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("lookahead", Fixed),
        ("initial", lambda value: Threshold(initial=value)),
        ("initial", lambda value: Ewma(initial=value)),
        ("max_lookahead", lambda value: Threshold(max_lookahead=value)),
        ("max_lookahead", lambda value: Ewma(max_lookahead=value)),
        ("max_lookahead", lambda value: CostAware(max_lookahead=value)),
    ],
)
def test_a_lookahead_is_between_1_and_32(field: str, make: Callable[[Any], object], value: Any) -> None:
    """The seeds' limits hold everywhere, with an error that names field, value and limits."""
    with pytest.raises(ConfigError) as caught:
        make(value)
    text = str(caught.value)
    assert field in text
    assert repr(value) in text
    assert "at least 1" in text
    assert "\n" not in text


@pytest.mark.parametrize("value", [1, 32])
def test_the_limits_of_lookahead_are_allowed(value: int) -> None:
    """1 and 32 are inside."""
    assert Fixed(value).start().limit() == value
    assert CostAware(max_lookahead=value).start().limit() <= value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Threshold(min_acceptance_rate=0.9, high_acceptance_rate=0.5),
        lambda: Threshold(high_acceptance_rate=1.5),
        lambda: Threshold(initial=9, max_lookahead=8),
        lambda: Ewma(half_life=0.0),
        lambda: Ewma(cooldown=-1),
        lambda: CostAware(prior_acceptance=1.5),
        lambda: CostAware(half_life=-1.0),
        lambda: PromptLookup(min_ngram=0),
        lambda: PromptLookup(min_ngram=3, max_ngram=2),
        lambda: SuffixDraft(min_match=0),
        lambda: SuffixDraft(min_match=3, max_match=2),
        lambda: SuffixDraft(max_stored_tokens=-1),
        lambda: SuffixDraft(max_stored_tokens=2.5),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        lambda: RandomDraft(-1),
    ],
)
def test_policies_and_drafts_refuse_bad_values(make: Callable[[], object]) -> None:
    """Each policy checks its own numbers when it is made, not when it is used."""
    with pytest.raises(ConfigError, match="must be") as caught:
        make()
    assert "\n" not in str(caught.value)


def test_it_is_keyword_only_and_frozen() -> None:
    """A configuration reads as names and values, and cannot change under a running request."""
    with pytest.raises(TypeError):
        LOOSE("plain")
    config = SpeculativeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue] - the point of it


def test_defaults_are_exact_and_cost_aware() -> None:
    """Left alone, it changes no text and decides the lookahead by cost."""
    config = SpeculativeConfig()
    assert (config.strategy, config.acceptance, config.lookahead) == ("auto", "coupled", CostAware())
    assert not config.log_content


@pytest.mark.parametrize("policy", [Fixed(3), Threshold(), Ewma(), CostAware()], ids=str)
def test_every_policy_serves_as_lookahead(policy: LookaheadPolicy) -> None:
    """The policies are interchangeable."""
    assert SpeculativeConfig(lookahead=policy).lookahead is policy


def test_no_drafting_at_all_can_be_asked_for() -> None:
    """`max_draft_tokens=0` is a valid cap: the target alone."""
    assert SpeculativeConfig(max_draft_tokens=0).max_draft_tokens == 0


@pytest.mark.parametrize(("field", "shared"), [("budget", Budget(max_tokens=9)), ("limit", ConcurrencyLimit(2))])
@pytest.mark.parametrize("copy_config", [copy.copy, copy.deepcopy, dataclasses.replace, dataclasses.asdict])
def test_copies_of_a_config_share_what_decoders_share(field: str, shared: object, copy_config: Any) -> None:
    """A copy of its own would allow twice as much."""
    copied = copy_config(LOOSE(**{field: shared}))
    assert (copied[field] if isinstance(copied, dict) else getattr(copied, field)) is shared


@pytest.mark.parametrize(("field", "shared"), [("budget", Budget(max_tokens=9)), ("limit", ConcurrencyLimit(2))])
def test_what_decoders_share_is_not_pickled(field: str, shared: object) -> None:
    """Another process cannot share it; the error says which field it is, and what to do."""
    config = LOOSE(**{field: shared})
    with pytest.raises(ConfigError, match=rf"{field} is shared .* dataclasses.replace.config, {field}=None"):
        pickle.dumps(config)
    without = dataclasses.replace(config, **{field: None})
    assert pickle.loads(pickle.dumps(without)) == without  # noqa: S301 - written here
