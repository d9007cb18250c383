"""What OpenAI's models take, as far as their names say. Pure."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["supports_predictions", "takes_max_tokens_field"]

# "Predicted Outputs" in OpenAI's guide: these models, and no others of their families (audio, search, realtime).
_PREDICTING: Final = re.compile(r"(gpt-4o(-mini)?|gpt-4\.1(-mini|-nano)?)(-\d{4}-\d\d-\d\d)?")
_NOT_REASONING: Final = re.compile(r"(.*/)?gpt-4(o|\.1)")  # a gateway's names: vendor/model
_REASONING: Final = re.compile(r"(.*/)?(o\d|gpt-[5-9])")


def supports_predictions(model: str) -> bool:
    """Whether a model takes predicted outputs: gpt-4o, -4o-mini, gpt-4.1, -4.1-mini, -4.1-nano, and dated variants."""
    return _PREDICTING.fullmatch(model) is not None


def takes_max_tokens_field(model: str, *, is_openai: bool) -> bool:
    """Whether an answer is capped by `max_tokens`; otherwise by `max_completion_tokens`, which counts reasoning too.

    OpenAI's reasoning models refuse the one, a prediction the other; servers that are not OpenAI's (`is_openai` False)
    all know `max_tokens`, and some ignore what they do not know.
    """
    return _NOT_REASONING.match(model) is not None or (not is_openai and _REASONING.match(model) is None)
