"""Finds stop strings for which servers would cut elsewhere than this library. Pure.

This library reads an answer from several calls character by character: the stop string that is
complete first ends it. A server looks for stop strings after each token. If one token completes
two, vLLM and SGLang take the first in the request's list, and llama.cpp the one that begins first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Final

__all__ = ["may_token_complete_two"]

# What a token can hold. Tokenizers first split a text into: a word, with non-letters before it; or
# non-letters, with line breaks after them; or space.
_IN_ONE_TOKEN: Final = re.compile(r"[^\S\r\n]*[^\w\s]*(\w+('\w+)?|\s*)")

_MAX_STRINGS: Final = 16
_MAX_CHARACTERS: Final = 400  # of several strings together


def may_token_complete_two(stop: Sequence[str]) -> bool:
    """Return True if one token may complete two strings at which a server cuts elsewhere."""
    if len(stop) > _MAX_STRINGS or (len(stop) > 1 and sum(map(len, stop)) > _MAX_CHARACTERS):
        return True  # checking all of them would take long
    gaps = _list_gaps(stop)
    return any(
        _IN_ONE_TOKEN.fullmatch(token) is not None
        and not any(each in text[: len(text) - len(token)] for each in stop)
        and len({*_list_cuts(text, stop)}) > 1
        for first, other in permutations(dict.fromkeys(stop), 2)
        for text, token in _list_texts_that_end_with_both(first, other, gaps)
    )


def _list_gaps(stop: Sequence[str]) -> list[str]:
    """Return texts of each kind of characters that may stand between two stop strings.

    Each is in none of the strings, if possible.
    """
    kinds = ("abcdefghijklmnopqrstuvwxyz", ".,:;!?-+*/=<>()[]{}|#$%&@^~", " ", "\n")
    used = "".join(stop)
    return ["", *(next((character for character in kind if character not in used), kind[0]) for kind in kinds)]


def _list_texts_that_end_with_both(first: str, other: str, gaps: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield short texts in which `first` ends and then, or at once, `other`.

    Each comes with the token that would end both.
    """
    for num_after in range(len(other)):
        overlap = other[: len(other) - num_after]
        if first.endswith(overlap):
            yield first + other[len(overlap) :], other[len(overlap) - 1 :]
        elif overlap.endswith(first):
            yield other, other[len(overlap) - 1 :]
    for gap in gaps:
        yield first + gap + other, first[-1] + gap + other


def _list_cuts(text: str, stop: Sequence[str]) -> Iterator[int]:
    """Yield where a text is cut: here, by the list's first, and by the one that begins first."""
    places = [(text.find(each), each) for each in stop if each in text]
    yield min((at + len(each), at) for at, each in places)[1]
    yield places[0][0]
    yield min(places)[0]
