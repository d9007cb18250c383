"""Options of a model in this process, after the question mark of the model's string."""

from __future__ import annotations

from typing import Any, get_type_hints
from urllib.parse import parse_qsl

from llm_spec.contract.errors import ConfigError

__all__ = ["parse_query_options"]


def parse_query_options(provider: str, query: str, options_type: type) -> Any:
    """Return the options of `query`, in the types that `options_type`, a TypedDict, declares.

    Raises ConfigError for an unknown option or a value of another type.
    """
    types = get_type_hints(options_type)
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in types:
            raise ConfigError(f"{provider} has no option {name!r}; it has {', '.join(types)}")
        options[name] = _parse_option_value(name, types[name], text)
    return options


def _parse_option_value(name: str, expected_type: Any, text: str) -> Any:
    if expected_type is bool:
        if text not in {"true", "false"}:
            raise ConfigError(f"{name} is {text!r}; it must be true or false")
        return text == "true"
    if expected_type in {int, float}:
        try:
            return expected_type(text)
        except ValueError as error:
            raise ConfigError(f"{name} is {text!r}; it must be a number") from error
    return text
