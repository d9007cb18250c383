"""How pydantic-ai calls a target: its provider, its model and its address, so that price tables find them. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.registry import ProviderSpec

__all__ = ["OWN_PROVIDER", "TargetNames", "find_target_names", "split_name"]

OWN_PROVIDER: Final = "llm-spec"  # of what has no provider of its own, such as several drafts together
_NAME: Final = re.compile(r"([A-Za-z0-9_-]+):(.+)", re.DOTALL)
_CREDENTIALS: Final = re.compile(r"//[^/@\s]*@")
_PROVIDERS: Final = {"kimi": "moonshotai", "qwen": "alibaba"}  # where pydantic-ai has another word


class TargetNames(NamedTuple):
    """`url` has no credentials; None: it is the provider's own, or not known."""

    provider: str
    model: str
    url: str | None = None


def split_name(name: str) -> tuple[str, str]:
    """The provider and the model of a name such as `openai:gpt-4.1`."""
    if (match := _NAME.fullmatch(name)) is None:
        return OWN_PROVIDER, name
    return _PROVIDERS.get(match[1], match[1]), match[2]


def find_target_names(provider: LlmProvider, target: LlmProvider | DraftProvider | str) -> TargetNames:
    """The names of what answers: of a decoder its target's. `target` is what a user gave to be opened."""
    name = provider.target_name if isinstance(provider, SpeculativeDecoder) else provider.name
    address = ProviderSpec.parse(target).base_url if isinstance(target, str) else None
    url = None if address is None else _CREDENTIALS.sub("//", address).partition("?")[0]
    return TargetNames(*split_name(name), url)
