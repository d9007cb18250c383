"""Prompts for small chat models: `copy` ones, whose answers repeat the prompt, and `open` questions."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llm_spec.cli.bench.prompts import load_prompts

__all__ = ["KINDS", "load_chat_prompts"]

KINDS: Final = ("copy", "open")
_FILE: Final = Path(__file__).parent / "prompts" / "chat.jsonl"


def load_chat_prompts(num_prompts: int) -> dict[str, list[str]]:
    """At most so many prompts of each kind."""
    prompts = load_prompts(str(_FILE))
    return {
        kind: [prompt.turns[0][0].text for prompt in prompts if prompt.category == kind][:num_prompts] for kind in KINDS
    }
