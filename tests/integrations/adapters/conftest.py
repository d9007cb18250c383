"""Keys that no service knows, and what other libraries leave open is theirs."""

import os
import warnings

import pytest

os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",  # otherwise it asks for a list of prices on the network when it is imported
    OPENAI_API_KEY="unused",
    ANTHROPIC_API_KEY="unused",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    LANGSMITH_TRACING="false",
)


def pytest_configure(config: pytest.Config) -> None:
    """The frameworks' own models leave clients open, and warn of what is to come in their next versions."""
    config.addinivalue_line("filterwarnings", "ignore")
    warnings.simplefilter("ignore", ResourceWarning)
