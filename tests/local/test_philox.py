"""Philox 4x32-10 gives the published words, in every kind of number that it is used with."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (pytest.approx and scipy are partly untyped)

import numpy as np
import pytest

from llm_spec.local.noise import Words, philox4x32

ONES = 0xFFFFFFFF
RANDOM123 = [  # counter, key, words: kat_vectors of the Random123 distribution
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), RANDOM123)
def test_random123_vectors_in_plain_integers(counter: Words, key: tuple[int, int], words: Words) -> None:
    """Plain integers give the Random123 words."""
    assert philox4x32(counter, key) == words


@pytest.mark.parametrize(("counter", "key", "words"), RANDOM123)
def test_random123_vectors_in_numpy(counter: Words, key: tuple[int, int], words: Words) -> None:
    """numpy int64 arrays give the Random123 words, as int64."""
    found = philox4x32(_arrays(counter), key)
    assert [word.tolist() for word in found] == [[word] for word in words]
    assert all(word.dtype == np.int64 for word in found)


@pytest.mark.parametrize(("counter", "key", "words"), RANDOM123)
def test_random123_vectors_in_torch(counter: Words, key: tuple[int, int], words: Words) -> None:
    """torch int64 tensors give the Random123 words."""
    torch = pytest.importorskip("torch")
    found = philox4x32(tuple(torch.from_numpy(word) for word in _arrays(counter)), key)
    assert [word.tolist() for word in found] == [[word] for word in words]


def test_counter_words_broadcast_and_equal_the_plain_integers() -> None:
    """Words of an array of counters are those of each counter alone."""
    rows, columns = np.array([[7], [2**32 - 1]]), np.array([[0, 1, 2**31]])
    key = (123, 2**32 - 5)
    found = philox4x32((columns, rows, np.int64(0), 9), key)
    for row in range(2):
        for column in range(3):
            alone = philox4x32((int(columns[0, column]), int(rows[row, 0]), 0, 9), key)
            assert tuple(int(word[row, column]) for word in found) == alone


def test_inputs_are_left_alone() -> None:
    """The counter arrays are not written to."""
    counter = _arrays((1, 2, 3, 4))
    philox4x32(counter, (5, 6))
    assert [word.tolist() for word in counter] == [[1], [2], [3], [4]]


def _arrays(counter: Words) -> Words:
    c0, c1, c2, c3 = (np.array([word], dtype=np.int64) for word in counter)
    return c0, c1, c2, c3
