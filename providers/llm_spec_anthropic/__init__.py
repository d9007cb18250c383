"""Claude, through Anthropic's own SDK. Importing this package does not load the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_spec import ConfigError
from llm_spec.contract.entry import ProviderEntry
from llm_spec.contract.errors import MissingExtraError
from llm_spec_anthropic.models import can_model_continue_prefix

if TYPE_CHECKING:
    from llm_spec_anthropic.provider import AnthropicProvider

__all__ = ["ANTHROPIC", "AnthropicProvider"]

_INSTALL: Final = "pip install 'llm-spec[anthropic]'"


def __getattr__(name: str) -> object:
    if name == "AnthropicProvider":
        from llm_spec_anthropic.provider import AnthropicProvider

        return AnthropicProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load_anthropic_provider(model: str, base_url: str | None, api_key: str | None = None) -> AnthropicProvider:
    if not model:
        raise ConfigError("anthropic needs a model: anthropic:claude-haiku-5-5")
    if ANTHROPIC.missing_modules:
        raise MissingExtraError(
            f"anthropic needs {', '.join(ANTHROPIC.missing_modules)}, which is not installed; run: {_INSTALL}"
        )
    from llm_spec_anthropic.provider import AnthropicProvider

    return AnthropicProvider(model, base_url=base_url, api_key=api_key)


ANTHROPIC: Final = ProviderEntry(
    load=_load_anthropic_provider,
    load_with_key=_load_anthropic_provider,
    summary="Claude, through Anthropic's own SDK: anthropic:claude-haiku-5-5",
    requires=("anthropic",),
    install=_INSTALL,
    features=lambda model: ("continue_prefix",) if can_model_continue_prefix(model) else (),
)
