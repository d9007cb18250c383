"""The names of a target in pydantic-ai: provider, model and address. Pure.

Price tables find a target by them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llm_spec.contract.provider import LlmProvider
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.entry_points import ProviderSpec
from llm_spec.integrations._shared import split_provider_name
from llm_spec.kit.server_addresses import parse_server_address

__all__ = ["Target", "describe_target", "split_name"]

_OWN_PROVIDER: Final = "llm-spec"  # for names without a provider, such as several drafts together
_PROVIDERS: Final = {"kimi": "moonshotai", "qwen": "alibaba"}  # if pydantic-ai has another name


class Target(NamedTuple):
    """A target.

    `url` has no credentials. It is None if the address is the provider's own or unknown. `is_local`
    is True if the model runs in this process.
    """

    provider: str
    model: str
    url: str | None
    is_local: bool


def split_name(name: str) -> tuple[str, str]:
    """Split a name such as `openai:gpt-4.1` into provider and model."""
    provider, model = split_provider_name(name)
    return _PROVIDERS.get(provider, provider) or _OWN_PROVIDER, model


def describe_target(provider: LlmProvider, given: LlmProvider | str) -> Target:
    """Describe the target of a provider; a decoder's is its own target.

    `given` is the provider or string that the user passed in.
    """
    address = ProviderSpec.parse(given).base_url if isinstance(given, str) else None
    url = None if address is None else parse_server_address(address).url
    if isinstance(provider, SpeculativeDecoder):
        return Target(*split_name(provider.target.name), url, provider.is_target_local)
    return Target(*split_name(provider.name), url, provider.capabilities.token_model is not None)
