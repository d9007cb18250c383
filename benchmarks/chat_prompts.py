"""Prompts for small chat models, of two kinds: those whose answers copy from the prompt, and open questions."""

from __future__ import annotations

from typing import Final

from llm_spec.cli.bench.prompts import get_default_prompts

__all__ = ["make_chat_prompts"]

COPY_CATEGORIES: Final = ("edit", "quote", "json")
OPEN_QUESTIONS: Final = (
    "What should somebody pack for a week of walking in the mountains?",
    "Explain how a bill becomes a law, to a child of ten.",
    "Tell a short story about a cat that is afraid of mice.",
    "How does a refrigerator keep food cold?",
    "What are the advantages of working from home, and what is difficult about it?",
    "Describe a market on a summer morning.",
)


def make_chat_prompts(num_prompts: int) -> dict[str, list[str]]:
    """At most so many prompts of each kind, `copy` and `open`; the package's own, and more questions."""
    package = get_default_prompts("torch:")
    texts = {
        kind: [prompt.turns[0][0].text for prompt in package if prompt.category == kind]
        for kind in (*COPY_CATEGORIES, "open")
    }
    copies = [text for kind in COPY_CATEGORIES for text in texts[kind]]
    return {"copy": copies[:num_prompts], "open": [*texts["open"], *OPEN_QUESTIONS][:num_prompts]}
