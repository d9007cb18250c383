"""What a strategy is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, Protocol, get_args

from llm_spec.chat import METADATA_FIELDS, ChatRequest, Guarantee, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import Feature
from llm_spec.pair_stats import PairStats

__all__ = ["Strategy", "TextGuarantee", "find_multi_call_refusal"]

_STRONGEST_FIRST: Final[tuple[Guarantee, ...]] = get_args(Guarantee)


class TextGuarantee(NamedTuple):
    """What a strategy guarantees of its text. `same_text`: it equals, byte for byte, what the target alone writes."""

    guarantee: Guarantee
    same_text: bool

    def weaken_to(self, guarantee: Guarantee) -> TextGuarantee:
        """What is left of it where a part of the text has this guarantee only."""
        weakest = max(_STRONGEST_FIRST.index(self.guarantee), _STRONGEST_FIRST.index(guarantee))
        return TextGuarantee(_STRONGEST_FIRST[weakest], same_text=False)


class Strategy(Protocol):
    """A way for a target to verify a draft. Stateless: everything of a request lives in `run`."""

    @property
    def name(self) -> str: ...

    @property
    def needed_feature(self) -> Feature | None:
        """What the target should be asked for before `find_refusal` is."""
        ...

    def find_refusal(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> str | None:
        """Why this pair cannot serve this request in this way; None: it can."""
        ...

    def text_guarantee(self, target: LlmProvider, config: SpeculativeConfig) -> TextGuarantee:
        """What holds for the text that `run` gives."""
        ...

    def run(
        self,
        draft: DraftProvider | None,
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        pair_stats: PairStats,
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Answer: verified text alone, a `Round` after each round, at most one `Fallback`, a `Finish` at the end.

        `GuaranteeWeakened` comes before text of which less than `text_guarantee` holds. It decides by `pair_stats`, and
        adds what it measures to them. A failing draft never raises out of it; a failing target does. Leaving the
        context ends all work behind it.
        """
        ...


def find_multi_call_refusal(request: ChatRequest) -> str | None:
    """Why an answer to this request cannot be put together from several calls of a server; None: it can."""
    sampling = request.sampling
    unsupported = {
        "raw": request.raw,
        "tools": request.tools,
        "response_format": request.response_format,
        "extra": request.extra.keys() - METADATA_FIELDS,  # whatever it is: it may depend on what has been written
        "presence_penalty": sampling.presence_penalty,  # servers count penalties over what one call wrote
        "frequency_penalty": sampling.frequency_penalty,
    }
    name = next((name for name, value in unsupported.items() if value), None)
    return None if name is None else f"the request sets {name}"
