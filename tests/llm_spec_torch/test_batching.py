"""Requests that share forward passes: each says what it says alone, and none pays for another's fault."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_spec_torch import TorchModel, TorchProvider, pass_queue
from llm_spec_torch.network import AttentionShape, KeyValueCache, TransformerNetwork
from llm_spec_torch.session import TorchSession
from support.text_checks import check_greedy_text, check_rows, check_texts

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    Fixed,
    ModelOutputError,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
    TextDelta,
    open_provider,
)
from llm_spec.local.caches import PREFILL_CHUNK_TOKENS, prefill_prompt
from llm_spec.testing import RandomDraft, check_provider_conformance, check_token_model_conformance

from .conftest import PAIR, MakeCheckpoint

pytestmark = pytest.mark.slow

NUM = 8
WIDTH = 6
LONG_S = 120.0
IDS = [int(t) for t in np.random.default_rng(5).integers(8, 4096, 900)]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("def f(x):", {"max_tokens": 20, "temperature": 0.0}),
    ("def test_fd_close(self):", {"max_tokens": 31, "temperature": 1.0, "seed": 1}),
    ("x = 1\n" * 120, {"max_tokens": 12, "temperature": 1.0, "seed": 2}),
    ("x = 1\n" * 60 + "y", {"max_tokens": 24, "temperature": 0.7, "seed": 3, "top_p": 0.9}),
    ("import os\nimport sys\n", {"max_tokens": 28, "temperature": 0.9, "seed": 4, "repetition_penalty": 1.2}),
    ("z", {"max_tokens": 9, "temperature": 1.0, "seed": 4, "top_k": 20}),
    ("class Parser:\n    def __init__(self):", {"max_tokens": 26, "temperature": 0.8, "seed": 6, "stop": ["self"]}),
    ("def f(x):", {"max_tokens": 20, "temperature": 1.0, "seed": 7, "logit_bias": {70: 2.0}}),
]

Drafts = Callable[[TorchProvider], Sequence[Any]]


@pytest.fixture(scope="module", params=[True, None], ids=["one shape", "by load"])
def target(request: pytest.FixtureRequest, tiny_folder: Path) -> TorchProvider:
    return open_sharing(tiny_folder, is_one_shape=request.param is True)


def open_sharing(folder: Path, *, is_one_shape: bool) -> TorchProvider:
    """A target whose answers share passes, all of one shape, or whenever several wait."""
    if is_one_shape:
        return TorchProvider(folder, batched=True, max_width=WIDTH)
    provider = TorchProvider(folder, max_width=WIDTH)
    if provider.model._batching is None:
        pytest.skip("rows of joined passes have other bits on this machine")
    return provider


@pytest.fixture(scope="module")
def one_shape(tiny_folder: Path) -> TorchProvider:
    """A target whose passes all have one shape, whatever this CPU's kernels make of rows in it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("llm_spec_torch.model.do_joined_passes_agree", lambda *_: True)
        return TorchProvider(tiny_folder, batched=True, max_width=WIDTH)


@pytest.fixture(scope="module")
def batched_pair() -> tuple[TorchProvider, TorchProvider]:
    return TorchProvider(PAIR / "target", batched=True, max_width=WIDTH), TorchProvider(PAIR / "draft", batched=True)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes go together whenever they can, however slow the machine is."""
    monkeypatch.setattr(pass_queue, "_MAX_WAIT_RATIO", 1e6)


def one_of_each(target: TorchProvider) -> list[Any]:
    draft = TorchProvider(target.model.make_early_exit_draft(2))
    return [
        None,
        ProviderDraft(draft),
        PromptLookup(),
        RandomDraft(3),
        ProviderDraft(TorchProvider(target.model.make_early_exit_draft(1))),
        CascadeDraft(PromptLookup(), ProviderDraft(draft)),
        ReferenceDraft("    self.assertEqual(fd.close(), None)\n"),
        ProviderDraft(draft),
    ]


DRAFTS: dict[str, Drafts] = {
    "none": lambda _: [None] * NUM,
    "early exit": lambda target: [ProviderDraft(TorchProvider(target.model.make_early_exit_draft(2)))] * NUM,
    "lookup": lambda _: [PromptLookup()] * NUM,
    "useless": lambda _: [RandomDraft(3)] * NUM,
    "one of each": one_of_each,
}


def decoder_for(target: TorchProvider, draft: Any, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        target=target, draft=draft, config=SpeculativeConfig(strategy="tokens", **config) if draft else None
    )


async def texts_alone(target: TorchProvider, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Speculation off, one at a time."""
    plain = SpeculativeDecoder(target=target, draft=None)
    return [(await plain.decode(prompt, **options)).content for prompt, options in asked]


