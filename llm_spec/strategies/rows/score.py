"""`score`: the target says how likely it finds given tokens; its own next tokens are read off or drawn from that."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from itertools import accumulate
from typing import Final

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import SampledToken, TokenEndpoint, TokenScorer, TopTokens
from llm_spec.contract.errors import TargetError
from llm_spec.contract.events import StreamEvent
from llm_spec.contract.request import Sampling
from llm_spec.local.noise import NoisePurpose, draw_uniform_number
from llm_spec.local.seed import draw_random_seed
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, TextGuarantee, find_multi_call_refusal
from llm_spec.strategies.rows.rounds import VerifyRound, answer_in_rounds

__all__ = ["prepare_or_refuse"]

_CONTROL_TOKEN: Final = re.compile(r"[<\[]\S*[>\]]")  # the texts of tokens that may end an answer
_FORCING_LOGIT_BIAS: Final = 100.0  # a bias that no other token outweighs
_MIN_TOP_TOKENS: Final = 2  # so that a server which reports nothing but the given tokens is found out


def prepare_or_refuse(context: StrategyContext) -> ReadyStrategy | Refusal:
    """Any draft; a target that reports the likeliest tokens at every position of a prompt.

    Exact where those are all that counts: greedily, and for top-k sampling with k within what is reported.
    """
    draft, request, can = context.draft, context.request, context.target.capabilities
    endpoint, scorer = can.token_endpoint, can.token_scorer
    if draft is None:
        return Refusal("there is no draft")
    if endpoint is None or scorer is None:
        return Refusal(f"target {context.target.name} does not score given tokens")
    refusal = find_multi_call_refusal(request) or _find_sampling_refusal(request.sampling, scorer.max_top)
    if refusal is not None:
        return Refusal(refusal)
    return ReadyStrategy(
        TextGuarantee("exact", same_text=False), partial(_open_score_rounds, context, draft, endpoint, scorer)
    )


def _open_score_rounds(
    context: StrategyContext, draft: DraftProvider, endpoint: TokenEndpoint, scorer: TokenScorer
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    answer = answer_in_rounds(
        context,
        draft=draft,
        endpoint=endpoint,
        verify=_make_verify_by_scores(endpoint, scorer, context.request.sampling),
        max_calls=1,  # each reads the whole context: two at a time would cost twice
        is_read_from_scores=True,
    )
    return aclosing(answer)


def _find_sampling_refusal(sampling: Sampling, max_top: int) -> str | None:
    """Why the likeliest `max_top` tokens do not tell how to sample; None: they do."""
    if sampling.logit_bias or sampling.repetition_penalty not in (None, 1.0):
        return "the request changes the logits, which the target does not report"
    if sampling.temperature == 0:
        return None
    if sampling.temperature is None:
        return "the request leaves the temperature to the target"
    if sampling.top_k is None or sampling.top_k > max_top:
        return f"the request samples from more than the {max_top} tokens that the target reports (top_k)"
    if sampling.top_p not in (None, 1.0) or sampling.min_p not in (None, 0.0):
        return "the request sets top_p or min_p"
    return None


def _make_verify_by_scores(endpoint: TokenEndpoint, scorer: TokenScorer, sampling: Sampling) -> VerifyRound:
    top = min(max(_MIN_TOP_TOKENS, _count_sampling_candidates(sampling)), scorer.max_top)
    seed = draw_random_seed() if sampling.seed is None else sampling.seed
    ends: dict[int, bool] = {}

    async def is_end_token(token_id: int, context_ids: list[int]) -> bool:
        """Whether an answer ends with this token: what the target says when it is made to write it."""
        if token_id not in ends:
            forced = Sampling(temperature=0.0, logit_bias={token_id: _FORCING_LOGIT_BIAS})
            token = (await endpoint.sample_next([context_ids], forced))[0]
            if token.token_id != token_id:
                raise TargetError("the target would not write the token that it scored best")
            ends[token_id] = token.is_end
        return ends[token_id]

    async def verify_by_scores(context_ids: list[int], drafted_ids: list[int]) -> list[SampledToken]:
        num_rows = len(drafted_ids) + 1
        rows = await scorer.score(context_ids + drafted_ids, num_rows=num_rows, top=top)
        _check_scored_rows(rows, num_rows, top)
        picked = [_pick_target_token(row, sampling, seed, len(context_ids) + n) for n, row in enumerate(rows)]
        differs = (n for n, drafted_id in enumerate(drafted_ids) if picked[n] != drafted_id)
        last = next(differs, len(drafted_ids))
        tokens = [SampledToken(token_id, await endpoint.decode([token_id])) for token_id in picked]
        for n, token in enumerate(tokens[:last]):  # a draft that copies a prompt may have the end's own text
            if _CONTROL_TOKEN.fullmatch(token.text) and await is_end_token(token.token_id, context_ids):
                last = n
                break
        if await is_end_token(picked[last], context_ids):
            tokens[last] = SampledToken(picked[last], "", is_end=True)
        return tokens

    return verify_by_scores


def _count_sampling_candidates(sampling: Sampling) -> int:
    """How many of the likeliest tokens a token is drawn from."""
    return sampling.top_k if sampling.temperature and sampling.top_k is not None else 1


def _check_scored_rows(rows: Sequence[TopTokens], num_rows: int, top: int) -> None:
    """Raise TargetError unless there are so many rows, each of at least `top` different tokens, best first."""
    if len(rows) != num_rows:
        raise TargetError(f"the target scored {len(rows)} positions where {num_rows} were asked for")
    for row in rows:
        ids, logprobs = [token_id for token_id, _ in row.top], [logprob for _, logprob in row.top]
        is_whole = len(ids) >= top and len(set(ids)) == len(ids) and all(type(i) is int and i >= 0 for i in ids)
        if not (is_whole and all(map(math.isfinite, logprobs)) and logprobs == sorted(logprobs, reverse=True)):
            raise TargetError(f"the target scored {row.top} where the likeliest {top} tokens were asked for")


def _pick_target_token(row: TopTokens, sampling: Sampling, seed: int, position: int) -> int:
    """The target's own token: the likeliest, or a draw from the likeliest `top_k` by noise of (seed, position)."""
    top = row.top[: _count_sampling_candidates(sampling)]
    if not sampling.temperature:
        return top[0][0]
    best = top[0][1]
    weights = list(accumulate(math.exp((logprob - best) / sampling.temperature) for _, logprob in top))
    point = draw_uniform_number(seed, position, NoisePurpose.TOKEN) * weights[-1]
    return next(token_id for (token_id, _), weight in zip(top, weights, strict=True) if point <= weight)
