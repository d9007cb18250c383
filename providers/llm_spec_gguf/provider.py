"""GgufProvider: a chat model from a GGUF file, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from llm_spec.kit.local_provider import TokenModelProvider
from llm_spec_gguf.model import GgufModel
from llm_spec_gguf.options import GgufOptions

__all__ = ["GgufProvider"]


class GgufProvider(TokenModelProvider[GgufModel]):
    """Answers with a GGUF file through llama.cpp, in a worker thread.

    Arguments and errors are those of GgufModel.
    """

    def __init__(self, path: str | Path, *, name: str | None = None, **options: Unpack[GgufOptions]) -> None:
        super().__init__(GgufModel(path, name=name, **options))

    async def aclose(self) -> None:
        """End open answers and release their caches.

        The weights are freed with the last reference to the provider.
        """
        await super().aclose()
        self.model.close()
