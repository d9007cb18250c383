"""LangChain's own standard tests of chat models, over the rule-based provider."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_tests")

from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from llm_spec.integrations.langchain import SpeculativeChatModel
from llm_spec.testing import RuleBasedProvider

# stream_events(version="v3") says at each call that it may change
pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")

ELSEWHERE = ("api_key",)  # a provider's, not the chat model's


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return SpeculativeChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"target": RuleBasedProvider()}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {name: value for name, value in super().standard_chat_model_params.items() if name not in ELSEWHERE}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return SpeculativeChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"target": RuleBasedProvider()}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {name: value for name, value in super().standard_chat_model_params.items() if name not in ELSEWHERE}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
