"""Speculative decoding as middleware: a cheap draft proposes, the target verifies, the text stays the target's own.

Start with `SpeculativeDecoder`, or with `SyncDecoder` in a program without `await`. Providers load on demand;
importing this package imports none of them.
Whoever writes one finds protocols, requests and events in `llm_spec.contract`, help in `llm_spec.kit`, and more for
models in this process in `llm_spec.local`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_spec.contract._lazy import make_lazy_exports

if TYPE_CHECKING:
    from llm_spec.contract.draft import DraftProvider as DraftProvider
    from llm_spec.contract.errors import BudgetError as BudgetError
    from llm_spec.contract.errors import CircuitOpenError as CircuitOpenError
    from llm_spec.contract.errors import ClosedError as ClosedError
    from llm_spec.contract.errors import ConfigError as ConfigError
    from llm_spec.contract.errors import DraftError as DraftError
    from llm_spec.contract.errors import InvalidRequestError as InvalidRequestError
    from llm_spec.contract.errors import LlmSpecError as LlmSpecError
    from llm_spec.contract.errors import ModelOutputError as ModelOutputError
    from llm_spec.contract.errors import TargetError as TargetError
    from llm_spec.contract.errors import TransientError as TransientError
    from llm_spec.contract.errors import UnsupportedError as UnsupportedError
    from llm_spec.contract.events import AnswerDetail as AnswerDetail
    from llm_spec.contract.events import AnswerStarted as AnswerStarted
    from llm_spec.contract.events import ChatResponse as ChatResponse
    from llm_spec.contract.events import Fallback as Fallback
    from llm_spec.contract.events import Finish as Finish
    from llm_spec.contract.events import GuaranteeWeakened as GuaranteeWeakened
    from llm_spec.contract.events import ReasoningDelta as ReasoningDelta
    from llm_spec.contract.events import Retry as Retry
    from llm_spec.contract.events import Round as Round
    from llm_spec.contract.events import StreamEvent as StreamEvent
    from llm_spec.contract.events import TextDelta as TextDelta
    from llm_spec.contract.events import TokenLogprob as TokenLogprob
    from llm_spec.contract.events import ToolCallDelta as ToolCallDelta
    from llm_spec.contract.events import Usage as Usage
    from llm_spec.contract.messages import ChatMessage as ChatMessage
    from llm_spec.contract.messages import ReasoningDetail as ReasoningDetail
    from llm_spec.contract.messages import ToolCall as ToolCall
    from llm_spec.contract.provider import LlmProvider as LlmProvider
    from llm_spec.contract.request import ChatRequest as ChatRequest
    from llm_spec.contract.request import Sampling as Sampling
    from llm_spec.contract.stats import SpeculativeStats as SpeculativeStats
    from llm_spec.decoder.budget import Budget as Budget
    from llm_spec.decoder.concurrency_limit import ConcurrencyLimit as ConcurrencyLimit
    from llm_spec.decoder.config import BreakerPolicy as BreakerPolicy
    from llm_spec.decoder.config import RetryPolicy as RetryPolicy
    from llm_spec.decoder.config import SpeculativeConfig as SpeculativeConfig
    from llm_spec.decoder.config import Timeouts as Timeouts
    from llm_spec.decoder.decoder import SpeculativeDecoder as SpeculativeDecoder
    from llm_spec.decoder.entry_points import open_draft as open_draft
    from llm_spec.decoder.entry_points import open_provider as open_provider
    from llm_spec.decoder.pricing import Cost as Cost
    from llm_spec.decoder.pricing import Price as Price
    from llm_spec.decoder.result import DecoderStats as DecoderStats
    from llm_spec.decoder.result import SpeculativeFinish as SpeculativeFinish
    from llm_spec.decoder.result import SpeculativeResult as SpeculativeResult
    from llm_spec.decoder.result import Timings as Timings
    from llm_spec.decoder.sync_decoder import SyncDecoder as SyncDecoder
    from llm_spec.drafting.cascade import CascadeDraft as CascadeDraft
    from llm_spec.drafting.lookup import PromptLookup as PromptLookup
    from llm_spec.drafting.provider_draft import ProviderDraft as ProviderDraft
    from llm_spec.drafting.reference import ReferenceDraft as ReferenceDraft
    from llm_spec.drafting.suffix import SuffixDraft as SuffixDraft
    from llm_spec.local.lookahead import CostAware as CostAware
    from llm_spec.local.lookahead import Ewma as Ewma
    from llm_spec.local.lookahead import Fixed as Fixed
    from llm_spec.local.lookahead import Threshold as Threshold
    from llm_spec.strategies.limits import JudgeConfig as JudgeConfig

__version__ = "0.1.0"

# where each name is; the imports above tell type checkers the same
_NAMES_BY_MODULE: Final = {
    "llm_spec.contract.draft": "DraftProvider",
    "llm_spec.contract.errors": (
        "BudgetError CircuitOpenError ClosedError ConfigError DraftError InvalidRequestError "
        "LlmSpecError ModelOutputError TargetError TransientError UnsupportedError"
    ),
    "llm_spec.contract.events": (
        "AnswerDetail AnswerStarted ChatResponse Fallback Finish GuaranteeWeakened ReasoningDelta "
        "Retry Round StreamEvent TextDelta TokenLogprob ToolCallDelta Usage"
    ),
    "llm_spec.contract.messages": "ChatMessage ReasoningDetail ToolCall",
    "llm_spec.contract.provider": "LlmProvider",
    "llm_spec.contract.request": "ChatRequest Sampling",
    "llm_spec.contract.stats": "SpeculativeStats",
    "llm_spec.decoder.budget": "Budget",
    "llm_spec.decoder.concurrency_limit": "ConcurrencyLimit",
    "llm_spec.decoder.config": "BreakerPolicy RetryPolicy SpeculativeConfig Timeouts",
    "llm_spec.decoder.decoder": "SpeculativeDecoder",
    "llm_spec.decoder.entry_points": "open_draft open_provider",
    "llm_spec.decoder.pricing": "Cost Price",
    "llm_spec.decoder.result": "DecoderStats SpeculativeFinish SpeculativeResult Timings",
    "llm_spec.decoder.sync_decoder": "SyncDecoder",
    "llm_spec.drafting.cascade": "CascadeDraft",
    "llm_spec.drafting.lookup": "PromptLookup",
    "llm_spec.drafting.provider_draft": "ProviderDraft",
    "llm_spec.drafting.reference": "ReferenceDraft",
    "llm_spec.drafting.suffix": "SuffixDraft",
    "llm_spec.local.lookahead": "CostAware Ewma Fixed Threshold",
    "llm_spec.strategies.limits": "JudgeConfig",
}
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = make_lazy_exports(__name__, _NAMES_BY_MODULE, "__version__")
