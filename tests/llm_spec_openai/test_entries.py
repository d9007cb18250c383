"""`openai:` and `azure:` strings, and what importing costs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import llm_spec_openai
import pytest

from llm_spec import ConfigError, open_provider
from llm_spec.contract.errors import MissingExtraError
from llm_spec.decoder.entry_points import registered_providers


def test_registered() -> None:
    """Both are found by their names."""
    entries = registered_providers()
    assert entries["openai"] is llm_spec_openai.OPENAI
    assert entries["azure"] is llm_spec_openai.AZURE


@pytest.mark.parametrize("text", ["openai:gpt-4o", "azure:mine@https://name.openai.azure.com"])
def test_a_missing_sdk_is_named_with_its_command(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the SDK, the error holds the command that brings it."""
    find_spec = importlib.util.find_spec

    def without_sdk(name: str, package: str | None = None) -> object:
        return None if name == "openai" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_sdk)
    with pytest.raises(MissingExtraError) as caught:
        open_provider(text)
    assert "pip install 'llm-spec[openai]'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("openai", {"OPENAI_API_KEY": "k"}, "needs a model"),
        ("openai:gpt-4o", {}, "set OPENAI_API_KEY"),
        ("openai:gpt-4o", {"OPENAI_ADMIN_KEY": "k"}, "set OPENAI_API_KEY"),
        ("azure", {}, "needs a deployment"),
        ("azure:mine", {}, "AZURE_OPENAI_ENDPOINT"),
        ("azure:mine@https://name.openai.azure.com", {}, "OPENAI_API_VERSION"),
        ("azure:mine@https://name.openai.azure.com", {"OPENAI_API_VERSION": "1"}, "AZURE_OPENAI_API_KEY"),
    ],
)
def test_what_is_missing_is_named(
    text: str, environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A string that says too little is an error that says what to set."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        open_provider(text)


def test_importing_loads_no_sdk() -> None:
    """The package can be listed and asked about without paying for the SDK."""
    code = "import llm_spec_openai, sys; print([m for m in ('openai', 'httpx2', 'aiohttp') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_no_other_names() -> None:
    """The lazy package answers for its own names only."""
    assert llm_spec_openai.OpenAIProvider.__name__ == "OpenAIProvider"
    with pytest.raises(AttributeError, match="nothing"):
        getattr(llm_spec_openai, "nothing")  # noqa: B009 - a type checker knows that it is not there
