"""What a call counts that fails: a request that nobody read is not charged for."""

from __future__ import annotations

import gc

import pytest

from llm_spec import ChatRequest, SpeculativeDecoder, TargetError, Usage
from llm_spec.contract.response import complete_from_stream
from llm_spec.decoder.feature_discovery import FeatureDiscovery
from llm_spec.decoder.metered import MeteredTarget
from llm_spec.decoder.metering import TokenMeter
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedTarget

REQUEST = ChatRequest.create("two words")


@pytest.mark.parametrize(("num_words", "usage"), [(0, Usage()), (3, Usage(input_tokens=2, output_tokens=3))])
async def test_a_stream_that_fails_counts_what_came(num_words: int, usage: Usage) -> None:
    """What came before the failure was paid for, with its input; where nothing came, nothing was."""
    target = ScriptedProvider("word " * num_words, fail_at={num_words: TargetError("refused", status=500)})
    meter = TokenMeter(REQUEST)
    metered = MeteredTarget(target, meter, FeatureDiscovery(target))
    with pytest.raises(TargetError, match="refused"):
        await complete_from_stream(metered, REQUEST)
    assert (meter.num_calls, meter.usage) == (min(1, num_words), usage)


def test_what_a_plain_answer_held_is_freed_at_once() -> None:
    """Its events too: none waits for the garbage collector, which would take a server's time now and then."""

    async def answer() -> None:
        decoder = SpeculativeDecoder(
            target=SimulatedTarget("one two three", first_token_s=0.1, token_s=0.1), draft=None
        )
        async with decoder.stream("tell") as events:
            async for _ in events:
                pass

    run_virtual(answer())
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run_virtual(answer())
        gc.collect()
        left = [type(value).__name__ for value in gc.garbage if type(value).__module__.startswith("llm_spec")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []
