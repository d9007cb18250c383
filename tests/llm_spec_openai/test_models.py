"""What a model's name tells."""

from __future__ import annotations

import pytest
from llm_spec_openai.models import supports_predictions, takes_max_tokens_field


@pytest.mark.parametrize(
    ("model", "does"),
    [
        ("gpt-4o", True),
        ("gpt-4o-2024-11-20", True),
        ("gpt-4o-mini", True),
        ("gpt-4o-mini-2024-07-18", True),
        ("gpt-4.1", True),
        ("gpt-4.1-mini-2025-04-14", True),
        ("gpt-4.1-nano", True),
        ("gpt-4o-audio-preview", False),
        ("gpt-4o-mini-search-preview", False),
        ("gpt-4o-nano", False),
        ("gpt-4", False),
        ("gpt-4x1", False),
        ("gpt-5-mini", False),
        ("o3", False),
    ],
)
def test_predictions(model: str, does: bool) -> None:
    """The models of OpenAI's guide and their dated variants take predicted outputs, their relatives do not."""
    assert supports_predictions(model) is does


@pytest.mark.parametrize(
    ("model", "at_openai", "elsewhere"),
    [
        ("gpt-4o-mini", True, True),
        ("gpt-4.1-2025-04-14", True, True),
        ("gpt-4o-audio-preview", True, True),
        ("o4-mini", False, False),
        ("gpt-5.6-terra", False, False),
        ("openai/gpt-5", False, False),
        ("vendor/gpt-4o", True, True),
        ("gpt-oss-20b", False, True),
        ("llama-3", False, True),
    ],
)
def test_the_name_of_the_limit(model: str, at_openai: bool, elsewhere: bool) -> None:
    """Reasoning models want `max_completion_tokens`; servers that are not OpenAI's know `max_tokens`."""
    assert takes_max_tokens_field(model, is_openai=True) is at_openai
    assert takes_max_tokens_field(model, is_openai=False) is elsewhere
