"""WholeDraft: what a draft writes when it is let write to its end."""

from __future__ import annotations

from dataclasses import dataclass

from llm_spec.chat import ChatRequest, Usage
from llm_spec.config import SpeculativeConfig
from llm_spec.errors import one_line
from llm_spec.provider import DraftProvider

__all__ = ["WholeDraft"]

_DRAFT_TOKENS = 1024  # where the request sets no limit


@dataclass(slots=True)
class WholeDraft:
    """What a draft has written so far."""

    text: str = ""
    usage: Usage | None = None
    failure: str | None = None

    async def collect(self, draft: DraftProvider, request: ChatRequest, config: SpeculativeConfig) -> None:
        """Let it write; whatever goes wrong is told by `failure`."""
        limit = config.max_draft_tokens if config.max_draft_tokens is not None else request.max_tokens or _DRAFT_TOKENS
        if limit < 1:
            return
        try:
            async with draft.draft(request, limit) as pieces:
                async for piece in pieces:
                    self.text += piece.text
                    self.usage = piece.usage or self.usage
        except Exception as error:  # noqa: BLE001 - whatever a draft does, the target answers
            self.failure = one_line(error)
