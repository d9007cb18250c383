"""What an `anthropic:` target may say in an answer, and what clients of every API are told."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.messages_wire import begin, end, frame, text_frames
from support.upstream import DOORS, Said, ask_door, upstream

pytestmark = pytest.mark.virtual_clock

# an answer with log-probabilities is not relayed: Claude has none, and requests for them are refused
CLAUDE_DOORS: Final = [door for door in DOORS if "relay" not in door]
CALL: Final = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-any")


def write_delta(delta: object, **fields: Any) -> bytes:
    return frame("content_block_delta", **({"index": 0, "delta": delta} | fields))


def write_call(**block: Any) -> list[bytes]:
    piece = {"type": "input_json_delta", "partial_json": '{"x": 1}'}
    return [
        *begin(),
        frame("content_block_start", index=0, content_block=CALL | block),
        write_delta(piece),
        frame("content_block_stop", index=0),
        *end("tool_use"),
    ]


@pytest.mark.parametrize(
    "frames",
    [
        [*begin(), *text_frames("4")[:-1], write_delta("2."), *end()],
        [*begin(), *text_frames("4")[:-1], write_delta(None), *end()],
        [*begin(), *text_frames("4")[:-1], write_delta({"type": "text_delta", "text": ["2."]}), *end()],
        [*begin(), *text_frames("4")[:-1], write_delta({"type": 7, "text": "2."}), *end()],
        [*begin(), *text_frames("4")[:-1], write_delta({}, type=None), *end()],
        [*begin(), frame("content_block_start", index=0, content_block=7), *text_frames("42.")[1:], *end()],
        write_call(name={"a": 1}),
        write_call(name=""),
        write_call(type="function"),
        write_call(type=["tool_use"]),
        [*begin(), *text_frames("half"), *end("abort")],
    ],
)
async def test_no_answer_is_shortened(frames: list[bytes]) -> None:
    """What cannot be read of an answer is an error to every client."""
    async with upstream("anthropic") as said:
        for door in CLAUDE_DOORS:
            said.say(*frames)
            assert await ask_door(said, door) in (Said(status=502), Said(status=0)), door


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([*begin(service_tier=["x"], speed={"a": 1}), *text_frames("42."), *end()], Said("42.", (), "stop")),
        ([*begin(), *text_frames("42."), *end(service_tier=7, output_tokens=[1])], Said("42.", (), "stop")),
        ([*begin(), *text_frames("42.", index={"a": 1}), *end()], Said("42.", (), "stop")),  # type: ignore[arg-type]  # it is wrong
        ([*begin(), *text_frames("42."), *end("a word nobody knows")], Said("42.", (), "length")),
        ([*begin(), b"event: ping\ndata: 1\n\n", *text_frames("42."), *end()], Said("42.", (), "stop")),
        (write_call(id=["a"]), Said("", (("f", {"x": 1}),), "tool_calls")),
        (write_call(id=7), Said("", (("f", {"x": 1}),), "tool_calls")),
        (write_call(input="x"), Said("", (("f", {"x": 1}),), "tool_calls")),
    ],
)  # fmt: skip
async def test_what_decides_nothing_costs_no_answer(frames: list[bytes], expected: Said) -> None:
    """It is read where it can be, and left out where not."""
    async with upstream("anthropic") as said:
        for door in CLAUDE_DOORS:
            said.say(*frames)
            assert await ask_door(said, door) == expected, door
