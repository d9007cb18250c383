"""The measurement: every contender answers every prompt, in balanced order.

Times are taken around the decoder's public call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from llm_spec.cli.bench.contenders import Contender, format_error_without_secrets
from llm_spec.cli.bench.prompts import BenchPrompt
from llm_spec.cli.bench.records import AnswerKey, AnswerRecord, PromptBlockRecord, make_answer_record
from llm_spec.contract.checks import check_number
from llm_spec.contract.draft import DraftProvider, get_draft_capabilities
from llm_spec.contract.errors import ConfigError, LlmSpecError, TargetError
from llm_spec.contract.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.messages import ChatMessage
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.result import SpeculativeFinish, SpeculativeResult
from llm_spec.measure.clock import now

__all__ = [
    "BenchOptions",
    "BenchRun",
    "iterate_contender_orders",
]


def iterate_contender_orders(num_contenders: int, seed: int) -> Iterator[list[int]]:
    """Yield the order of contenders for one prompt after another, without end.

    Each run of `num_contenders` orders is a balanced square (Williams 1949). So the first place,
    and what a server's cache holds of the contender before, affect all contenders alike. The seed
    draws the contenders' places in each square and the order of its rows. An odd number needs two
    squares; the second is the first one reversed.
    """
    rng = random.Random(seed)  # noqa: S311 - no secret
    steps = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(num_contenders)]
    while True:
        names = rng.sample(range(num_contenders), num_contenders)
        square = [[names[(row + step) % num_contenders] for step in steps] for row in range(num_contenders)]
        rng.shuffle(square)
        yield from square
        if num_contenders % 2:
            yield from (order[::-1] for order in square)


_WARMUP_PROMPTS = ("Count from one to twenty in words.", "Name the months of the year.", "Say the alphabet.")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The settings of a measurement.

    - `concurrency`: prompts that a contender answers at the same time.
    - `warmup`: untimed requests to each decoder before the timed ones.
    - `repeat`: runs of all prompts, each with new decoders.
    - `seed`: of the order, and of the sampling of a model in this process.
    - `temperature`: 0 is greedy.
    - `streams`: `max_concurrent_streams` of the decoders.
    - `primes`: whether each prompt is sent to each target once in advance, for one token. Otherwise
      the first contender reads the prompt, and the others find it in the server's cache.
    """

    concurrency: int = 1
    warmup: int = 0
    repeat: int = 1
    seed: int = 0
    max_tokens: int = 256
    temperature: float = 0.0
    streams: int = 4
    primes: bool = True

    def __post_init__(self) -> None:
        check_number(ConfigError, "concurrency", self.concurrency, 1, integer=True)
        check_number(ConfigError, "warmup", self.warmup, 0, integer=True)
        check_number(ConfigError, "repeat", self.repeat, 1, integer=True)
        check_number(ConfigError, "seed", self.seed, 0, integer=True)
        # checks both
        ChatRequest.create("", max_tokens=self.max_tokens, temperature=self.temperature)


