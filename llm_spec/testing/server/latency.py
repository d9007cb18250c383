"""The times of a server, and its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from llm_spec.contract.checks import check_number

__all__ = ["PrefixCache", "ServerLatency"]

_BLOCK: Final = 16  # tokens, vLLM's default


@dataclass(frozen=True, kw_only=True)
class ServerLatency:
    """The times of tokens.

    The first takes `first_token_s` plus the prompt at `prefill_tokens_per_s`, every other one
    `token_s`.

    `cached`: prompt tokens that the server has computed before take no time, in whole blocks of 16
    from the beginning of the prompt. The other tokens of all prompts of a batch add up.
    `max_streams`: the most requests answered at once (a batch is one); the others wait.
    `round_trip_s`: added to every request of any path.
    """

    first_token_s: float = 0.0
    token_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    cached: bool = True
    max_streams: int | None = None
    round_trip_s: float = 0.0

    def __post_init__(self) -> None:
        check_number(ValueError, "first_token_s", self.first_token_s, 0)
        check_number(ValueError, "token_s", self.token_s, 0)
        check_number(ValueError, "prefill_tokens_per_s", self.prefill_tokens_per_s, 0, above=True)
        check_number(ValueError, "max_streams", self.max_streams, 1, integer=True)
        check_number(ValueError, "round_trip_s", self.round_trip_s, 0)

    def compute_first_token_s(self, num_computed_tokens: int) -> float:
        """Return the seconds to the first token, for the prompt tokens that are not cached."""
        rate = self.prefill_tokens_per_s
        return self.first_token_s + (num_computed_tokens / rate if rate else 0.0)


class PrefixCache:
    """The beginnings of all prompts so far, in whole blocks; it forgets none."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def count_cached_and_add_prompt(self, token_ids: Sequence[int]) -> int:
        """Count the leading tokens of a prompt that were cached, and add the prompt.

        Its last token never counts, since its logits are needed.
        """
        hashes = _hash_prefix_blocks(token_ids)
        num_blocks = sum(1 for _ in takewhile(self._hashes.__contains__, hashes))
        self._hashes.update(hashes)
        return min(num_blocks, max(0, len(token_ids) - 1) // _BLOCK) * _BLOCK


def _hash_prefix_blocks(token_ids: Sequence[int]) -> list[int]:
    """Return one hash for each whole block, of all tokens up to its end."""
    hashes: list[int] = []
    before = 0
    for end in range(_BLOCK, len(token_ids) + 1, _BLOCK):
        before = hash((before, *token_ids[end - _BLOCK : end]))
        hashes.append(before)
    return hashes
