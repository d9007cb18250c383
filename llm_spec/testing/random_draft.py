"""A draft that knows nothing: answers must not depend on it, and its cost is the worst case."""

from __future__ import annotations

import random
import string
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Final

from llm_spec.contract.checks import check_number
from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.contract.entry import ProviderEntry
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.token_model import DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.kit.server_addresses import strip_credentials
from llm_spec.measure.tokens import stream_texts_as_draft_pieces

if TYPE_CHECKING:
    from llm_spec.contract.request import ChatRequest

__all__ = ["RANDOM_DRAFT", "RandomDraft"]


class RandomDraft:
    """Draft random ids of the target's vocabulary, or random words.

    Every request of one seed gets the same draft. A `DraftProvider` and `TokenDrafter` that never
    ends by itself.
    """

    capabilities = DraftCapabilities(is_free=True)

    def __init__(self, seed: int = 0) -> None:
        check_number(ConfigError, "seed", seed, 0, integer=True)
        self.name = f"random:{seed}"
        self._seed = seed

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:  # noqa: ARG002 - it reads nothing
        rng = self._make_rng()
        async with aclosing(stream_texts_as_draft_pieces([_draw_word(rng) for _ in range(max_tokens)])) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""

    def token_draft_refusal(self, target: TokenModel) -> None:  # noqa: ARG002 - any vocabulary will do
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002 - it reads nothing
        return _RandomTokenDraft(self._make_rng(), target.vocab_size)

    def _make_rng(self) -> random.Random:
        return random.Random(self._seed)  # noqa: S311 - repeatable, not secret


class _RandomTokenDraft:
    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:  # noqa: ARG002 - it reads nothing
        while True:
            yield DraftToken(self._rng.randrange(self._vocab_size))

    def close(self) -> None:
        """Nothing to release."""


def _draw_word(rng: random.Random) -> str:
    return " " + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8)))


def _load_random_draft(model: str, base_url: str | None) -> RandomDraft:
    if base_url is not None:
        raise ConfigError(f"random takes no address; leave out '@{strip_credentials(base_url)}'")
    if model and not (model.isascii() and model.isdecimal()):
        raise ConfigError(f"random's seed is {model!r}; write 'random' or 'random:SEED', SEED a whole number from 0")
    return RandomDraft(int(model or 0))


RANDOM_DRAFT: Final = ProviderEntry(load=_load_random_draft, summary="draft for tests: random tokens", is_free=True)
