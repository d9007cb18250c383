"""Speculative decoding as middleware: a cheap draft proposes, the target verifies, the text stays the target's own.

Start with `SpeculativeDecoder`. Providers load on demand; importing this package imports none of them.
`llm_spec.contract` and `llm_spec.provider_kit` are for those who write one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_spec._lazy import make_lazy_exports

if TYPE_CHECKING:
    from llm_spec.budget import Budget
    from llm_spec.chat import (
        AnswerDetail,
        AnswerStarted,
        ChatMessage,
        ChatRequest,
        ChatResponse,
        Fallback,
        Finish,
        GuaranteeWeakened,
        LocalTimings,
        NativeMessage,
        ReasoningDelta,
        ReasoningDetail,
        Retry,
        Round,
        Sampling,
        StreamEvent,
        TargetStreamReport,
        TextDelta,
        TokenLogprob,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from llm_spec.chat_response import complete_from_stream
    from llm_spec.concurrency_limit import ConcurrencyLimit
    from llm_spec.config import BreakerPolicy, RetryPolicy, SpeculativeConfig, Timeouts
    from llm_spec.contract.chat import Capabilities, ChunkStreaming, LlmProvider
    from llm_spec.contract.draft import DraftCapabilities, DraftPiece, DraftProvider, PerRequestDraft
    from llm_spec.contract.endpoint import (
        Discoverable,
        FeatureLossAware,
        SampledToken,
        TargetFeature,
        TokenEndpoint,
        TokenScorer,
        TopTokens,
    )
    from llm_spec.contract.entry import ProviderEntry
    from llm_spec.contract.local import (
        BoundedTokenizer,
        DeviceRoundModel,
        DeviceRoundResult,
        DeviceRoundRunner,
        DraftToken,
        GrammarTokenizer,
        PassCosts,
        PassSharingSession,
        PassTimingModel,
        PrefixReusingSession,
        RequestAdmittingModel,
        TokenDraft,
        TokenDrafter,
        Tokenizer,
        TokenModel,
        TokenSampler,
        TokenSession,
        VocabularyTokenizer,
    )
    from llm_spec.decoder import SpeculativeDecoder
    from llm_spec.decoder_stats import DecoderStats
    from llm_spec.drafting.cascade import CascadeDraft
    from llm_spec.drafting.lookup import PromptLookup
    from llm_spec.drafting.provider_draft import ProviderDraft
    from llm_spec.drafting.reference import ReferenceDraft
    from llm_spec.drafting.suffix import SuffixDraft
    from llm_spec.errors import (
        BudgetError,
        CircuitOpenError,
        ClosedError,
        ConfigError,
        DraftError,
        InvalidRequestError,
        LlmSpecError,
        MissingExtraError,
        ModelLoadError,
        ModelOutputError,
        TargetError,
        TransientError,
        UnknownProviderError,
        UnsupportedError,
    )
    from llm_spec.generation import Generation, GenerationLimits, TokenRound
    from llm_spec.local import generate_events, stream_token_model
    from llm_spec.pricing import Cost, Price
    from llm_spec.registry import open_draft, open_provider, registered_providers
    from llm_spec.result import PLAIN_REASONS, PlainReason, SpeculativeFinish, SpeculativeResult, Timings
    from llm_spec.stats import SpeculativeStats
    from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, TextGuarantee
    from llm_spec.strategies.limits import JudgeConfig
    from llm_spec.strategies.registry import StrategyEntry, register_strategy
    from llm_spec.text import StopMatcher
    from llm_spec.tokens.lookahead import CostAware, Ewma, Fixed, LookaheadPolicy, Threshold

__version__ = "0.1.0"

__all__ = [
    "PLAIN_REASONS",
    "AnswerDetail",
    "AnswerStarted",
    "BoundedTokenizer",
    "BreakerPolicy",
    "Budget",
    "BudgetError",
    "Capabilities",
    "CascadeDraft",
    "ChatMessage",
    "ChatRequest",
    "ChatResponse",
    "ChunkStreaming",
    "CircuitOpenError",
    "ClosedError",
    "ConcurrencyLimit",
    "ConfigError",
    "Cost",
    "CostAware",
    "DecoderStats",
    "DeviceRoundModel",
    "DeviceRoundResult",
    "DeviceRoundRunner",
    "Discoverable",
    "DraftCapabilities",
    "DraftError",
    "DraftPiece",
    "DraftProvider",
    "DraftToken",
    "Ewma",
    "Fallback",
    "FeatureLossAware",
    "Finish",
    "Fixed",
    "Generation",
    "GenerationLimits",
    "GrammarTokenizer",
    "GuaranteeWeakened",
    "InvalidRequestError",
    "JudgeConfig",
    "LlmProvider",
    "LlmSpecError",
    "LocalTimings",
    "LookaheadPolicy",
    "MissingExtraError",
    "ModelLoadError",
    "ModelOutputError",
    "NativeMessage",
    "PassCosts",
    "PassSharingSession",
    "PassTimingModel",
    "PerRequestDraft",
    "PlainReason",
    "PrefixReusingSession",
    "Price",
    "PromptLookup",
    "ProviderDraft",
    "ProviderEntry",
    "ReadyStrategy",
    "ReasoningDelta",
    "ReasoningDetail",
    "ReferenceDraft",
    "Refusal",
    "RequestAdmittingModel",
    "Retry",
    "RetryPolicy",
    "Round",
    "SampledToken",
    "Sampling",
    "SpeculativeConfig",
    "SpeculativeDecoder",
    "SpeculativeFinish",
    "SpeculativeResult",
    "SpeculativeStats",
    "StopMatcher",
    "StrategyContext",
    "StrategyEntry",
    "StreamEvent",
    "SuffixDraft",
    "TargetError",
    "TargetFeature",
    "TargetStreamReport",
    "TextDelta",
    "TextGuarantee",
    "Threshold",
    "Timeouts",
    "Timings",
    "TokenDraft",
    "TokenDrafter",
    "TokenEndpoint",
    "TokenLogprob",
    "TokenModel",
    "TokenRound",
    "TokenSampler",
    "TokenScorer",
    "TokenSession",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "TopTokens",
    "TransientError",
    "UnknownProviderError",
    "UnsupportedError",
    "Usage",
    "VocabularyTokenizer",
    "__version__",
    "complete_from_stream",
    "generate_events",
    "open_draft",
    "open_provider",
    "register_strategy",
    "registered_providers",
    "stream_token_model",
]

_NAMES_BY_MODULE: Final = {
    "llm_spec.budget": "Budget",
    "llm_spec.chat": (
        "AnswerDetail AnswerStarted ChatMessage ChatRequest ChatResponse Fallback Finish GuaranteeWeakened "
        "LocalTimings NativeMessage ReasoningDelta ReasoningDetail Retry Round Sampling StreamEvent TargetStreamReport "
        "TextDelta TokenLogprob ToolCall ToolCallDelta Usage"
    ),
    "llm_spec.chat_response": "complete_from_stream",
    "llm_spec.concurrency_limit": "ConcurrencyLimit",
    "llm_spec.config": "BreakerPolicy RetryPolicy SpeculativeConfig Timeouts",
    "llm_spec.contract.chat": "Capabilities ChunkStreaming LlmProvider",
    "llm_spec.contract.draft": "DraftCapabilities DraftPiece DraftProvider PerRequestDraft",
    "llm_spec.contract.endpoint": (
        "Discoverable FeatureLossAware SampledToken TargetFeature TokenEndpoint TokenScorer TopTokens"
    ),
    "llm_spec.contract.entry": "ProviderEntry",
    "llm_spec.contract.local": (
        "BoundedTokenizer DeviceRoundModel DeviceRoundResult DeviceRoundRunner DraftToken GrammarTokenizer "
        "PassCosts PassSharingSession PassTimingModel PrefixReusingSession RequestAdmittingModel TokenDraft "
        "TokenDrafter TokenModel TokenSampler TokenSession Tokenizer VocabularyTokenizer"
    ),
    "llm_spec.decoder": "SpeculativeDecoder",
    "llm_spec.decoder_stats": "DecoderStats",
    "llm_spec.drafting.cascade": "CascadeDraft",
    "llm_spec.drafting.lookup": "PromptLookup",
    "llm_spec.drafting.provider_draft": "ProviderDraft",
    "llm_spec.drafting.reference": "ReferenceDraft",
    "llm_spec.drafting.suffix": "SuffixDraft",
    "llm_spec.errors": (
        "BudgetError CircuitOpenError ClosedError ConfigError DraftError InvalidRequestError LlmSpecError "
        "MissingExtraError ModelLoadError ModelOutputError TargetError TransientError UnknownProviderError "
        "UnsupportedError"
    ),
    "llm_spec.generation": "Generation GenerationLimits TokenRound",
    "llm_spec.local": "generate_events stream_token_model",
    "llm_spec.pricing": "Cost Price",
    "llm_spec.registry": "open_draft open_provider registered_providers",
    "llm_spec.result": "PLAIN_REASONS PlainReason SpeculativeFinish SpeculativeResult Timings",
    "llm_spec.stats": "SpeculativeStats",
    "llm_spec.strategies.base": "ReadyStrategy Refusal StrategyContext TextGuarantee",
    "llm_spec.strategies.limits": "JudgeConfig",
    "llm_spec.strategies.registry": "StrategyEntry register_strategy",
    "llm_spec.text": "StopMatcher",
    "llm_spec.tokens.lookahead": "CostAware Ewma Fixed LookaheadPolicy Threshold",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = make_lazy_exports(__name__, _NAMES_BY_MODULE)
