"""Providers for any server with OpenAI's chat completions API, over aiohttp.

Importing this package does not import aiohttp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_spec import ConfigError
from llm_spec.contract.endpoint import TargetFeature
from llm_spec.contract.entry import ProviderEntry
from llm_spec_http.dialects import DIALECTS, ServerDialect

if TYPE_CHECKING:
    from llm_spec_http.provider import HttpProvider

__all__ = ["DIALECTS", "ENTRIES", "HttpProvider", "ServerDialect"]


def __getattr__(name: str) -> object:
    if name == "HttpProvider":
        from llm_spec_http.provider import HttpProvider

        return HttpProvider
    if name.isupper() and name.lower() in ENTRIES:
        return ENTRIES[name.lower()]  # entry points load names like VLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _create_provider_entry(dialect: ServerDialect) -> ProviderEntry:
    def load_provider(model: str, base_url: str | None, api_key: str | None = None) -> HttpProvider:
        from llm_spec_http.provider import HttpProvider

        if not model:
            raise ConfigError(f"{dialect.name} needs a model: {dialect.name}:model@http://host:port/v1")
        return HttpProvider(model, base_url=base_url, dialect=dialect, api_key=api_key)

    has: dict[TargetFeature, bool] = {
        "token_endpoint": dialect.token_api is not None,
        "continue_prefix": dialect.continuation is not None,
        "prediction": dialect.prediction,
    }
    features: tuple[TargetFeature, ...] = tuple(name for name, is_there in has.items() if is_there)
    return ProviderEntry(
        load=load_provider, summary=dialect.summary, load_with_key=load_provider, features=lambda _: features
    )


ENTRIES: Final = {name: _create_provider_entry(dialect) for name, dialect in DIALECTS.items()}
