"""Bodies to values: the same values in both ways, and no more of them than can be read in a moment."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_spec.server import json_decoder
from llm_spec.server.json_decoder import (
    MAX_MEMBERS,
    MAX_NUMBER_CHARS,
    MAX_VALUES,
    decode_json,
    decode_long_json,
    run_in_body_thread,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values, st.booleans())
def test_both_ways_give_the_same_value(value: Any, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, indent=1).encode()
    assert decode_long_json(data) == decode_json(data) == value


@given(st.text(alphabet='{}[]",:0123eE-+.tfn \\udx', max_size=30))
def test_both_ways_refuse_the_same(text: str) -> None:
    def read(reader: Any) -> Any:
        try:
            return reader(text.encode())
        except ValueError:
            return ValueError

    assert read(decode_long_json) == read(decode_json)


HALVES = ("\\ud83d", "\\uDe00", "\\udBFF", "\\u00e9", "\\\\", "\\n", '\\"', "u", "d", "8", "é")


@given(st.lists(st.sampled_from(HALVES)))
def test_half_a_character_is_refused(pieces: list[str]) -> None:
    data = f'"{"".join(pieces)}"'
    try:
        json.loads(data).encode()
    except UnicodeEncodeError:
        for read in (decode_json, decode_long_json):
            with pytest.raises(ValueError, match="surrogates"):
                read(data.encode())
    else:
        assert decode_long_json(data.encode()) == decode_json(data.encode()) == json.loads(data)


def lists(number: int) -> str:
    return f"[{','.join(['[]'] * number)}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lists(MAX_MEMBERS), None),
        (lists(MAX_MEMBERS + 1), "10001 members"),
        (f'{{"messages": {lists(MAX_MEMBERS + 1)}}}', "10001 members"),
        (json.dumps(dict.fromkeys(map(str, range(MAX_MEMBERS + 1)))), "10001 members"),
        (json.dumps(list(range(MAX_MEMBERS + 1))), None),
        (json.dumps({str(index): 0 for index in range(MAX_VALUES // 4)}), r"values \(a key counts as 4\)"),
        (json.dumps([[0] * 9] * (MAX_VALUES // 10)), "members"),
        (json.dumps([0] * (MAX_VALUES - 1)), None),
        (json.dumps([0] * MAX_VALUES), None),
        (json.dumps([0] * (MAX_VALUES + 1)), "more than 250000 values"),
        (json.dumps([[[0] * 99] * 99] * 30), "more than 250000 values"),
        (f'{{"a": 0.{"1" * (MAX_NUMBER_CHARS - 2)}, "b": "{"1" * 2 * MAX_NUMBER_CHARS}"}}', None),
        (f'{{"a": 0.{"1" * (MAX_NUMBER_CHARS - 1)}}}', "a number in it has more than 4300 characters"),
        (f" 0.{'1' * (MAX_NUMBER_CHARS - 1)}", "a number in it has more than 4300 characters"),
        ('{"a": 1e999}', "the number 1e999 is too large"),
        ('{"a": NaN}', "not a number"),
        ('{"a": "\\ud800"}', "surrogates"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_a_long_body_has_so_many_values(text: str, words: str | None) -> None:
    """Text that is only long is no trouble; many values and long numbers are."""
    if words is None:
        assert decode_long_json(text.encode()) == json.loads(text)
        return
    with pytest.raises(ValueError, match=words):
        decode_long_json(text.encode())


async def test_long_bodies_wait_for_each_other() -> None:
    """One thread beside the event loop's is all that it has to wait for."""
    names = await asyncio.gather(*(run_in_body_thread(lambda: threading.current_thread().name) for _ in range(8)))
    assert len(set(names)) == 1
    assert names[0] != threading.current_thread().name


async def test_other_threads_run_while_a_long_body_is_read() -> None:
    data = json.dumps([0] * MAX_VALUES).encode()
    turns = 0
    reading = asyncio.create_task(run_in_body_thread(decode_long_json, data))
    while not reading.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns >= 5


ESCAPED = [
    "\\n",
    "\\\\",
    '\\"',
    "\\u00e9",
    "\\ud83d\\ude00",
    "\\uD83E\\uDD89",
    "x",
    "é",
    "🦉",
    " ",
    "\\\\" * 7,
    ",[{:",
    ":,",
]


@pytest.mark.parametrize("seed", range(40))
def test_values_are_counted_outside_of_texts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a piece ends, what stands in a text counts for nothing."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    texts = ["".join(chance.choices(ESCAPED, k=chance.randrange(40))) for _ in range(20)]
    whole = "[" + ", ".join(f'{{"{text}": ["{text}", 1]}}' for text in texts) + "]"
    num_values = 1 + 19 + 20 * (1 + 4 + 2)  # a list, its commas, and 20 objects with a key, a list and a comma each
    monkeypatch.setattr(json_decoder, "_PIECE_BYTES", chance.randrange(1, 30))
    monkeypatch.setattr(json_decoder, "MAX_VALUES", num_values)
    assert decode_long_json(whole.encode()) == json.loads(whole)
    monkeypatch.setattr(json_decoder, "MAX_VALUES", num_values - 1)
    with pytest.raises(ValueError, match=r"values \(a key counts as 4\)"):
        decode_long_json(whole.encode())


def test_a_bytearray_is_not_kept_beside_its_text() -> None:
    data = bytearray(b'{"a": "b"}')
    assert decode_long_json(data) == {"a": "b"}
    assert not data
