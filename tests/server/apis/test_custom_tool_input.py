"""The input of a custom tool arrives, however its model wrote the JSON around it, and in whatever pieces."""

from __future__ import annotations

import json
from typing import Final

import pytest

from llm_spec.server.apis.custom_tool_input import CustomInputDecoder, decode_custom_input, encode_custom_input

TEXTS: Final = ("", "a", 'say "hi"\n', "back\\slash \\n", "ünï ✓ 😀", "\t{}\u2028\r\n", '"', "}", '"}', "\\u00fc", " ")
BADLY_WRITTEN: Final = {  # arguments: input
    "": "",
    "{}": "",
    " {} ": "",
    "*** Begin Patch\n": "*** Begin Patch\n",
    '{"inp': '{"inp',
    '{"input"': '{"input"',
    '{"input": 5}': '{"input": 5}',
    '{"patch": "x"}': '{"patch": "x"}',
    "[1]": "[1]",
    '"text"': '"text"',
    '{"input": "cut': "cut",
    '{"input": "cut\\': "cut\\",
    '{"input": "cut\\u00': "cut\\u00",
    '{"input": "closed"': "closed",
    '{"input": "line\nbreak\t"}': "line\nbreak\t",
    '{"input": "say "hi" now"}': 'say "hi" now',
    '{"input": "regex \\d+"}': "regex \\d+",
    '{"input": "half \\ud83d"}': "half \N{REPLACEMENT CHARACTER}",
    '{"input": "half \\ud83d, and more"}': "half \N{REPLACEMENT CHARACTER}, and more",
    '{"input": "other \\ude00 half"}': "other \N{REPLACEMENT CHARACTER} half",
    '{"input": "two \\ud83d\\ud83d\\ude00"}': "two \N{REPLACEMENT CHARACTER}😀",
    '{"input": "x", "more": 1}': 'x", "more": 1}',
    ' {\n "input" :\t"spaced" }\n': "spaced",
}


def decode_in_pieces(arguments: str, size: int) -> str:
    decoder = CustomInputDecoder()
    pieces = [decoder.decode_piece(arguments[i : i + size]) for i in range(0, len(arguments), size)]
    return "".join([*pieces, decoder.decode_rest()])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_written_well_is_decoded(text: str, size: int) -> None:
    for arguments in (encode_custom_input(text), json.dumps({"input": text}), json.dumps({"input": text}, indent=1)):
        assert decode_in_pieces(arguments, size) == text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("arguments", BADLY_WRITTEN)
def test_nothing_is_lost_of_what_is_written_badly(arguments: str, size: int) -> None:
    assert decode_in_pieces(arguments, size) == BADLY_WRITTEN[arguments]
    assert decode_custom_input(arguments) == BADLY_WRITTEN[arguments]


def test_the_input_comes_while_it_is_written() -> None:
    """Text is held only where it may go on as an escape, or end."""
    decoder = CustomInputDecoder()
    pieces = ['{"inp', 'ut": "on', "e tw", 'o \\"', "three", '"', "}"]
    assert [decoder.decode_piece(piece) for piece in pieces] == ["", "on", "e tw", 'o "', "three", "", ""]
    assert decoder.decode_rest() == ""


def test_arguments_in_another_form_come_at_once() -> None:
    decoder = CustomInputDecoder()
    assert [decoder.decode_piece(piece) for piece in ("***", " Begin")] == ["***", " Begin"]