async def check_together(target: TorchProvider, drafts: Sequence[Any], **config: Any) -> None:
    expected = await texts_alone(target, ASKED)
    decoders = [decoder_for(target, draft, **config) for draft in drafts]
    results = await asyncio.gather(
        *(decoder.decode(prompt, **options) for decoder, (prompt, options) in zip(decoders, ASKED, strict=True))
    )
    check_texts([result.content for result in results], expected, target.model)
    spoken = [result for result in results if result.stats.num_spec_steps]
    assert all((result.same_text, result.guarantee) == (target.model.same_text, "exact") for result in spoken)
    assert not any(result.fallbacks for result in results)


# ------------------------------------------------------------------------------------------ same text


@pytest.mark.parametrize("lookahead", [0, 2, 5])
@pytest.mark.parametrize("drafts", DRAFTS)
async def test_eight_at_once_say_what_each_says_alone(target: TorchProvider, drafts: str, lookahead: int) -> None:
    """Prompts, lengths, seeds, sampling and drafts of their own; alone means one at a time, speculation off."""
    config = {"lookahead": Fixed(lookahead)} if lookahead else {}
    await check_together(target, DRAFTS[drafts](target), **config)


async def test_the_trained_pair_says_the_same(batched_pair: tuple[TorchProvider, TorchProvider]) -> None:
    """With a draft that is often right, alone and behind lookup, whose sessions share passes too."""
    draft = ProviderDraft(batched_pair[1])
    await check_together(batched_pair[0], [draft, CascadeDraft(PromptLookup(), draft)] * (NUM // 2))


async def test_a_model_that_drafts_for_itself_says_the_same(target: TorchProvider) -> None:
    """Exact sessions and others of one set of caches take turns: four requests have eight places."""
    expected = (await texts_alone(target, ASKED))[:4]
    decoder = decoder_for(target, ProviderDraft(target), lookahead=Fixed(3))
    results = await asyncio.gather(*(decoder.decode(prompt, **options) for prompt, options in ASKED[:4]))
    check_texts([result.content for result in results], expected, target.model)
    assert not any(result.fallbacks for result in results)


async def test_speculation_alone_says_the_same(target: TorchProvider) -> None:
    """One at a time, in the shape that all eight have together."""
    expected = await texts_alone(target, ASKED)
    alone = [
        (await decoder_for(target, draft).decode(prompt, **options)).content
        for draft, (prompt, options) in zip(one_of_each(target), ASKED, strict=True)
    ]
    check_texts(alone, expected, target.model)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "qwen2-window", "qwen3"])
async def test_other_families_say_the_same(make_checkpoint: MakeCheckpoint, family: str) -> None:
    """Windows smaller than a pass is wide and soft caps among them; slots without tokens lie behind every window."""
    options: dict[str, Any] = {"max_width": 14} if family == "gemma2" else {"max_width": WIDTH}
    target = TorchProvider(make_checkpoint(family), batched=True, max_requests=NUM, **options)
    await check_together(target, [PromptLookup()] * NUM)


def test_padding_behind_the_keys_is_no_nan(make_checkpoint: MakeCheckpoint) -> None:
    """Just before a border of attention's steps, padding lies farther behind it than a window reaches."""
    model = TorchModel(make_checkpoint("gemma2"), batched=True, max_requests=2, max_width=14)
    with closing(model.open()) as session:
        prefill_prompt(session, IDS[:505])
        for token_id in IDS[505:520]:
            assert np.isfinite(session.forward([token_id], num_rows=1)).all()


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"attention": "eager"}, {"max_requests": 3}])
async def test_other_options_say_the_same(tiny_folder: Path, options: dict[str, Any]) -> None:
    """In half precision, with torch's plain attention, with fewer places than requests."""
    target = TorchProvider(tiny_folder, batched=True, max_width=WIDTH, **options)
    await check_together(target, [RandomDraft(3)] * NUM)


