"""What litellm has to know of our models: which options they take, and what their targets cost.

litellm has one list of options for all custom providers, without `reasoning_effort` and others that are usual by now,
and refuses or drops the rest before a handler sees it. It has no place where a handler says what it takes, so the two
functions of litellm that decide this are wrapped, once in a process. For other providers they do what they did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, Final

import litellm
import litellm.main

from llm_spec.integrations._shared import split_provider_name

__all__ = ["declare_supported_params", "forget_prices", "register_price"]

# Beside those of litellm's list: to a target as they are, as by litellm's OpenAI provider
_MORE_PARAMS: Final = ("context_management", "reasoning_effort", "thinking", "user", "verbosity")
_REFUSED_PARAMS: Final = ("extra_headers", "function_call", "functions", "n")
_declared_names: Final[set[str]] = set()


def declare_supported_params(name: str) -> None:
    """Tell litellm what models of the provider `name` take."""
    if not _declared_names:
        untyped: Any = litellm
        untyped.main.get_optional_params = _allow_more_params(untyped.main.get_optional_params)
        get_supported = _list_more_params(untyped.get_supported_openai_params)
        untyped.get_supported_openai_params = untyped.utils.get_supported_openai_params = get_supported
    _declared_names.add(name)


def _allow_more_params(get_optional_params: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get_optional_params)
    def get_with_more(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("custom_llm_provider") in _declared_names:
            allowed = keywords.get("allowed_openai_params") or ()
            keywords["allowed_openai_params"] = [*allowed, *(name for name in _MORE_PARAMS if name not in allowed)]
        return get_optional_params(*arguments, **keywords)

    return get_with_more


def _list_more_params(get_supported: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get_supported)
    def list_with_more(model: str, custom_llm_provider: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        found = get_supported(model, custom_llm_provider, *arguments, **keywords)
        provider = custom_llm_provider or model.partition("/")[0]
        if found is None or provider not in _declared_names:
            return found
        return [*(name for name in found if name not in (*_REFUSED_PARAMS, *_MORE_PARAMS)), *_MORE_PARAMS]

    return list_with_more


def register_price(name: str, model: str, target: str) -> str | None:
    """Give `name/model` the price and the limits that litellm knows of its target; gives the key, None: it knows none.

    `target` is as this library names it, `provider:model`. One with an address is anybody's server, without a price.
    """
    provider, rest = split_provider_name(target)
    if not provider or "@" in rest:
        return None
    key = f"{name}/{model}"
    known: dict[str, Any] = litellm.model_cost
    if key in known:
        return None
    for candidate, is_own in ((f"{provider}/{rest}", True), (rest, False)):
        found = known.get(candidate)
        if found is not None and (is_own or found.get("litellm_provider") == provider):
            litellm.register_model({key: {**found, "litellm_provider": name}})
            return key
    return None


def forget_prices(keys: Collection[str]) -> None:
    """Take back what `register_price` gave."""
    for key in keys:
        litellm.model_cost.pop(key, None)
