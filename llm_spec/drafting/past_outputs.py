"""Past answers, by the vocabulary of their token ids: a bounded memory that requests share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

from llm_spec.drafting.suffix_automaton import SuffixAutomaton
from llm_spec.local.forks import reset_in_forked_child

__all__ = ["PastAnswers"]

_AutomataByVocabulary: TypeAlias = dict[str, SuffixAutomaton[int]]  # tokenizer fingerprint -> answers


class PastAnswers:
    """The latest answers, at most `max_tokens` tokens of all vocabularies together, at least half as many once full.

    An automaton can forget nothing, so there are two shelves: when the new one is full, it takes the place of the old
    one, whose answers are dropped. Adding holds `lock` for some microseconds a token; hold it while reading a shelf.
    """

    def __init__(self, max_tokens: int, max_match: int) -> None:
        self.lock = threading.Lock()
        self._capacity = max_tokens // 2  # of a shelf
        self._max_match = max_match
        self._new: _AutomataByVocabulary = {}
        self._old: _AutomataByVocabulary = {}
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        if self.lock.locked():  # somebody was in the middle of adding
            self._new, self._old = {}, {}
        self.lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens remembered."""
        with self.lock:
            return _count_automata_items(self._new) + _count_automata_items(self._old)

    def get_suffix_automata(self, fingerprint: str) -> list[SuffixAutomaton[int]]:
        """The answers in one vocabulary, the newer first; they may grow, and are kept for those who hold them."""
        with self.lock:
            return [automata[fingerprint] for automata in (self._new, self._old) if fingerprint in automata]

    def add_answer(self, fingerprint: str, token_ids: Sequence[int]) -> None:
        """Remember an answer; of one that is too long, its end."""
        token_ids = token_ids[max(0, len(token_ids) - self._capacity) :]
        if not token_ids:
            return
        with self.lock:
            if _count_automata_items(self._new) + len(token_ids) > self._capacity:
                self._old, self._new = self._new, {}
            if fingerprint not in self._new:
                self._new[fingerprint] = SuffixAutomaton(self._max_match)
            self._new[fingerprint].begin_sequence()
            self._new[fingerprint].extend(token_ids)


def _count_automata_items(automata: _AutomataByVocabulary) -> int:
    return sum(answers.num_items for answers in automata.values())
