"""OpenAI's models and Azure's deployments of them, through the official SDK.

Importing this package does not load the SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_spec import ConfigError
from llm_spec.contract.entry import ProviderEntry
from llm_spec_openai.models import supports_predictions

if TYPE_CHECKING:
    from llm_spec_openai.provider import OpenAIProvider

__all__ = ["AZURE", "OPENAI", "OpenAIProvider"]

_REQUIRES: Final = ("openai",)
_INSTALL: Final = "pip install 'llm-spec[openai]'"


def __getattr__(name: str) -> object:
    if name == "OpenAIProvider":
        from llm_spec_openai.provider import OpenAIProvider

        return OpenAIProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load_openai_provider(model: str, base_url: str | None, api_key: str | None = None) -> OpenAIProvider:
    from llm_spec_openai.provider import OpenAIProvider

    if not model:
        raise ConfigError("openai needs a model: openai:gpt-4.1-mini")
    return OpenAIProvider(model, base_url=base_url, api_key=api_key)


def _load_azure_provider(model: str, base_url: str | None, api_key: str | None = None) -> OpenAIProvider:
    from llm_spec_openai.provider import OpenAIProvider

    if not model:
        raise ConfigError("azure needs a deployment: azure:deployment@https://NAME.openai.azure.com")
    return OpenAIProvider.on_azure(model, endpoint=base_url, api_key=api_key)


OPENAI: Final = ProviderEntry(
    load=_load_openai_provider,
    load_with_key=_load_openai_provider,
    summary="OpenAI's models: openai:gpt-4.1-mini",
    requires=_REQUIRES,
    install=_INSTALL,
    features=lambda model: ("prediction",) if supports_predictions(model) else (),
)
AZURE: Final = ProviderEntry(
    load=_load_azure_provider,
    load_with_key=_load_azure_provider,
    summary="deployments on Azure: azure:deployment@https://NAME.openai.azure.com",
    requires=_REQUIRES,
    install=_INSTALL,
    features=lambda _: (),
)
