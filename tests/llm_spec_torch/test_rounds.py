"""Rounds on the device: the texts of rounds by way of the host, nothing asked of the device, borders, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llm_spec_torch import TorchModel, TorchProvider
from support.text_checks import check_one_text, check_texts
from torch.utils._python_dispatch import TorchDispatchMode

from llm_spec import (
    CascadeDraft,
    CostAware,
    Fixed,
    ModelOutputError,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
)
from llm_spec.contract.events import LocalTimings
from llm_spec.local.lookahead import LookaheadPolicy
from llm_spec.testing import RandomDraft

from .conftest import PAIR
from .test_exactness import SAMPLING, drafts_for

pytestmark = pytest.mark.slow

PROMPT = "def test_fd_close(self):"


@pytest.fixture(scope="module")
def on_device() -> tuple[TorchProvider, TorchProvider]:
    """The trained pair, with whole rounds on its device (here: a CPU)."""
    return TorchProvider(PAIR / "target", device_rounds=True), TorchProvider(PAIR / "draft", device_rounds=True)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("draft", ["model", "early exit", "useless", "lookup", "joined"])
async def test_the_text_is_that_of_rounds_by_way_of_the_host(
    on_device: tuple[Any, Any], pair: tuple[Any, Any], draft: str, sampling: str
) -> None:
    """Speculation on and off on the device, and off by way of the host: one text."""
    options = {"max_tokens": 32, **SAMPLING[sampling]}
    by_host = await SpeculativeDecoder(target=pair[0], draft=None).decode(PROMPT, **options)
    plain = await SpeculativeDecoder(target=on_device[0], draft=None).decode(PROMPT, **options)
    check_texts([plain.content], [by_host.content], on_device[0].model)
    policies: list[LookaheadPolicy] = [Fixed(1), Fixed(6), CostAware()]
    for lookahead in policies:
        decoder = SpeculativeDecoder(
            target=on_device[0],
            draft=drafts_for(*on_device)[draft],
            config=SpeculativeConfig(strategy="tokens", lookahead=lookahead),
        )
        result = await decoder.decode(PROMPT, **options)
        check_one_text(result, plain, on_device[0].model)
        assert result.stats.num_draft_tokens or draft == "lookup"  # which may have nothing to say


async def test_rounds_draft_where_the_target_lives(on_device: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model draft proposes nothing by way of the host."""
    from llm_spec.drafting.provider_draft import ProviderDraft as Draft

    def refuse(*_: object) -> None:
        raise AssertionError("a draft was opened on the host")

    monkeypatch.setattr(Draft, "open_token_draft", refuse)
    result = await SpeculativeDecoder(target=on_device[0], draft=ProviderDraft(on_device[1])).decode(
        PROMPT, max_tokens=32
    )
    assert result.stats.num_accepted_draft_tokens > 8
    assert result.fallbacks == ()


async def test_a_text_goes_on_over_borders_of_attention(tiny_folder: Any) -> None:
    """Rounds never straddle a number of keys, and drafted tokens on both sides of one are judged."""
    host, device = TorchProvider(tiny_folder), TorchProvider(tiny_folder, device_rounds=True)
    prompt = "x" * 120
    options: dict[str, Any] = {"max_tokens": 500, "temperature": 1.0, "seed": 9}
    plain = await SpeculativeDecoder(target=host, draft=None).decode(prompt, **options)
    for draft in (ProviderDraft(device), PromptLookup()):
        config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(7))
        check_one_text(
            await SpeculativeDecoder(target=device, draft=draft, config=config).decode(prompt, **options),
            plain,
            device.model,
        )


