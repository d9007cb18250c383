"""What a model in this process promises of its texts and logits, checked on a CPU whose kernels keep to it or do not.

A row's logits may depend, in the last bits, on how many rows are read at once: each CPU has kernels of its own. A model
finds out when it is loaded, and `same_text` says what it found. Where that is False nothing is left to compare but the
label, and logits up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from llm_spec import SpeculativeResult
from llm_spec.contract.token_model import Tokenizer

__all__ = ["check_greedy_ids", "check_greedy_text", "check_one_text", "check_rows", "check_texts"]

ROUNDING = 2e-3  # of logits, between kernels; in units of their spread


class SaysSameText(Protocol):
    """A model, or what tells the same of one."""

    @property
    def same_text(self) -> bool: ...


def check_one_text(result: SpeculativeResult, plain: SpeculativeResult, model: SaysSameText) -> None:
    """A speculative answer is labelled as its model promises; where that is one text, it is the plain answer's."""
    assert (result.same_text, result.guarantee, result.fallbacks) == (model.same_text, "exact", ())
    if model.same_text:
        assert (result.content, result.stopped_by) == (plain.content, plain.stopped_by)


def check_texts(found: Sequence[Any], expected: Sequence[Any], model: SaysSameText) -> None:
    """Answers whose passes had other widths or other company are the same where the model promises it."""
    assert len(found) == len(expected)
    if model.same_text:
        assert list(found) == list(expected)


def check_rows(found: np.ndarray, expected: np.ndarray, model: SaysSameText) -> None:
    """Logits read in other widths have the same bits where the model promises it, else the values up to rounding."""
    if model.same_text:
        assert np.array_equal(found, expected)
    assert np.abs(found - expected).max() <= ROUNDING * expected.std()


def check_greedy_ids(module: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
    """Each token is the likeliest by the logits of a transformers module, or as likely up to rounding."""
    import torch

    with torch.inference_mode():
        logits = module(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    assert float((logits.amax(-1) - chosen).max()) <= ROUNDING * float(logits.std())


def check_greedy_text(
    text: str, token_ids: Sequence[int], tokenizer: Tokenizer, logits_after: Callable[[Sequence[int]], np.ndarray]
) -> None:
    """A text is that of greedy tokens, or leaves it where two are as likely up to rounding.

    `logits_after` gives the logits after the first so many of `token_ids`: [vocab_size].
    """
    if text == tokenizer.decode(token_ids):
        return
    same = max(n for n in range(len(token_ids)) if text.startswith(tokenizer.decode(token_ids[:n])))
    logits = logits_after(token_ids[:same])
    second, best = np.sort(logits)[-2:]
    assert best - second <= ROUNDING * logits.std(), (text, tokenizer.decode(token_ids))
