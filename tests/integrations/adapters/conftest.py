"""Collected only where all frameworks are. No service knows the keys; what other libraries leave open is theirs."""

import importlib.util
import os
import warnings

import pytest

_FRAMEWORKS = ("agents", "langchain_openai", "litellm", "llm", "pydantic_ai")

if any(importlib.util.find_spec(name) is None for name in _FRAMEWORKS):
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(
        LITELLM_LOCAL_MODEL_COST_MAP="True",  # or it asks the network for prices on import
        OPENAI_API_KEY="unused",
        ANTHROPIC_API_KEY="unused",
        OPENAI_AGENTS_DISABLE_TRACING="1",
        LANGSMITH_TRACING="false",
    )

    def pytest_configure(config: pytest.Config) -> None:
        """The frameworks' own models leave clients open, and warn of what is to come in their next versions."""
        config.addinivalue_line("filterwarnings", "ignore")
        warnings.simplefilter("ignore", ResourceWarning)
