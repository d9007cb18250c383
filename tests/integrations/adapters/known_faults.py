"""Rows in which an adapter is not as its framework's own model, with reasons; the tests hold both lists to what is."""

from collections.abc import Mapping
from typing import Final

__all__ = ["KNOWN_FAULTS", "ON_PURPOSE"]

KNOWN_FAULTS: Final[Mapping[tuple[str, str], str]] = {
    ("LiteLLM", "response-id"): "pieces go out before the server's id is known",
}
# The reasons are notes of the page.
ON_PURPOSE: Final[Mapping[tuple[str, str], str]] = {
    ("LiteLLM", "model-name"): "the name is the registered one, under which LiteLLM's list has the target's price",
}
