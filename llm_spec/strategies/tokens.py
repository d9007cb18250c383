"""`tokens`: a local target reads its draft's token ids, lookahead + 1 positions in one forward pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

from llm_spec.chat import ChatRequest, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider, is_free
from llm_spec.contract.endpoint import Feature
from llm_spec.contract.local import TokenDrafter
from llm_spec.errors import UnsupportedError, format_error_line
from llm_spec.generation import GenerationLimits
from llm_spec.local import stream_token_model
from llm_spec.metered import MeteredDraft, meter_external_call
from llm_spec.pair_stats import PairStats
from llm_spec.strategies.base import TextGuarantee

__all__ = ["TOKENS", "TokensStrategy"]


class TokensStrategy:
    """Exact by `coupled` and `rejection` acceptance; with `coupled` also the same text, where the model can show it."""

    name = "tokens"
    needed_feature: Feature | None = None

    def find_refusal(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> str | None:  # noqa: ARG002 - the request does not matter
        model = target.capabilities.token_model
        if model is None:
            return f"target {target.name} does not run in this process"
        if draft is None:
            return "there is no draft"
        drafter = _as_token_drafter(draft)
        if drafter is None:
            return f"draft {draft.name} gives text, not token ids"
        try:
            return drafter.token_draft_refusal(model)
        except Exception as error:  # noqa: BLE001 - whatever a draft does, the target answers
            return f"draft {draft.name} failed: {format_error_line(error)}"

    def text_guarantee(self, target: LlmProvider, config: SpeculativeConfig) -> TextGuarantee:
        model = target.capabilities.token_model
        same_text = config.acceptance == "coupled" and model is not None and model.same_text
        return TextGuarantee("lossy" if config.acceptance.startswith("lossy") else "exact", same_text)

    def run(
        self,
        draft: DraftProvider | None,
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        pair_stats: PairStats,
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        model = target.capabilities.token_model
        drafter = _as_token_drafter(draft)
        if model is None or drafter is None:
            raise UnsupportedError(f"strategy 'tokens' cannot be used: {self.find_refusal(draft, target, request)}")
        opened = stream_token_model(
            model,
            request,
            drafter=drafter,
            acceptance=config.acceptance,
            lookahead=config.lookahead,
            limits=GenerationLimits(
                max_iterations=config.max_iterations,
                max_draft_tokens=config.max_draft_tokens,
                draft_timeout_s=config.draft_timeout_s,
                plain_every=config.baseline_every,
                min_plain_steps=pair_stats.baseline.num_steps_needed if config.baseline_every else 0,
            ),
        )
        return meter_external_call(target, opened, request, counts_drafts=not is_free(draft))


def _as_token_drafter(draft: object) -> TokenDrafter | None:
    draft = draft.unmetered if isinstance(draft, MeteredDraft) else draft  # its rounds are counted here
    return draft if isinstance(draft, TokenDrafter) else None


TOKENS: Final = TokensStrategy()
