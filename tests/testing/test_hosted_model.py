"""SimulatedHostedModel: it remembers what it has read, counts predictions and judges."""

from __future__ import annotations

from llm_spec import ChatMessage, ChatRequest, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.response import complete_from_stream
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.hosted_model import SimulatedHostedModel

WORDS = "".join(f"Line {n} of what is known.\n" for n in range(20))


# ------------------------------------------------------------------------------------------ the model behind it


def test_a_hosted_model_remembers_what_it_has_read() -> None:
    """The second prompt that begins like the first is cached as far as that."""

    async def check() -> None:
        model = SimulatedHostedModel("a b c", read_token_s=1.0)
        first = await complete_from_stream(model, ChatRequest.create("one two three"))
        second = await complete_from_stream(model, ChatRequest.create("one two four five"))
        assert first.usage is not None
        assert second.usage is not None
        assert (first.usage.input_tokens, first.usage.cached_input_tokens) == (3, 0)
        assert (second.usage.input_tokens, second.usage.cached_input_tokens) == (4, 2)

    run_virtual(check())


def test_a_hosted_model_counts_predictions() -> None:
    model = SimulatedHostedModel("a b c d")
    result = run_virtual(
        SpeculativeDecoder(
            target=model, draft=ReferenceDraft("a b x d e"), config=SpeculativeConfig(strategy="predict")
        ).decode("q")
    )
    assert result.usage is not None
    assert (result.usage.accepted_prediction_tokens, result.usage.rejected_prediction_tokens) == (3, 2)
    assert result.usage.output_tokens == 6


def test_a_hosted_model_judges() -> None:
    config = SpeculativeConfig(strategy="judge")
    result = run_virtual(
        SpeculativeDecoder(target=SimulatedHostedModel(WORDS), draft=ReferenceDraft(WORDS), config=config).decode("q")
    )
    assert (result.content, result.guarantee) == (WORDS, "judged")
    messages = (ChatMessage("user", "q"), ChatMessage("assistant", WORDS[:25]), ChatMessage("user", "go on"))
    rest = run_virtual(complete_from_stream(SimulatedHostedModel(WORDS), ChatRequest(messages=messages)))
    assert rest.content == WORDS[25:]