async def test_twelve_with_eight_places(target: TorchProvider) -> None:
    """Those that find no place wait, and say what they say alone."""
    asked = [ASKED[n % NUM] for n in range(12)]
    expected = await texts_alone(target, asked)
    decoder = decoder_for(target, PromptLookup())
    results = await asyncio.gather(*(decoder.decode(prompt, **options) for prompt, options in asked))
    check_texts([result.content for result in results], expected, target.model)


async def test_joining_and_leaving_midway_changes_nothing(target: TorchProvider) -> None:
    """Some are left while the others answer, others come in between."""
    expected = await texts_alone(target, ASKED)
    decoders = [decoder_for(target, draft) for draft in one_of_each(target)]

    async def stay(number: int, delay_s: float) -> str:
        await asyncio.sleep(delay_s)
        prompt, options = ASKED[number]
        return (await decoders[number].decode(prompt, **options)).content

    async def forget_slot(number: int) -> None:
        prompt, options = ASKED[number]
        options = {**options, "max_tokens": 200, "stop": ()}
        async with decoders[number].stream(ChatRequest.create(prompt, **options)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    return

    for order in range(3):
        stayed = await asyncio.gather(
            *(stay(number, 0.004 * ((number + order) % 4)) for number in range(NUM - 3)),
            *(forget_slot((number + order) % NUM) for number in range(3)),
        )
        check_texts(stayed[: NUM - 3], expected[: NUM - 3], target.model)


async def test_a_cancelled_request_keeps_nobody_waiting(target: TorchProvider) -> None:
    """Of eight tasks every other one is cancelled; the rest end, and the model answers as before."""
    expected = await texts_alone(target, ASKED)
    decoder = decoder_for(target, RandomDraft(3))
    tasks = [asyncio.ensure_future(decoder.decode(prompt, **options)) for prompt, options in ASKED]
    await asyncio.sleep(0.01)
    for task in tasks[::2]:
        task.cancel()
    async with asyncio.timeout(LONG_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    stayed = [result.content for result in results[1::2] if not isinstance(result, BaseException)]
    check_texts(stayed, expected[1::2], target.model)
    check_texts(await texts_alone(target, ASKED[:1]), expected[:1], target.model)


async def test_statistics_are_a_requests_own(target: TorchProvider) -> None:
    """Rounds, drafted and accepted tokens are those of the same request alone."""
    decoders = [decoder_for(target, PromptLookup(), lookahead=Fixed(3)) for _ in ASKED]

    async def ask(number: int) -> tuple[int, int, int]:
        prompt, options = ASKED[number]
        stats = (await decoders[number].decode(prompt, **options)).stats
        return stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens

    alone = [await ask(number) for number in range(NUM)]
    check_texts(await asyncio.gather(*(ask(number) for number in range(NUM))), alone, target.model)


# ------------------------------------------------------------------------------------ sharing, bit for bit


def in_threads(*calls: Callable[[], Any], begun: Callable[[], None] = lambda: None) -> list[Any]:
    """What each gave, or its error; each in a thread of its own. `begun` is called when all have begun."""
    outcomes: list[Any] = [None] * len(calls)

    def work(index: int) -> None:
        try:
            outcomes[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            outcomes[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    begun()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    return outcomes


def in_one_pass(target: TorchProvider, *calls: Callable[[], Any]) -> list[Any]:
    """What each gave, or its error; all have handed in their passes before one is run."""
    batching = target.model._batching
    assert batching is not None
    queue = batching._queue
    queue._has_leader = True

    def lead_again() -> None:
        end_s = time.monotonic() + LONG_S
        while len(queue._waiting) < len(calls):
            assert time.monotonic() < end_s
            time.sleep(0.001)
        with queue._lock:
            queue._stop_leading()

    return in_threads(*calls, begun=lead_again)


def steps(session: TorchSession, prompt: Sequence[int], passes: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The logits of passes behind a prompt."""
    prefill_prompt(session, prompt)
    rows = [session.forward(token_ids, num_rows=len(token_ids)).copy() for token_ids in passes]
    session.close()
    return rows


def some_passes(number: int) -> list[list[int]]:
    """Passes of 1 to WIDTH tokens."""
    draws = np.random.default_rng(number)
    return [[int(t) for t in draws.integers(8, 4096, draws.integers(1, WIDTH + 1))] for _ in range(12)]


@pytest.mark.usefixtures("patient")
def test_ragged_positions_have_the_logits_of_each_alone(target: TorchProvider) -> None:
    """Prompts of 3 to 600 tokens, passes of 1 to 6, over borders of attention's steps."""
    lengths = (3, 20, 250, 255, 256, 300, 505, 600)
    alone = [steps(target.model.open(), IDS[:n], some_passes(n)) for n in lengths]
    sessions = [target.model.open() for _ in lengths]
    together = in_threads(
        *(lambda s=s, n=n: steps(s, IDS[:n], some_passes(n)) for s, n in zip(sessions, lengths, strict=True))
    )
    for found, expected in zip(together, alone, strict=True):
        for some, others in zip(found, expected, strict=True):
            check_rows(some, others, target.model)


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all passes from now on."""
    shapes: list[tuple[int, ...]] = []
    right = TransformerNetwork.compute_hidden_states

    def counted(self: TransformerNetwork, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(token_ids.shape))
        return right(self, token_ids, *rest)

    monkeypatch.setattr(TransformerNetwork, "compute_hidden_states", counted)
    return shapes


@pytest.mark.usefixtures("patient")
async def test_passes_are_shared(one_shape: TorchProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight answers of twenty tokens that begin together take little more than twenty passes, all of one shape."""
    batching = one_shape.model._batching
    assert batching is not None
    run_pass, all_begin, begun = batching._queue.run_pass, threading.Barrier(NUM), set[int]()

    def begin_together(runner: Any, forward_pass: Any) -> Any:
        """However late the last thread starts; prompts have been read before."""
        if runner.max_tokens is not None and forward_pass.slot.index not in begun:
            begun.add(forward_pass.slot.index)
            all_begin.wait(LONG_S)
        return run_pass(runner, forward_pass)

    monkeypatch.setattr(batching._queue, "run_pass", begin_together)
    shapes = count_forwards(monkeypatch)
    plain = SpeculativeDecoder(target=one_shape, draft=None)
    results = await asyncio.gather(
        *(plain.decode("def f(x):", max_tokens=20, temperature=1.0, seed=seed) for seed in range(NUM))
    )
    num_tokens = sum(result.usage.output_tokens for result in results if result.usage)
    rounds = [shape for shape in shapes if shape == (NUM, WIDTH)]
    prompts = [shape for shape in shapes if shape[0] == 1]
    assert len(rounds) + len(prompts) == len(shapes)
    assert len(prompts) <= NUM
    assert num_tokens > 6 * len(rounds)


async def test_drafts_share_passes_too(one_shape: TorchProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """As narrow as their tokens."""
    draft = TorchProvider(one_shape.model.make_early_exit_draft(2))
    batching = draft.model._batching
    assert batching is not None
    queue = batching._queue

    def await_others(runner: Any, _: int) -> None:
        """However slow the machine is; the target's queue does not wait so long, or each would wait for the other."""
        while queue._histories[runner].slots - queue._find_waiting_slots(runner):
            assert queue._pass_arrived.wait(LONG_S)

    monkeypatch.setattr(queue, "_wait_for_expected_slots", await_others)
    decoder = decoder_for(one_shape, ProviderDraft(draft), lookahead=Fixed(3))
    shapes = count_forwards(monkeypatch)
    results = await asyncio.gather(
        *(decoder.decode("def f(x):", max_tokens=20, temperature=1.0, seed=seed) for seed in range(NUM))
    )
    num_draft_tokens = sum(result.stats.num_draft_tokens for result in results)
    narrow = [shape for shape in shapes if shape[1] < WIDTH]
    assert num_draft_tokens > 2 * len(narrow)
    assert any(shape[0] > 1 for shape in narrow)


def test_an_idle_prefix_survives(target: TorchProvider) -> None:
    """What a later request takes over is not written over by those that run meanwhile."""
    prompt = IDS[: PREFILL_CHUNK_TOKENS + 20]
    expected = steps(target.model.open(), prompt, some_passes(1))
    others = [target.model.open() for _ in range(NUM - 1)]
    for number, session in enumerate(others):
        prefill_prompt(session, IDS[400 : 420 + number])
    for token_ids in some_passes(2):
        in_threads(*(lambda s=session, t=token_ids: s.forward(t, num_rows=1) for session in others))
    with closing(target.model.open()) as again:
        assert again.reuse_prefix(prompt) == PREFILL_CHUNK_TOKENS
        again.forward(prompt[PREFILL_CHUNK_TOKENS:], num_rows=1)
        rows = [again.forward(token_ids, num_rows=len(token_ids)).copy() for token_ids in some_passes(1)]
    for session in others:
        session.close()
    for found, alone in zip(rows, expected, strict=True):
        check_rows(found, alone, target.model)


# --------------------------------------------------------------------------------------------- faults


@pytest.fixture
def three(target: TorchProvider) -> Iterator[list[TorchSession]]:
    """Sessions that have read something."""
    sessions = [target.model.open() for _ in range(3)]
    for number, session in enumerate(sessions):
        prefill_prompt(session, IDS[: 20 + 5 * number])
    yield sessions
    for session in sessions:
        session.close()


def next_rows(target: TorchProvider, sessions: Sequence[TorchSession]) -> list[Any]:
    return in_one_pass(target, *(lambda s=session: s.forward([9, 10], num_rows=2).copy() for session in sessions))


def test_nan_in_one_is_its_own(target: TorchProvider, three: list[TorchSession]) -> None:
    """It fails with one clear error, and the others' logits are those of a pass without it."""
    expected = next_rows(target, three)
    for session in three:
        session.truncate(session.length - 2)
    slot = three[1]._acquire_slot()
    slot.cache.layers[0][0, 3] = float("nan")
    found = next_rows(target, three)
    assert isinstance(found[1], ModelOutputError)
    for number in (0, 2):
        check_rows(found[number], expected[number], target.model)
    assert all(bool(stored.isfinite().all()) for stored in target.model._pool.cache.layers)
    assert three[1].length == 0


@pytest.mark.parametrize("is_one_shape", [True, False])
async def test_nan_in_all_leaves_nothing_behind(tiny_folder: Path, is_one_shape: bool) -> None:
    """Not in the places of slots that took no part either: the provider answers as before."""
    provider = open_sharing(tiny_folder, is_one_shape=is_one_shape)
    expected = await texts_alone(provider, ASKED[:2])
    embedding = provider.model._network.embedding
    kept = embedding.clone()
    embedding.fill_(float("nan"))
    plain = SpeculativeDecoder(target=provider, draft=None)
    errors = await asyncio.gather(*(plain.decode(p, **o) for p, o in ASKED[:2]), return_exceptions=True)
    session = provider.model.open()
    with pytest.raises(ModelOutputError, match="NaN"):
        session.forward([5], num_rows=1)
    session.close()
    embedding.copy_(kept)
    assert [type(error) for error in errors] == [ModelOutputError] * 2
    assert all(bool(s.isfinite().all()) for s in provider.model._pool.cache.layers)
    check_texts(await texts_alone(provider, ASKED[:2]), expected, provider.model)


def test_out_of_memory_is_for_those_who_took_part(
    target: TorchProvider, three: list[TorchSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is reported with advice; nothing of the pass is left, and the next one is run."""
    expected = next_rows(target, three)
    for session in three:
        session.truncate(session.length - 2)

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(TransformerNetwork, "_run_layers", exhausted)
        errors = next_rows(target, three)
    assert all(isinstance(error, TargetError) for error in errors)
    assert all("lower cache_gib or max_requests" in str(error) for error in errors)
    assert len({id(error) for error in errors}) == 3
    for found, rows in zip(next_rows(target, three), expected, strict=True):
        check_rows(found, rows, target.model)


async def test_a_failing_draft_leaves_the_others_alone(target: TorchProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request's draft breaks in a shared pass: those that drafted with it go on plain, with the same text."""
    expected = await texts_alone(target, ASKED)
    draft = TorchProvider(target.model.make_early_exit_draft(2))
    right = TransformerNetwork._run_layers
    calls = iter(range(10**6))

    def failing(self: TransformerNetwork, *rest: Any) -> torch.Tensor:
        if self is draft.model._network and next(calls) == 5:
            raise RuntimeError("the device is gone")
        return right(self, *rest)

    monkeypatch.setattr(TransformerNetwork, "_run_layers", failing)
    decoder = decoder_for(target, ProviderDraft(draft), lookahead=Fixed(3))
    results = await asyncio.gather(*(decoder.decode(prompt, **options) for prompt, options in ASKED))
    check_texts([result.content for result in results], expected, target.model)
    assert any(result.fallbacks for result in results)


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4


async def test_memory_does_not_grow(tiny_folder: Path) -> None:
    """Hundreds of requests, eight at a time, some of which are left. Kept logits would take 48 MiB.

    Whichever thread leads allocates, so glibc's arenas, one a thread, all come to hold as much as one did (measured: 29
    MiB after 4,000 requests and no more later; with MALLOC_ARENA_MAX=1 none from the first hundreds on).
    """
    provider = TorchProvider(tiny_folder, batched=True, max_width=WIDTH)
    decoder = decoder_for(provider, PromptLookup())

    async def ask(number: int) -> None:
        async with decoder.stream(
            ChatRequest.create(f"x{number}", max_tokens=4, seed=number, temperature=1.0)
        ) as events:
            async for _ in events:
                if number % 5 == 0:
                    break

    sizes: list[int] = []
    for number in range(60):
        await asyncio.gather(*(ask(NUM * number + k) for k in range(NUM)))
        if number % 20 == 19:
            gc.collect()
            sizes.append(resident_kib())
    assert sizes[-1] - sizes[0] < 32 * 1024, sizes
    batching: Any = provider.model._batching
    assert batching._queue._waiting == []
    assert not any(habit.slots for habit in batching._queue._histories.values())
    assert len(provider.model._pool._idle) == NUM


@pytest.mark.parametrize("batched", [False, True, None])
async def test_memory_goes_with_the_last_reference(tiny_folder: Path, batched: bool | None) -> None:
    """At once: a model of tens of gigabytes cannot wait for the collector of cycles."""
    options: Any = {} if batched is None else {"batched": batched}
    provider = TorchProvider(tiny_folder, max_requests=2, **options)
    await provider.complete(ChatRequest.create("x", max_tokens=3))
    gc.collect()
    gc.disable()
    try:
        cache = weakref.ref(provider.model._pool.cache.layers[0])
        await provider.aclose()
        del provider
        assert cache() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------- planted faults


def wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot's rows stand where its neighbour's should."""
    right = TransformerNetwork.compute_hidden_states

    def hidden(
        self: TransformerNetwork, ids: torch.Tensor, positions: torch.Tensor, cache: KeyValueCache, num_keys: int
    ) -> torch.Tensor:
        rolled = positions.roll(1, 0).clamp(max=num_keys - 1) if len(positions) > 1 else positions
        return right(self, ids, rolled, cache, num_keys)

    monkeypatch.setattr(TransformerNetwork, "compute_hidden_states", hidden)


def scratch_in_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows without tokens write lands in the first places of the slot behind theirs."""
    right = TransformerNetwork.compute_hidden_states

    def hidden(
        self: TransformerNetwork, ids: torch.Tensor, positions: torch.Tensor, cache: KeyValueCache, num_keys: int
    ) -> torch.Tensor:
        states = right(self, ids, positions, cache, num_keys)
        batch, width = ids.shape
        for index in range(batch if batch > 1 else 0):
            if int(positions[index, -1]) == cache.capacity - 1:
                for stored in cache.layers:
                    stored[(index + 1) % batch, :width] = stored[index, -width:]
        return states

    monkeypatch.setattr(TransformerNetwork, "compute_hidden_states", hidden)


def neighbours_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot's rows see as far as its neighbour's should."""
    right = TransformerNetwork._make_attention_mask
    monkeypatch.setattr(TransformerNetwork, "_make_attention_mask", lambda self, *rest: right(self, *rest).roll(1, 0))


def neighbours_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads what the neighbour has cached."""
    right = AttentionShape.__call__
    monkeypatch.setattr(
        AttentionShape, "__call__", lambda self, q, keys, values, bias: right(self, q, keys.roll(1, 0), values, bias)
    )


def bits_by_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sums in another order where there are more keys."""
    right = AttentionShape.__call__
    monkeypatch.setattr(
        AttentionShape,
        "__call__",
        lambda self, q, keys, values, bias: right(self, q, keys, values, bias) * (1 + 1e-7 * (keys.shape[2] // 256)),
    )


def bits_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that treats the last rows of a product in another way."""
    right = TransformerNetwork.compute_hidden_states

    def hidden(self: TransformerNetwork, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        states = right(self, ids, *rest)
        states[-1] *= 1 + 1e-6
        return states

    monkeypatch.setattr(TransformerNetwork, "compute_hidden_states", hidden)


def bits_by_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale taken over all rows of a pass, as some quantized kernels do."""
    right = TransformerNetwork.compute_hidden_states
    monkeypatch.setattr(
        TransformerNetwork,
        "compute_hidden_states",
        lambda *rest: (states := right(*rest)) * (1 + 1e-6 * states.abs().max()),
    )


@pytest.mark.parametrize(
    "fault",
    [
        wrong_positions,
        scratch_in_a_prefix,
        neighbours_mask,
        neighbours_keys,
        bits_by_number_of_keys,
        bits_by_slot,
        bits_by_company,
    ],
)
def test_a_planted_fault_is_caught_when_the_model_is_loaded(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The claim to give the same text is dropped."""
    fault(monkeypatch)
    assert not TorchModel(tiny_folder, batched=True, max_width=WIDTH).same_text


@pytest.mark.parametrize("fault", [wrong_positions, scratch_in_a_prefix, neighbours_keys])
async def test_a_planted_fault_changes_texts(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """So the comparison of texts in this file would find it too."""
    provider = TorchProvider(tiny_folder, batched=True, max_width=WIDTH)
    monkeypatch.setattr(pass_queue, "_MAX_WAIT_RATIO", 1e6)
    expected = await texts_alone(provider, ASKED)
    fault(monkeypatch)
    plain = SpeculativeDecoder(target=provider, draft=None)
    results = await asyncio.gather(*(plain.decode(p, **o) for p, o in ASKED[1:]), return_exceptions=True)
    assert [getattr(result, "content", None) for result in results] != expected[1:]


async def test_without_the_check_it_promises_nothing(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be shown the result says so; requests share passes all the same."""
    with monkeypatch.context() as patched:
        bits_by_slot(patched)
        provider = TorchProvider(tiny_folder, batched=True, max_width=WIDTH)
    shapes = count_forwards(monkeypatch)
    decoder = decoder_for(provider, PromptLookup())
    results = await asyncio.gather(*(decoder.decode(prompt, **options) for prompt, options in ASKED))
    assert not any(result.same_text for result in results)
    assert any(shape[0] > 1 for shape in shapes)


# ------------------------------------------------------------------------------------------ contracts


@pytest.mark.parametrize("options", [{}, {"exact": False}, {"max_requests": 2}, {"max_context": 300}])
def test_keeps_the_promises_of_a_token_model(tiny_folder: Path, options: dict[str, Any]) -> None:
    """Shared passes or not, it is a token model like any other."""
    options = {"max_requests": 4, **options}
    model = TorchModel(tiny_folder, batched=True, max_width=WIDTH, **options)
    assert options.get("exact", True) or not model.same_text
    check_token_model_conformance(model)


async def test_keeps_the_promises_of_a_provider(tiny_folder: Path) -> None:
    """Streaming, leaving, errors."""
    await check_provider_conformance(
        lambda: TorchProvider(tiny_folder, batched=True, max_width=WIDTH), patience_s=600.0
    )


def test_a_string_asks_for_it(tiny_folder: Path) -> None:
    """As for any other option."""
    model: Any = open_provider(f"torch:{tiny_folder}?batched=true&max_width=4").capabilities.token_model
    assert model.max_width == 4
    assert model._batching is not None


async def test_its_greedy_text_is_that_of_a_model_that_shares_nothing(pair: tuple[Any, Any], batched_pair: Any) -> None:
    """On ten prompts, up to a near-tie, which other shapes may decide in another way."""
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:10]
    requests = [ChatRequest.create(json.loads(line)["messages"], max_tokens=32) for line in lines]
    together = await asyncio.gather(*(batched_pair[0].complete(request) for request in requests))
    model: TorchModel = pair[0].model
    for request, response in zip(requests, together, strict=True):
        token_ids = model.tokenizer.encode_chat(request)
        prompt_length, rows = len(token_ids), list[np.ndarray]()
        with closing(model.open()) as session:
            prefill_prompt(session, token_ids[:-1])
            while len(rows) < 32 and token_ids[-1] not in model.tokenizer.eos_token_ids:
                rows.append(session.forward(token_ids[-1:], num_rows=1)[0].copy())
                token_ids.append(int(rows[-1].argmax()))
        text = response.message.content
        assert isinstance(text, str)
        check_greedy_text(text, token_ids[prompt_length:], model.tokenizer, lambda ids, rows=rows: rows[len(ids)])
