"""How pydantic-ai calls a target: its provider, its model and its address, so that price tables find them. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from llm_spec.contract.provider import LlmProvider
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.entry_points import ProviderSpec
from llm_spec.integrations._shared import split_provider_name
from llm_spec.kit.server_addresses import parse_server_address

__all__ = ["Target", "describe_target", "split_name"]

_OWN_PROVIDER: Final = "llm-spec"  # of what has no provider of its own, such as several drafts together
_PROVIDERS: Final = {"kimi": "moonshotai", "qwen": "alibaba"}  # where pydantic-ai has another word


class Target(NamedTuple):
    """A target. `url` has no credentials; None: it is the provider's own, or not known. `is_local`: in this process."""

    provider: str
    model: str
    url: str | None
    is_local: bool


def split_name(name: str) -> tuple[str, str]:
    """The provider and the model of a name such as `openai:gpt-4.1`."""
    provider, model = split_provider_name(name)
    return _PROVIDERS.get(provider, provider) or _OWN_PROVIDER, model


def describe_target(provider: LlmProvider, given: LlmProvider | str) -> Target:
    """The target of what answers: of a decoder its own. `given` is what a user gave to be opened."""
    address = ProviderSpec.parse(given).base_url if isinstance(given, str) else None
    url = None if address is None else parse_server_address(address).url
    if isinstance(provider, SpeculativeDecoder):
        return Target(*split_name(provider.target.name), url, provider.is_target_local)
    return Target(*split_name(provider.name), url, provider.capabilities.token_model is not None)
