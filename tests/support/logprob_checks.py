"""Requests with log-probabilities over which drafts, sampling and endings vary, and what must hold of their answers."""

from __future__ import annotations

import math
from typing import Any, Final

from llm_spec import ChatRequest, SpeculativeResult
from support.matrix import every_combination
from support.text_checks import SaysSameText

__all__ = ["EVERY_REQUEST", "build_logprob_request", "check_logprobs"]

_FORMS: Final[dict[str, dict[str, Any]]] = {
    "as it comes": {},
    "stop": {"stop": ["self", "\n\n", "e"]},
    "cap": {"max_tokens": 5},
    "grammar": {"response_format": {"type": "regex", "pattern": r"(self\.[a-z_]{1,9}é\n ){1,6}"}},
    "penalised": {"repetition_penalty": 1.3, "logit_bias": {70: 2.0}},
}
_PROMPTS: Final = {
    "method": "def test_fd_close(self):",
    "class": "class Reader:\n    def __init__(self):\n        self.close()\n        self",
    "import": "import os\nimport sys\nfrom é",
    "list": "x = [1, 2, 3, 4, 5, 1, 2, 3, 4",
}
# 3 * 2 * 5 * 4 = 120 answers
EVERY_REQUEST: Final = every_combination(
    draft=("lookup", "model", "random"), temperature=("0", "0.7"), form=_FORMS, prompt=_PROMPTS
)


def build_logprob_request(temperature: str, form: str, prompt: str, **options: Any) -> ChatRequest:
    """The request of one combination."""
    fields: Any = {"temperature": float(temperature), "seed": 5, "max_tokens": 20, "top_logprobs": 3, **_FORMS[form]}
    return ChatRequest.create(_PROMPTS[prompt], **fields, **options)


def check_logprobs(result: SpeculativeResult, plain: SpeculativeResult, model: SaysSameText) -> None:
    """They have the same bits with and without a draft; each is one of a distribution, as many as were asked for."""
    assert result.logprobs is not None
    assert plain.logprobs is not None
    if model.same_text:
        assert result.content == plain.content
        assert result.logprobs == plain.logprobs
    for logprob in result.logprobs:
        assert len(logprob.top) == 3
        assert sum(math.exp(likely.logprob) for likely in logprob.top) <= 1 + 1e-12
        assert [likely.logprob for likely in logprob.top] == sorted((t.logprob for t in logprob.top), reverse=True)
        assert logprob.logprob <= logprob.top[0].logprob
    told = b"".join(logprob.token_bytes or b"" for logprob in result.logprobs).decode(errors="replace")
    if result.stopped_by == "stop_string":  # the last token may reach into it
        assert told.startswith(result.content)
    else:
        assert told == result.content
