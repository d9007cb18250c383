"""A simulated target: what strategies may ask of it beside its answer."""

from __future__ import annotations

import pytest

from llm_spec.contract.request import Sampling
from llm_spec.testing.simulated import SimulatedTarget


@pytest.mark.virtual_clock
async def test_a_part_of_the_prompt_can_be_read_alone() -> None:
    """As a strategy does that times how long a prompt takes: the token after it is any."""
    target = SimulatedTarget("one two", by_ids=True, num_prompt_tokens=100)
    (after_part,) = await target.sample_next([[1] * 60], Sampling())
    (after_prompt,) = await target.sample_next([[1] * 100], Sampling())
    assert after_part.token_id == after_prompt.token_id
