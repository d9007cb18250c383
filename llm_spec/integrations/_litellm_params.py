"""Tells litellm which options this library's models take, and what their targets cost.

litellm has one list of options for all custom providers. It lacks `reasoning_effort` and other
common options, and litellm refuses or drops an option that is not on it before a handler is called.
A handler cannot declare its options. So the two functions of litellm that decide this are wrapped
once per process. For other providers they behave as before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, Final

import litellm
import litellm.main

from llm_spec.integrations._shared import split_provider_name

__all__ = ["declare_supported_params", "forget_prices", "register_price"]

# In addition to litellm's list; sent to a target unchanged, as by litellm's OpenAI provider
_MORE_PARAMS: Final = ("context_management", "reasoning_effort", "thinking", "user", "verbosity")
_REFUSED_PARAMS: Final = ("extra_headers", "function_call", "functions", "n")
_declared_names: Final[set[str]] = set()


def declare_supported_params(name: str) -> None:
    """Tell litellm which options the models of the provider `name` take."""
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
    """Give `name/model` the price and the limits that litellm knows for its target.

    Returns the key of the new entry, or None if there is none. `target` is a name of this library,
    `provider:model`. A target with an address may be anybody's server, so it has no price.
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
    """Remove the prices that `register_price` added."""
    for key in keys:
        litellm.model_cost.pop(key, None)
