"""Facts about Claude models that their names tell."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["can_model_continue_prefix", "can_model_take_effort", "get_default_max_tokens"]

# claude-3-5-sonnet-20241022, claude-sonnet-4-5, claude-opus-4-1@20250805, claude-2.1,
# anthropic.claude-opus-4-6-v1:0
_NAME: Final = re.compile(r"(?:^|[./])claude-(?:[a-z]+-)?(?P<major>\d{1,2})(?:[-.](?P<minor>\d{1,2}))?(?!\d)")
# Every later model answers 400 to a trailing assistant message
_LAST_PREFILL_VERSION: Final = (4, 5)


def can_model_continue_prefix(model: str) -> bool:
    """Return True if the model continues a trailing assistant message.

    Return False for a name without a known version.
    """
    version = _parse_model_version(model)
    return version is not None and version <= _LAST_PREFILL_VERSION


def can_model_take_effort(model: str) -> bool:
    """Return True if the model takes an effort, and False for a name without a known version."""
    version = _parse_model_version(model)
    return version is not None and (version >= (4, 6) or (version == (4, 5) and "opus" in model))


def get_default_max_tokens(model: str) -> int:
    """Return the limit for a request without one, as the API requires a limit.

    It is the most that every model of the generation may write.
    """
    version = _parse_model_version(model)
    return 4_096 if version is None or version < (4, 0) else 32_000


def _parse_model_version(model: str) -> tuple[int, int] | None:
    match = _NAME.search(model)
    return None if match is None else (int(match["major"]), int(match["minor"] or 0))
