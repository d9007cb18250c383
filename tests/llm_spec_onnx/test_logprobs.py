"""Log-probabilities of the built-in pair: the same bits with every draft, and those of the text itself."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from llm_spec_onnx.model import OnnxModel
from support.logprob_checks import EVERY_REQUEST, build_logprob_request, check_logprobs

from llm_spec import (
    DraftProvider,
    Fixed,
    PromptLookup,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    open_draft,
    open_provider,
)
from llm_spec.local import verify as verifiers
from llm_spec.local.acceptance import make_acceptance_rule
from llm_spec.local.chosen_logprobs import ChosenLogprob, compute_chosen_logprobs
from llm_spec.local.loop import Generation, GenerationLimits
from llm_spec.local.sampling import Sampler
from llm_spec.testing import RandomDraft

TARGET: Final = open_provider("builtin:target")
DRAFTS: Final[dict[str, DraftProvider]] = {
    "lookup": PromptLookup(),
    "model": open_draft("builtin:draft"),
    "random": RandomDraft(3),
}
PLAIN: Final = SpeculativeDecoder(target=TARGET, draft=None)


def decoder_with(draft: str) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        target=TARGET, draft=DRAFTS[draft], config=SpeculativeConfig(strategy="tokens", lookahead=Fixed(4))
    )


@EVERY_REQUEST
async def test_the_bits_are_those_without_a_draft(
    draft: str, temperature: str, form: str, prompt: str, builtin_target: OnnxModel
) -> None:
    """Greedy and sampled, cut by stop strings and caps, held by a grammar, penalised."""
    request = build_logprob_request(temperature, form, prompt)
    result = await decoder_with(draft).decode(request)
    check_logprobs(result, await PLAIN.decode(request), builtin_target)


async def test_a_row_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch, builtin_target: OnnxModel) -> None:
    """The check itself fails where rounds read the row after each token in place of the one before it."""

    def read_later_rows(logits: Any, chosen_ids: Any, num_top: int) -> tuple[ChosenLogprob, ...]:
        return compute_chosen_logprobs(np.roll(logits, -1, axis=0), chosen_ids, num_top)

    request = build_logprob_request("0", "as it comes", "method")
    plain = await PLAIN.decode(request)
    monkeypatch.setattr(verifiers, "compute_chosen_logprobs", read_later_rows)
    result = await decoder_with("model").decode(request)
    assert result.stats.num_accepted_draft_tokens
    with pytest.raises(AssertionError):
        check_logprobs(result, plain, builtin_target)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "lossy_typical"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_is_that_of_the_finished_text(builtin_target: OnnxModel, acceptance: Any, temperature: float) -> None:
    """Read again in a new cache, in other widths, and turned into probabilities by the definition."""
    model = builtin_target
    prompt_ids = model.tokenizer.encode("def test_fd_close(self):\n")
    sampler = Sampler(
        Sampling(temperature=temperature), vocab_size=model.vocab_size, num_prompt_tokens=len(prompt_ids), seed=4
    )
    rule = make_acceptance_rule(acceptance, sampler)
    drafter: Any = DRAFTS["model"]
    generation = Generation(
        model,
        prompt_ids,
        rule,
        Fixed(4).start(),
        limits=GenerationLimits(max_tokens=40),
        open_draft=lambda: drafter.open_token_draft(model, rule.choose_draft_token, prompt_ids),
        top_logprobs=5,
    )
    with generation:
        rounds = list(generation)
    answer_ids = [token_id for one_round in rounds for token_id in one_round.token_ids]
    told = [logprob for one_round in rounds for logprob in one_round.logprobs]
    assert [logprob.token_id for logprob in told] == answer_ids
    assert generation.stats.num_accepted_draft_tokens

    session, rows = model.open(), list[Any]()
    session.forward(prompt_ids[:-1], num_rows=1)
    for start in range(len(prompt_ids) - 1, len(prompt_ids) + len(answer_ids) - 1, model.max_width):
        ids = generation.context_ids[:-1][start : start + model.max_width]
        rows += [row.astype(np.float64) for row in session.forward(ids, num_rows=len(ids))]
    session.close()
    for logprob, row in zip(told, rows, strict=True):
        expected = row - np.logaddexp.reduce(row)
        assert abs(logprob.logprob - expected[logprob.token_id]) < 1e-4
        assert logprob.top[0][0] == int(row.argmax())
        assert max(abs(value - expected[token_id]) for token_id, value in logprob.top) < 1e-4


@pytest.mark.parametrize("strategy", ["tokens", "plain"])
async def test_no_row_is_read_where_nobody_asks(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """Without `top_logprobs` nothing is computed; text and log-probabilities go together otherwise."""
    calls: list[int] = []

    def count(logits: Any, chosen_ids: Any, num_top: int) -> tuple[ChosenLogprob, ...]:
        calls.append(len(chosen_ids))
        return compute_chosen_logprobs(logits, chosen_ids, num_top)

    monkeypatch.setattr(verifiers, "compute_chosen_logprobs", count)
    decoder = SpeculativeDecoder(
        target=TARGET, draft=DRAFTS["lookup"], config=SpeculativeConfig(strategy=strategy, lookahead=Fixed(4))
    )
    without = await decoder.decode("x = [1, 2, 3", max_tokens=8)
    assert (without.logprobs, calls) == (None, [])
    asked = await decoder.decode("x = [1, 2, 3", max_tokens=8, top_logprobs=0)
    assert asked.content == without.content
    assert asked.logprobs is not None
    assert [logprob.top for logprob in asked.logprobs] == [()] * 8
    assert sum(calls) == 8