class BenchRun:
    """A measurement. `answers` and `blocks` hold the results so far, also after a cancellation.

    The others are compared with the first contender, plain. A contender that fails is left out from
    then on; if plain fails, the measurement ends. `on_progress` gets the number of answers so far,
    their planned number, and the name of the current contender. `priming_s` holds the times of the
    first calls with a prompt, by target.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        prompts: Sequence[BenchPrompt],
        options: BenchOptions,
        on_progress: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
    ) -> None:
        self.contenders = contenders
        self.prompts = prompts
        self.options = options
        self.answers: list[AnswerRecord] = []
        self.blocks: list[PromptBlockRecord] = []
        self.priming_s: dict[str, list[float]] = {}
        self.is_complete = False
        self._on_progress = on_progress
        self._num_done = 0
        num_turns = sum(len(prompt.turns) for prompt in prompts)
        self._num_planned = num_turns * options.repeat * len(contenders)
        self._orders = iterate_contender_orders(len(contenders), options.seed)
        self._decoders: list[SpeculativeDecoder | None] = []

    async def measure_all_contenders(self) -> None:
        """Answer all prompts. No failure of a model or server raises."""
        await self._call_each_model_once()
        for run in range(self.options.repeat):
            self._decoders = [contender.make_decoder() for contender in self.contenders]
            async with AsyncExitStack() as stack:
                for decoder in filter(None, self._decoders):
                    stack.push_async_callback(decoder.aclose)
                await self._warm_decoders()
                for block, indexes in enumerate(self._iterate_prompt_blocks()):
                    await self._measure_block(run, block, indexes, next(self._orders))
                    if self.contenders[0].failure is not None:
                        return
        self.is_complete = True

    def _iterate_prompt_blocks(self) -> Iterator[Sequence[int]]:
        size = self.options.concurrency
        for start in range(0, len(self.prompts), size):
            yield range(start, min(start + size, len(self.prompts)))

    async def _measure_block(self, run: int, block: int, indexes: Sequence[int], order: Sequence[int]) -> None:
        """Let all contenders answer some prompts, turn by turn.

        Plain's answers become part of the conversation.
        """
        said: dict[int, tuple[ChatMessage, ...]] = dict.fromkeys(indexes, ())
        turn = 0
        while said := {i: said[i] + self.prompts[i].turns[turn] for i in said if turn < len(self.prompts[i].turns)}:
            await self._prefill_targets(list(said.values()))
            by_plain: list[AnswerRecord] = []
            for place, index in enumerate(order):
                name = self.contenders[index].name
                keys = [
                    AnswerKey(run=run, block=block, prompt=prompt, turn=turn, contender=name, place=place)
                    for prompt in said
                ]
                answers = await self._answer_block_at_once(index, keys, list(said.values()))
                by_plain = answers if index == 0 else by_plain
            texts = {answer.key.prompt: answer.text for answer in by_plain}
            said = {i: (*said[i], ChatMessage("assistant", texts[i])) for i in said if texts.get(i)}
            turn += 1

    async def _answer_block_at_once(
        self, index: int, keys: Sequence[AnswerKey], conversations: Sequence[tuple[ChatMessage, ...]]
    ) -> list[AnswerRecord]:
        contender, decoder = self.contenders[index], self._decoders[index]
        if contender.failure is not None or decoder is None:
            self._num_done += len(keys)
            return []
        self._on_progress(self._num_done, self._num_planned, contender.name)
        began_s = now()
        pairs = zip(keys, conversations, strict=True)
        answers = await asyncio.gather(*(self._answer_timed(contender, decoder, key, said) for key, said in pairs))
        first = keys[0]
        self.blocks.append(
            PromptBlockRecord(
                run=first.run,
                block=first.block,
                turn=first.turn,
                contender=contender.name,
                total_s=_measure_s_since(began_s),
            )
        )
        self._num_done += len(keys)
        self._on_progress(self._num_done, self._num_planned, contender.name)
        return answers

    async def _answer_timed(
        self, contender: Contender, decoder: SpeculativeDecoder, key: AnswerKey, said: tuple[ChatMessage, ...]
    ) -> AnswerRecord:
        """Time one answer; a failure gives a record, too."""
        request, began_s, failure = self._make_request(contender, said), now(), None
        try:
            result, pieces_s = await _answer_with_piece_times(decoder, request)
            record = make_answer_record(key, result, [at - began_s for at in pieces_s], _measure_s_since(began_s))
        except Exception as error:  # noqa: BLE001 - an error of a contender ends that answer alone
            failure = error
            record = AnswerRecord(key=key, total_s=_measure_s_since(began_s), error=format_error_without_secrets(error))
        contender.drop_if_failing(failure)
        self.answers.append(record)
        return record

    def _make_request(self, contender: Contender, said: tuple[ChatMessage, ...]) -> ChatRequest:
        """Make a request, with a seed for models in this process.

        A server cannot give its streams and batches seeds of their own.
        """
        options, target = self.options, contender.target
        is_seeded = options.temperature > 0 and target is not None and target.capabilities.token_model is not None
        seed = options.seed if is_seeded else None
        return ChatRequest.create(said, max_tokens=options.max_tokens, temperature=options.temperature, seed=seed)

    # ----------------------------------------------------------------------------- before it counts

    async def _call_each_model_once(self) -> None:
        """Call each model once, so that connections are open and kernels are loaded."""
        request = ChatRequest.create(_WARMUP_PROMPTS[0], max_tokens=4, temperature=0.0)
        for contender in self.contenders:
            self._on_progress(0, self._num_planned, f"{contender.name}, first calls")
            if contender.target is not None:
                await _try_target_call(contender.target, request)
            if contender.draft is not None:
                await _try_draft_call(contender.draft, request)

    async def _warm_decoders(self) -> None:
        for contender, decoder in zip(self.contenders, self._decoders, strict=True):
            if decoder is None:
                continue
            self._on_progress(self._num_done, self._num_planned, f"{contender.name}, discovery")
            with suppress(LlmSpecError):  # its answers report it
                await decoder.discover()
            for number in range(self.options.warmup):
                self._on_progress(self._num_done, self._num_planned, f"{contender.name}, warm-up")
                text = f"{_WARMUP_PROMPTS[number % len(_WARMUP_PROMPTS)]} ({number + 1})"
                with suppress(Exception):  # the measured answers will fail as well
                    await _answer_with_piece_times(decoder, self._make_request(contender, (ChatMessage("user", text),)))

    async def _prefill_targets(self, conversations: Sequence[tuple[ChatMessage, ...]]) -> None:
        """Let each target read the prompts and write one token."""
        if not self.options.primes:
            return
        targets = {
            c.spec.target: c.target for c in reversed(self.contenders) if c.failure is None and c.target is not None
        }
        for name, target in targets.items():
            requests = [ChatRequest.create(said, max_tokens=1, temperature=0.0) for said in conversations]
            began_s = now()
            if all(await asyncio.gather(*(_try_target_call(target, request) for request in requests))):
                self.priming_s.setdefault(name, []).append(_measure_s_since(began_s))


def _measure_s_since(began_s: float) -> float:
    """Return the seconds since then, above 0 even if the clock is too coarse."""
    return max(now() - began_s, 1e-6)


async def _answer_with_piece_times(
    decoder: SpeculativeDecoder, request: ChatRequest
) -> tuple[SpeculativeResult, list[float]]:
    """Return the result and the times of its pieces."""
    pieces_s: list[float] = []
    result: SpeculativeResult | None = None
    async with decoder.stream(request) as events:
        async for event in events:
            if _is_answer_piece(event):
                pieces_s.append(now())
            elif isinstance(event, SpeculativeFinish):
                result = event.result
    if result is None:
        raise TargetError(f"{decoder.name} ended without a result")
    return result, pieces_s


def _is_answer_piece(event: StreamEvent) -> bool:
    return isinstance(event, ToolCallDelta) or (isinstance(event, (TextDelta, ReasoningDelta)) and event.text != "")


async def _try_target_call(target: LlmProvider, request: ChatRequest) -> bool:
    """Return True if the target answered."""
    try:
        async with target.stream(request) as events:
            await _exhaust(events)
    except Exception:  # noqa: BLE001 - the measured answers will fail as well, and are reported
        return False
    return True


async def _try_draft_call(draft: DraftProvider, request: ChatRequest) -> None:
    can = get_draft_capabilities(draft)
    for part in can.drafts:
        await _try_draft_call(part, request)
    if not can.drafts and not can.is_free:
        with suppress(Exception):  # a draft may fail; the measurement will show it
            async with draft.draft(request, 4) as pieces:
                await _exhaust(pieces)


async def _exhaust(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass
