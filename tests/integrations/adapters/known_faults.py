"""Rows in which an adapter is not as its framework's own model yet, with reasons; the tests let it only shrink."""

from collections.abc import Mapping
from typing import Final

__all__ = ["KNOWN_FAULTS"]

KNOWN_FAULTS: Final[Mapping[tuple[str, str], str]] = {
    ("LangChain", "response-id"): "answers have no id of the server's",
    ("LangChain", "error-404"): "the error is this library's, or another of the framework's",
    ("pydantic-ai", "response-id"): "answers have no id of the server's",
    ("OpenAI Agents", "response-id"): "answers have no id of the server's",
    ("OpenAI Agents", "model-name"): "the name is that of the provider's string",
    ("OpenAI Agents", "prediction"): "it is a draft, and is not sent",
    ("LiteLLM", "think-tags"): "text in tags is left in the answer",
    ("LiteLLM", "response-id"): "answers have no id of the server's",
    ("LiteLLM", "model-name"): "the name is that of the provider's string",
    ("`llm`", "response-id"): "answers have no id of the server's",
    ("`llm`", "model-name"): "the name is that of the provider's string",
}