async def test_a_draft_of_a_shorter_context_stops_drafting(tiny_folder: Any) -> None:
    """And the target goes on."""
    target = TorchProvider(tiny_folder, device_rounds=True)
    draft = TorchProvider(tiny_folder, device_rounds=True, max_context=256)
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4))
    options: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0, "seed": 9, "logit_bias": {7: -100.0}}
    plain = await SpeculativeDecoder(target=target, draft=None).decode("x" * 200, **options)
    result = await SpeculativeDecoder(target=target, draft=ProviderDraft(draft), config=config).decode(
        "x" * 200, **options
    )
    check_one_text(result, plain, target.model)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("caps", [(None, 0), (None, 3), (2, 7), (5, None)])
async def test_caps_hold_exactly_on_the_device(
    on_device: tuple[Any, Any], caps: tuple[int | None, int | None], *, joined: bool
) -> None:
    """Rounds and drafted tokens, whoever drafts; also where the device has begun a round that nobody will read."""
    max_iterations, max_draft_tokens = caps
    model = ProviderDraft(on_device[1])
    config = SpeculativeConfig(
        strategy="tokens", lookahead=Fixed(4), max_iterations=max_iterations, max_draft_tokens=max_draft_tokens
    )
    decoder = SpeculativeDecoder(
        target=on_device[0], draft=CascadeDraft(PromptLookup(), model) if joined else model, config=config
    )
    result = await decoder.decode(PROMPT, max_tokens=40, temperature=0)
    if max_iterations is None:
        assert result.stats.num_draft_tokens == max_draft_tokens
        assert result.stopped_by == "max_tokens"
    else:
        assert (result.stats.num_rounds, result.stopped_by) == (max_iterations, "max_iterations")
        assert max_draft_tokens is None or result.stats.num_draft_tokens <= max_draft_tokens


class NoQuestions(TorchDispatchMode):
    """Raises where an operation needs a value from the device, or makes a shape of one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique", "_to_copy.cpu", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.FORBIDDEN):
            raise AssertionError(f"{func} asks the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_round_asks_the_device_for_nothing(on_device: tuple[Any, Any], sampling: str) -> None:
    """Drafting, verifying, accepting: only the report is read, after the round."""
    from llm_spec import ChatRequest

    options = {name: value for name, value in SAMPLING[sampling].items() if name not in {"stop", "response_format"}}
    request = ChatRequest.create(PROMPT, **options)
    target, draft = (provider.model for provider in on_device)
    prompt_ids = target.tokenizer.encode_chat(request)
    rounds = target.open_rounds(prompt_ids, request.sampling, 1, draft, lambda: False)
    assert rounds is not None
    with torch.inference_mode(), NoQuestions():
        for lookahead in (0, 1, 5):
            rounds._start_round(lookahead)
    rounds.close()


def test_a_question_is_noticed() -> None:
    """The guard of the test above."""
    with pytest.raises(AssertionError, match="asks the device"), NoQuestions():
        torch.ones(3).sum().item()


async def test_nan_is_one_clear_error(tiny_folder: Any) -> None:
    """And the provider answers as before, on the same cache."""
    provider = TorchProvider(tiny_folder, device_rounds=True, max_requests=1)
    decoder = SpeculativeDecoder(target=provider, draft=ProviderDraft(TorchProvider(tiny_folder)))
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    expected = await decoder.decode("x", **options)
    embedding = provider.model._network.embedding
    kept = embedding.clone()
    embedding.fill_(float("nan"))
    with pytest.raises(ModelOutputError, match="NaN"):
        await decoder.decode("y", **options)
    embedding.copy_(kept)
    assert (await decoder.decode("x", **options)).content == expected.content


async def test_nan_of_the_draft_is_its_own_trouble(tiny_folder: Any) -> None:
    """The answer is the plain one."""
    target, draft = TorchProvider(tiny_folder, device_rounds=True), TorchProvider(tiny_folder)
    plain = await SpeculativeDecoder(target=target, draft=None).decode("x", max_tokens=8)
    draft.model._network.embedding.fill_(float("nan"))
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(3))
    result = await SpeculativeDecoder(target=target, draft=ProviderDraft(draft), config=config).decode(
        "x", max_tokens=8
    )
    assert result.fallbacks
    check_texts([result.content], [plain.content], target.model)


@pytest.mark.parametrize("fault", ["one token early", "accept all"])
async def test_planted_faults_are_caught(fault: str, tiny_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong position of the noise, and acceptance of whatever was drafted, change the text."""
    from llm_spec_torch.sampling import DeviceSampler, DeviceVerifyResult

    right = DeviceSampler.verify

    def wrong(self: DeviceSampler, logits: Any, position: Any, drafted_ids: Any) -> DeviceVerifyResult:
        if fault == "one token early":
            return right(self, logits, position - (1 if drafted_ids.shape[-1] else 0), drafted_ids)
        verdict = right(self, logits, position, drafted_ids)
        ids = torch.cat([drafted_ids, verdict.token_ids[-1:]])
        return DeviceVerifyResult(ids, torch.full_like(verdict.num_accepted, drafted_ids.shape[-1]))

    target = TorchProvider(tiny_folder, device_rounds=True)
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 1}
    plain = await SpeculativeDecoder(target=target, draft=None).decode(PROMPT, **options)
    monkeypatch.setattr(DeviceSampler, "verify", wrong)
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(3))
    result = await SpeculativeDecoder(target=target, draft=RandomDraft(1), config=config).decode(PROMPT, **options)
    assert result.content != plain.content


