"""What models' names tell."""

from __future__ import annotations

import pytest
from llm_spec_anthropic.models import can_model_continue_prefix, get_default_max_tokens


@pytest.mark.parametrize(
    ("model", "continues", "max_tokens"),
    [
        ("claude-2.1", True, 4_096),
        ("claude-instant-1.2", True, 4_096),
        ("claude-3-opus-latest", True, 4_096),
        ("claude-3-haiku-20240307", True, 4_096),
        ("claude-3-5-sonnet-20241022", True, 4_096),
        ("claude-opus-4-20250514", True, 32_000),
        ("claude-4-opus-20250514", True, 32_000),
        ("claude-opus-4-1@20250805", True, 32_000),
        ("claude-sonnet-4-5-20250929", True, 32_000),
        ("us.anthropic.claude-haiku-4-5-20251001-v1:0", True, 32_000),
        ("anthropic/claude-opus-4.5", True, 32_000),
        ("claude-opus-4-6", False, 32_000),
        ("anthropic.claude-opus-4-6-v1:0", False, 32_000),
        ("claude-sonnet-4-6-20260101", False, 32_000),
        ("claude-opus-4-10", False, 32_000),
        ("claude-sonnet-5", False, 32_000),
        ("claude-haiku-5-5", False, 32_000),
        ("claude-fable-5-2", False, 32_000),
        ("claude-mythos-preview", False, 4_096),
        ("claude-opus-latest", False, 4_096),
        ("qwen3-4b", False, 4_096),
        ("not-claude-3-5", False, 4_096),
    ],
)
def test_what_a_name_tells(model: str, continues: bool, max_tokens: int) -> None:
    """Claude up to 4.5 continues a text, none from 4.6 on; who says no version is trusted with little."""
    assert can_model_continue_prefix(model) is continues
    assert get_default_max_tokens(model) == max_tokens
