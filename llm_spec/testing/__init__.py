"""Fakes, a virtual clock and a conformance suite, for this library's tests and for others'.

It does not need pytest.
"""

from llm_spec.testing.clock import VirtualClockEventLoop, run_virtual
from llm_spec.testing.conformance import ConformanceError, check_draft_conformance, check_provider_conformance
from llm_spec.testing.random_draft import RANDOM_DRAFT, RandomDraft
from llm_spec.testing.rules import RULES, RuleBasedProvider
from llm_spec.testing.scripted import Script, ScriptedProvider
from llm_spec.testing.token_conformance import check_token_model_conformance
from llm_spec.testing.token_models import ByteTokenizer, CharTokenizer, LocalProvider, TableModel

__all__ = [
    "RANDOM_DRAFT",
    "RULES",
    "ByteTokenizer",
    "CharTokenizer",
    "ConformanceError",
    "LocalProvider",
    "RandomDraft",
    "RuleBasedProvider",
    "Script",
    "ScriptedProvider",
    "TableModel",
    "VirtualClockEventLoop",
    "check_draft_conformance",
    "check_provider_conformance",
    "check_token_model_conformance",
    "run_virtual",
]