def test_rounds_need_two_tokens_and_a_model_of_their_own(tiny_model: TorchModel) -> None:
    """Otherwise the host does them."""
    from llm_spec import Sampling

    assert tiny_model.open_rounds([5, 6, 7], Sampling(), 1, None, lambda: False) is None


async def test_attention_ends_where_the_cache_ends(tiny_folder: Any) -> None:
    """A context that is no multiple of attention's steps is used to its end, by a plain target and by a draft."""
    target = TorchProvider(tiny_folder, device_rounds=True, max_context=300)
    host = TorchProvider(tiny_folder, max_context=300)
    options: dict[str, Any] = {"max_tokens": 500, "temperature": 1.0, "seed": 9, "logit_bias": {7: -100.0}}
    expected = await SpeculativeDecoder(target=host, draft=None).decode("x" * 100, **options)
    assert expected.stopped_by == "context_length"
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(5))
    for draft in (None, ProviderDraft(target), PromptLookup()):
        decoder = SpeculativeDecoder(target=target, draft=draft, config=config if draft else None)
        result = await decoder.decode("x" * 100, **options)
        assert result.stopped_by == "context_length"
        check_texts([result.content], [expected.content], target.model)


async def test_a_prompt_too_long_for_the_draft_is_the_drafts_trouble(tiny_folder: Any) -> None:
    """The draft reads nothing of it, the target answers, and the result tells why."""
    target = TorchProvider(tiny_folder, device_rounds=True)
    draft = TorchProvider(tiny_folder, max_context=256)
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(3))
    result = await SpeculativeDecoder(target=target, draft=ProviderDraft(draft), config=config).decode(
        "x = 1\n" * 100, max_tokens=8
    )
    assert result.usage is not None
    assert any("takes fewer than 256" in reason for reason in result.fallbacks)


async def test_a_draft_without_a_free_cache_is_left_out(tiny_folder: Any) -> None:
    """Two requests, one cache for drafting: both are answered."""
    import asyncio

    target = TorchProvider(tiny_folder, device_rounds=True)
    draft = TorchProvider(tiny_folder, device_rounds=True, max_requests=1)
    decoder = SpeculativeDecoder(
        target=target, draft=ProviderDraft(draft), config=SpeculativeConfig(strategy="tokens", lookahead=Fixed(3))
    )
    options: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "seed": 3, "logit_bias": {7: -100.0}}
    results = await asyncio.gather(*(decoder.decode("x", **options) for _ in range(2)))
    check_texts([results[0].content], [results[1].content], target.model)


