"""Facts about OpenAI's models that their names tell. Pure."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["supports_predictions", "takes_max_tokens_field"]

# "Predicted Outputs" in OpenAI's guide lists these models, and no others of their families (audio,
# search, realtime).
_PREDICTING: Final = re.compile(r"(gpt-4o(-mini)?|gpt-4\.1(-mini|-nano)?)(-\d{4}-\d\d-\d\d)?")
_NOT_REASONING: Final = re.compile(r"(.*/)?gpt-4(o|\.1)")  # a gateway's names: vendor/model
_REASONING: Final = re.compile(r"(.*/)?(o\d|gpt-[5-9])")


def supports_predictions(model: str) -> bool:
    """Return True if a model takes predicted outputs.

    These are gpt-4o, gpt-4o-mini, gpt-4.1, gpt-4.1-mini, gpt-4.1-nano, and their dated variants.
    """
    return _PREDICTING.fullmatch(model) is not None


def takes_max_tokens_field(model: str, *, is_openai: bool) -> bool:
    """Return True if `max_tokens` limits an answer, and False if `max_completion_tokens` does.

    The latter counts reasoning, too. OpenAI's reasoning models refuse `max_tokens`, and requests
    with a prediction refuse `max_completion_tokens`. Servers that are not OpenAI's (`is_openai`
    False) all know `max_tokens`, and some ignore unknown fields.
    """
    return _NOT_REASONING.match(model) is not None or (not is_openai and _REASONING.match(model) is None)
