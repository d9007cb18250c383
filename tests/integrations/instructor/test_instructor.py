"""instructor: answers in a Pydantic class, by tools, JSON and a schema, whole and piece by piece."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("instructor")

import instructor
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.two_servers import MODEL


class Sum(BaseModel):
    """The sum that is reported."""

    total: int


SUM: Any = {"model": MODEL, "messages": [{"role": "user", "content": "The sum is 42"}], "response_model": Sum}


def client(url: str, mode: instructor.Mode) -> instructor.AsyncInstructor:
    return instructor.from_openai(AsyncOpenAI(base_url=f"{url}/v1", api_key="none-such", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
async def test_an_answer_is_an_object(url: str, mode: instructor.Mode) -> None:
    answer = await client(url, mode).chat.completions.create(**SUM)
    assert isinstance(answer, Sum)
    assert answer.total == 42


async def test_an_object_comes_piece_by_piece(url: str) -> None:
    pieces = [piece async for piece in client(url, instructor.Mode.TOOLS).chat.completions.create_partial(**SUM)]
    assert pieces[-1].total == 42


async def test_several_objects_come_one_by_one(url: str) -> None:
    found = client(url, instructor.Mode.TOOLS).chat.completions.create_iterable(**SUM)
    assert all(isinstance(one, Sum) for one in [one async for one in found])
