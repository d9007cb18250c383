"""Faults that a test of sampled answers must find: where the draft is right, that is preferred.

`planted(strategy)` has every decoder that is opened within it answer with the fault.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from llm_spec_http.tokens import HttpTokenEndpoint

from llm_spec import Sampling
from llm_spec.contract.endpoint import SampledToken, TopTokens
from llm_spec.strategies.race.chain import RaceStream, StreamChain

__all__ = ["planted"]

_NUM_DRAWS: Final = 4
_ADDED_LOGPROB: Final = 2.0


class _DraftedFirst(StreamChain):
    """Where a stream departs from the draft, the one that was begun behind it is believed."""

    def _handle_departure_from_draft(self, stream: RaceStream) -> None:
        behind = self.streams[self.streams.index(stream) + 1 :]
        if stream.expected_ids is None or not behind or behind[0].timer.first_s is None:
            super()._handle_departure_from_draft(stream)
            return
        stream.text, stream.token_ids = stream.expected, list(stream.expected_ids)
        stream.num_tokens = len(stream.expected_ids)
        self._hand_over_to_next_stream(stream)


class _DrawnAgain(HttpTokenEndpoint):
    """Each row is drawn several times, and the draft's token is taken where it is among them."""

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        drawn = [await super(_DrawnAgain, self).sample_next(prefixes, sampling) for _ in range(_NUM_DRAWS)]
        drafted_ids = [*(prefix[-1] for prefix in prefixes[1:]), None]
        return [
            next((token for token in tokens if token.token_id == drafted_id), tokens[0])
            for *tokens, drafted_id in zip(*drawn, drafted_ids, strict=True)
        ]


class _DraftedLikelier(HttpTokenEndpoint):
    """Where the draft's token is among the likeliest, it is said to be likelier than it is."""

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        rows = await super().score(token_ids, num_rows=num_rows, top=top)
        drafted_ids = [*token_ids[len(token_ids) - num_rows + 1 :], None]
        return [_add_logprob(row, drafted_id) for row, drafted_id in zip(rows, drafted_ids, strict=True)]


def _add_logprob(row: TopTokens, drafted_id: int | None) -> TopTokens:
    changed = [(token_id, logprob + _ADDED_LOGPROB * (token_id == drafted_id)) for token_id, logprob in row.top]
    return TopTokens(tuple(sorted(changed, key=lambda each: each[1], reverse=True)))


_FAULTS: Final[dict[str, tuple[str, type[Any]]]] = {
    "race": ("llm_spec.strategies.race.race.StreamChain", _DraftedFirst),
    "probe": ("llm_spec_http.provider.HttpTokenEndpoint", _DrawnAgain),
    "score": ("llm_spec_http.provider.HttpTokenEndpoint", _DraftedLikelier),
}


@contextmanager
def planted(strategy: str) -> Generator[None]:
    """The strategy with its fault; providers have it that are made within."""
    with patch(*_FAULTS[strategy]):
        yield
