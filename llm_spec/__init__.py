"""Speculative decoding as middleware: a cheap draft proposes, the target verifies, the text stays the target's own.

Start with `SpeculativeDecoder`. Providers load on demand; importing this package imports none of them.
"""

from llm_spec.chat import (
    ChatMessage,
    ChatRequest,
    ChatResponse,
    Fallback,
    Finish,
    ReasoningDelta,
    Round,
    Sampling,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from llm_spec.config import SpeculativeConfig
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.drafting import GivenText, JoinedDraft, PromptLookup, ProviderDraft
from llm_spec.errors import (
    ConfigError,
    DraftError,
    InvalidRequestError,
    LlmSpecError,
    MissingExtraError,
    ModelLoadError,
    ModelOutputError,
    TargetError,
    UnknownProviderError,
    UnsupportedError,
)
from llm_spec.generation import Generation, GenerationLimits, TokenRound
from llm_spec.local import generate_events, stream_token_model
from llm_spec.provider import (
    Capabilities,
    DraftPiece,
    DraftProvider,
    DraftToken,
    LlmProvider,
    ProviderEntry,
    TokenChooser,
    TokenDraft,
    TokenDrafter,
    Tokenizer,
    TokenModel,
    TokenSession,
    complete_from_stream,
)
from llm_spec.registry import open_draft, open_provider, registered_providers
from llm_spec.result import SpeculativeFinish, SpeculativeResult, SpeculativeStats, Timings
from llm_spec.text import StopMatcher
from llm_spec.tokens.lookahead import CostAware, Ewma, Fixed, LookaheadPolicy, Threshold

__version__ = "0.1.0"

__all__ = [
    "Capabilities",
    "ChatMessage",
    "ChatRequest",
    "ChatResponse",
    "ConfigError",
    "CostAware",
    "DraftError",
    "DraftPiece",
    "DraftProvider",
    "DraftToken",
    "Ewma",
    "Fallback",
    "Finish",
    "Fixed",
    "Generation",
    "GenerationLimits",
    "GivenText",
    "InvalidRequestError",
    "JoinedDraft",
    "LlmProvider",
    "LlmSpecError",
    "LookaheadPolicy",
    "MissingExtraError",
    "ModelLoadError",
    "ModelOutputError",
    "PromptLookup",
    "ProviderDraft",
    "ProviderEntry",
    "ReasoningDelta",
    "Round",
    "Sampling",
    "SpeculativeConfig",
    "SpeculativeDecoder",
    "SpeculativeFinish",
    "SpeculativeResult",
    "SpeculativeStats",
    "StopMatcher",
    "StreamEvent",
    "TargetError",
    "TextDelta",
    "Threshold",
    "Timings",
    "TokenChooser",
    "TokenDraft",
    "TokenDrafter",
    "TokenModel",
    "TokenRound",
    "TokenSession",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "UnknownProviderError",
    "UnsupportedError",
    "Usage",
    "__version__",
    "complete_from_stream",
    "generate_events",
    "open_draft",
    "open_provider",
    "registered_providers",
    "stream_token_model",
]
