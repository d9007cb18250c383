"""vLLM's report on an answer's drafts: `metrics.speculative_decoding` of completions. Pure.

Names and meanings are those of vLLM 0.32 (`SpeculativeDecodingMetrics`), so clients that read
vLLM's read these too.
"""

from __future__ import annotations

from llm_spec.contract.stats import SpeculativeStats
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.server.apis.fields import Json
from llm_spec.strategies.registry import find_strategy

__all__ = ["build_acceptance_fields", "get_stats_of_verified_drafts"]


def get_stats_of_verified_drafts(result: SpeculativeResult) -> SpeculativeStats | None:
    """Return the counts of an answer's rounds, or None if nothing was drafted or they are unknown.

    A server that takes predicted outputs tells how many tokens it accepted, but not in how many
    rounds.
    """
    is_known = result.stats.num_spec_steps > 0 and find_strategy(result.strategy).reports_drafts
    return result.stats if is_known else None


def build_acceptance_fields(result: SpeculativeResult) -> Json:
    """Build the field `metrics` of an answer, or no field if there is nothing to tell.

    `num_spec_tokens` is the longest draft of a round. `acceptance_histogram[n]` counts the rounds
    in which n drafted tokens were accepted, from 0 to `num_spec_tokens`.
    """
    stats = get_stats_of_verified_drafts(result)
    if stats is None:
        return {}
    num_spec_tokens = max(report.num_draft_tokens for report in result.rounds)
    padding = [0] * (num_spec_tokens + 1 - len(stats.acceptance_histogram))
    acceptance: Json = {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": [*stats.acceptance_histogram, *padding],
        "num_spec_steps": stats.num_spec_steps,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": num_spec_tokens,
    }
    return {"metrics": {"speculative_decoding": acceptance}}