@pytest.mark.parametrize("given", [False, True])
def test_other_rounds_leave_no_hole_in_the_drafts_cache(on_device: tuple[Any, Any], *, given: bool) -> None:
    """After many rounds that it had no part in, it drafts as well as one that has read every token."""
    from llm_spec import ChatRequest

    request = ChatRequest.create(PROMPT, temperature=0)
    target, draft = (provider.model for provider in on_device)
    prompt_ids = target.tokenizer.encode_chat(request)
    for slot in draft._pool._idle:
        slot.erase()  # leftovers of the same text would fill a hole
    accepted: list[int] = []
    for fresh in (False, True):
        rounds = target.open_rounds(prompt_ids, request.sampling, 1, draft, lambda: False)
        assert rounds is not None
        context = list(prompt_ids)
        for _ in range(40):
            done = rounds.verify([5, 6]) if given else rounds.draft_and_verify(0, 100)
            context += [*done.drafted_ids[: done.num_accepted], done.next_token_id]
        if fresh:
            rounds.close()
            rounds = target.open_rounds(context, request.sampling, 1, draft, lambda: False)
            assert rounds is not None
        accepted.append(sum(rounds.draft_and_verify(4, 100).num_accepted for _ in range(10)))
        rounds.close()
    assert accepted[0] == accepted[1]


async def test_the_drafts_opening_is_timed_apart_from_the_prompt(on_device: tuple[Any, Any]) -> None:
    """Also where it is opened with the target, on the device; an answer without one opens none."""
    decoder = SpeculativeDecoder(
        target=on_device[0], draft=ProviderDraft(on_device[1]), config=SpeculativeConfig(strategy="tokens")
    )
    for one, has_draft in ((decoder, True), (SpeculativeDecoder(target=on_device[0], draft=None), False)):
        async with one.stream(PROMPT, max_tokens=4, rounds=True) as events:
            times = [event async for event in events if isinstance(event, LocalTimings)]
        assert len(times) == 1
        assert times[0].prompt_s > 0
        assert (times[0].open_draft_s > 0) is has_draft


async def test_lookup_goes_before_a_model_on_the_device(
    on_device: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both draft: given tokens are verified, and where lookup is unsure the model drafts where the target lives."""
    from llm_spec_torch.rounds import TorchRoundRunner

    from llm_spec.drafting.provider_draft import ProviderDraft as Draft

    calls: list[str] = []

    def counted(name: str) -> Any:
        right = getattr(TorchRoundRunner, name)

        def call(self: TorchRoundRunner, *args: Any) -> Any:
            calls.append(name)
            return right(self, *args)

        return call

    def refuse(*_: object) -> None:
        raise AssertionError("the model was opened on the host")

    for name in ("verify", "draft_and_verify"):
        monkeypatch.setattr(TorchRoundRunner, name, counted(name))
    monkeypatch.setattr(Draft, "open_token_draft", refuse)
    options: dict[str, Any] = {"max_tokens": 64, "temperature": 0}
    plain = await SpeculativeDecoder(target=on_device[0], draft=None).decode(PROMPT, **options)
    calls.clear()
    draft = CascadeDraft(PromptLookup(), ProviderDraft(on_device[1]))
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(6))
    result = await SpeculativeDecoder(target=on_device[0], draft=draft, config=config).decode(PROMPT, **options)
    check_one_text(result, plain, on_device[0].model)
    assert {*calls} == {"verify", "draft_and_verify"}


def test_a_cancelled_prompt_gives_no_rounds(tiny_folder: Any) -> None:
    """Nor does it keep a cache."""
    from llm_spec import Sampling

    model = TorchModel(tiny_folder, device_rounds=True, max_requests=1)
    for _ in range(2):
        assert model.open_rounds([5, 6, 7], Sampling(), 1, model, lambda: True) is None
    assert model.open_rounds([5, 6, 7], Sampling(), 1, None, lambda: False) is not None
