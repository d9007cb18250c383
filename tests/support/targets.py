"""The tests' simulated target: a script or a table of tokens, times, faults, and a log of its calls.

`llm_spec.testing.simulated.SimulatedTarget` ships, and is used where a whole text and its times are enough. This one is
for tests that need tokens which are no whole text, a call that fails, or a look at what was asked for.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from llm_spec import ChatRequest, ChatResponse, Finish, Sampling, StreamEvent, TargetError, TextDelta, Usage
from llm_spec.contract.endpoint import SampledToken, TopTokens
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.local.detokenizing import StopMatcher
from llm_spec.measure.tokens import split_into_pieces

__all__ = ["ELSE_ID", "EOS_ID", "PROMPT_ID", "Call", "Fault", "Table", "Target", "bytewise"]

EOS_ID, PROMPT_ID, ELSE_ID = 0, 1, 2
_STREAMS = ("stream", "stream_chat", "stream_after")
_GENERATING = (*_STREAMS, "sample_next", "score")

Table: TypeAlias = Callable[[Sequence[bytes]], Mapping[bytes, float]]  # tokens so far -> next ones; b"" is the end


@dataclass(frozen=True)
class Fault:
    """What happens to calls of one method, `count` of them from the one with the number `first` on.

    at: of a stream, before which event (0: before it opens). how: what is raised, silence, or a stream that ends
    without a Finish.
    """

    method: str
    first: int = 0
    count: int = sys.maxsize
    at: int = 0
    how: Exception | Literal["silence", "cut", "broken"] = "broken"


@dataclass(eq=False, kw_only=True)
class Call:
    """One call, as it is logged."""

    method: str
    start_s: float
    request: ChatRequest | None = None
    prefixes: list[list[int]] = field(default_factory=list[list[int]])
    sampling: Sampling | None = None
    end_s: float | None = None
    is_cancelled: bool = False


class Target:
    """Writes `answer`: a text, whose tokens are words, or tokens, each some bytes (b"": a control token).

    With a `table` it draws its tokens. After a context that it would not write it says "#", so that a wrong context is
    seen in the text. A text is gone on from by text, tokens by ids, unless `by_ids` and `continue_prefix` say more.

    The first token of a stream takes `first_token_s`, each other `token_s`, a call of `sample_next` `row_s`, one of
    `score` `score_s`; what is None takes `call_s`, and `round_trip_s` come on top. A stream that is left and a call
    that is cancelled take `close_s` to close. Text is encoded by `encode_size` bytes to a token. `tokens_per_event`
    come at once; text is told with each `events_per_text`th. A token that is no whole text has the text `undecoded`.
    `spoil` changes what a stream of a number gives, `spoil_reply` what a call of `sample_next` or `score` does.
    """

    name = "target"
    max_top = 8

    def __init__(
        self,
        answer: str | Sequence[bytes] = "",
        *,
        table: Table | None = None,
        by_ids: bool | None = None,
        continue_prefix: bool | None = None,
        scores: bool = False,
        prediction: bool = False,
        honours_stop: bool = False,
        call_s: float = 0.0,
        round_trip_s: float = 0.0,
        first_token_s: float | None = None,
        token_s: float | None = None,
        row_s: float | None = None,
        score_s: float | None = None,
        encode_s: float = 0.0,
        encode_chat_s: float | None = None,
        close_s: float = 0.0,
        encode_size: int | None = None,
        undecoded: str = "",
        tokens_per_event: int = 1,
        events_per_text: int = 1,
        num_prompt_tokens: int = 1,
        context_length: int | None = None,
        faults: Sequence[Fault] = (),
        spoil: Callable[[int, AsyncIterator[StreamEvent]], AsyncGenerator[StreamEvent]] | None = None,
        spoil_reply: Callable[[str, int, Any], Any] | None = None,
        seed: int = 0,
    ) -> None:
        is_text = isinstance(answer, str)
        self.capabilities = Capabilities(
            continue_prefix=is_text if continue_prefix is None else continue_prefix,
            token_endpoint=self if (not is_text if by_ids is None else by_ids) else None,
            token_scorer=self if scores else None,
            prediction=prediction,
        )
        self.context_length = context_length
        self.faults = list(faults)
        self.log: list[Call] = []
        self.num_open = self.max_open = self.num_input_tokens = self.num_output_tokens = 0
        self._num_generating = 0  # `max_open` is of these
        self._num_calls: Counter[str] = Counter()
        self._bytes = [b"</s>", b"", b"#"]  # of the end too, as `/detokenize` of servers has it
        self._ids: dict[bytes, int] = {}
        self._encode_size = encode_size or (None if is_text else 1)
        self.answer_ids = [self._id(token) for token in (_split(answer) if isinstance(answer, str) else answer)]
        self._prompt = [PROMPT_ID] * num_prompt_tokens
        self._table = table
        self._first_token_s = round_trip_s + (call_s if first_token_s is None else first_token_s)
        self._token_s = call_s if token_s is None else token_s
        self._row_s = self._first_token_s if row_s is None else row_s
        self._score_s = self._row_s if score_s is None else score_s
        self._encode_s = encode_s
        self._encode_chat_s = round_trip_s + (call_s if encode_chat_s is None else encode_chat_s)
        self._close_s = close_s
        self._honours_stop = honours_stop
        self._undecoded = undecoded
        self._tokens_per_event = tokens_per_event
        self._events_per_text = events_per_text
        self._spoil = spoil
        self._spoil_reply = spoil_reply
        self._random = random.Random(seed)  # noqa: S311 - a reproducible target, no secret

    @property
    def text(self) -> str:
        """All that it writes."""
        return self._decode(self.answer_ids)

    def get_calls(self, *methods: str) -> list[Call]:
        """The calls of some methods, in their order."""
        return [call for call in self.log if call.method in methods]

    @property
    def sample_calls(self) -> list[Call]:
        """The calls of `sample_next`."""
        return self.get_calls("sample_next")

    @property
    def streams(self) -> list[Call]:
        """The streams of all three kinds."""
        return self.get_calls(*_STREAMS)

    @property
    def requests(self) -> list[ChatRequest]:
        """Those of the streams."""
        return [call.request for call in self.streams if call.request is not None]

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with self._open_stream("stream", request, *self._read_text(request.prefix)) as events:
            yield events

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Nothing to release."""

    # ------------------------------------------------------------------------------------------ endpoint

    async def encode(self, text: str) -> list[int]:
        async with self._call("encode", self._encode_s):
            return self._encode(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        async with self._call("decode", 0.0):
            return self._decode(token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        async with self._call("encode_chat", self._encode_chat_s, request=request):
            return [*self._prompt, *self._encode(request.prefix)]

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        self.num_input_tokens += sum(map(len, prefixes))
        self.num_output_tokens += len(prefixes)
        logged: dict[str, Any] = {"prefixes": [list(prefix) for prefix in prefixes], "sampling": sampling}
        async with self._call("sample_next", self._row_s, **logged):
            noise = self._draw_noise(self._random if sampling.seed is None else random.Random(sampling.seed))  # noqa: S311 - as above
            forced = next(iter(sampling.logit_bias), None)
            tokens = [self._sample_after(prefix, forced, next(noise)) for prefix in prefixes]
            return self._spoiled("sample_next", tokens)

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        self.num_input_tokens += len(token_ids)
        async with self._call("score", self._score_s, prefixes=[list(token_ids)]):
            ends = range(len(token_ids) - num_rows + 1, len(token_ids) + 1)
            best = [self._sample_after(token_ids[:end], None, 0.0).token_id for end in ends]
            rows = [TopTokens(tuple((token_id + n, -50.0 * n) for n in range(top))) for token_id in best]
            return self._spoiled("score", rows)

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with self._open_stream("stream_chat", request, self._encode(request.prefix), None) as events:
            yield events

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        written = list(token_ids[len(self._prompt) :])
        async with self._open_stream("stream_after", request, written, None) as events:
            yield events

    # ------------------------------------------------------------------------------------------ calls

    @asynccontextmanager
    async def _call(self, method: str, seconds: float, **logged: Any) -> AsyncGenerator[Call]:
        """One call, in the log and open as long as this is; it fails as its fault says."""
        clock = asyncio.get_running_loop().time
        call = Call(method=method, start_s=clock(), **logged)
        self.log.append(call)
        self.num_open += 1
        self._num_generating += method in _GENERATING
        self.max_open = max(self.max_open, self._num_generating)
        fault = self._find_fault(method)
        try:
            await asyncio.sleep(seconds)
            if fault is not None and not fault.at:
                await self._fail(fault)
            yield call
        except asyncio.CancelledError:
            call.is_cancelled = True
            await asyncio.sleep(self._close_s)
            raise
        finally:
            self.num_open -= 1
            self._num_generating -= method in _GENERATING
            call.end_s = clock()

    def _find_fault(self, method: str) -> Fault | None:
        """The fault of the method's next call."""
        number = self._num_calls[method]
        self._num_calls[method] += 1
        faults = (f for f in self.faults if f.method == method and f.first <= number < f.first + f.count)
        return next(faults, None)

    async def _fail(self, fault: Fault) -> None:
        if fault.how == "silence":
            await asyncio.sleep(1e9)
        elif fault.how != "cut":
            raise TargetError(f"{fault.method} is broken") if isinstance(fault.how, str) else fault.how

    def _spoiled(self, method: str, reply: Any) -> Any:
        return reply if self._spoil_reply is None else self._spoil_reply(method, self._num_calls[method] - 1, reply)

    @asynccontextmanager
    async def _open_stream(
        self, method: str, request: ChatRequest, written: list[int], begun: bytes | None
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """A stream that goes on after tokens, the last of which was `begun` by a text that ends within it."""
        prompt_ids = [*self._prompt, *written]
        number, fault_number = sum(self._num_calls[name] for name in _STREAMS), self._num_calls[method]
        async with self._call(method, 0.0, request=request, prefixes=[prompt_ids]):
            if self.context_length is not None and len(prompt_ids) >= self.context_length:
                raise TargetError("the prompt fills the context")
            self.num_input_tokens += len(prompt_ids)
            written_events = self._write(request, written, begun, with_ids=method != "stream")
            try:
                async with AsyncExitStack() as stack:
                    events = await stack.enter_async_context(
                        aclosing(self._break_off(method, fault_number, written_events))
                    )
                    if self._honours_stop and request.stop:
                        events = await stack.enter_async_context(aclosing(_end_at_stop(request.stop, events)))
                    if self._spoil is not None:
                        events = await stack.enter_async_context(aclosing(self._spoil(number, events)))
                    yield events
            finally:
                await asyncio.sleep(self._close_s)

    async def _break_off(
        self, method: str, number: int, events: AsyncGenerator[StreamEvent]
    ) -> AsyncGenerator[StreamEvent]:
        found = [f for f in self.faults if f.method == method and f.first <= number < f.first + f.count]
        index = 0
        async with aclosing(events) as opened:
            if not found:
                async for event in opened:
                    yield event
                return
            while index != found[0].at:
                event = await anext(opened, None)
                if event is None or (found[0].how == "cut" and isinstance(event, Finish)):
                    return
                yield event
                index += 1
            await self._fail(found[0])

    async def _write(
        self, request: ChatRequest, written: list[int], begun: bytes | None, *, with_ids: bool
    ) -> AsyncGenerator[StreamEvent]:
        clock = asyncio.get_running_loop().time
        seed = request.sampling.seed
        noise = self._draw_noise(self._random if seed is None else random.Random(seed), is_repeated=False)  # noqa: S311 - as above
        room = sys.maxsize if self.context_length is None else self.context_length - len(self._prompt) - len(written)
        limit = min(room, request.max_tokens or room)
        start, shown, event_ids, num_events = len(written), "", list[int](), 0
        at_s = clock() + self._first_token_s
        usage = Usage(input_tokens=len(self._prompt) + start, output_tokens=0)
        context, is_end = list(written), False
        while not is_end and len(context) - start < limit:
            token_id = self._draw(context, next(noise))
            is_end = token_id == EOS_ID
            event_ids.append(token_id)
            await asyncio.sleep(max(0.0, at_s - clock()))
            at_s += self._token_s
            if not is_end:
                context.append(token_id)
                self.num_output_tokens += 1
            is_last = is_end or len(context) - start == limit
            if len(event_ids) < self._tokens_per_event and not is_last:
                continue
            num_events += 1
            text = self._decode(context[start:])[len((begun or b"").decode(errors="replace")) :]
            if not is_last:
                text = text.rstrip("\ufffd") if num_events % self._events_per_text == 0 else shown
            if with_ids or text != shown:
                yield TextDelta(text[len(shown) :], token_ids=tuple(event_ids) if with_ids else None)
            shown, event_ids = text, []
        usage = Usage(input_tokens=usage.input_tokens, output_tokens=len(context) - start)
        cause = None if limit == room else "max_tokens"  # as servers do, which do not say which limit it was
        yield Finish("stop", usage, "eos") if is_end else Finish("length", usage, cause)

    # ------------------------------------------------------------------------------------------ tokens

    def _sample_after(self, prefix: Sequence[int], forced_id: int | None, noise: float) -> SampledToken:
        if forced_id is not None:
            return SampledToken(forced_id, "", is_end=forced_id == EOS_ID)
        size = len(self._prompt)
        is_known = list(prefix[:size]) == self._prompt
        token_id = self._draw(list(prefix[size:]), noise) if is_known else ELSE_ID
        if token_id == EOS_ID:
            return SampledToken(EOS_ID, "", is_end=True)
        text = self._decode([token_id])
        return SampledToken(token_id, self._undecoded if "\ufffd" in text else text)

    def _draw(self, written: Sequence[int], noise: float) -> int:
        if self._table is not None:
            for token, share in self._table([self._bytes[i] for i in written]).items():
                noise -= share
                if noise < 0:
                    return self._id(token) if token else EOS_ID
            return EOS_ID
        at = len(written)
        if written != self.answer_ids[:at] and written[-1] != ELSE_ID:
            return ELSE_ID
        return self.answer_ids[at] if at < len(self.answer_ids) else EOS_ID

    def _draw_noise(self, rng: random.Random, *, is_repeated: bool = True) -> Any:
        """The noise of each token; as on servers, all rows of a call with a seed have the same."""
        first = rng.random()
        while True:
            yield first
            if rng is self._random or not is_repeated:
                first = rng.random()

    def _read_text(self, text: str) -> tuple[list[int], bytes | None]:
        """The tokens of a text, and the bytes of it that are only the beginning of the next one."""
        data, written = text.encode(), list[int]()
        for token_id in self.answer_ids:
            token = self._bytes[token_id]
            if len(token) >= len(data) or not data.startswith(token):
                break
            written.append(token_id)
            data = data[len(token) :]
        following = [*self.answer_ids[len(written) : len(written) + 1]]
        if data and following and self._bytes[following[0]] == data:
            return [*written, *following], None
        if data and following and self._bytes[following[0]].startswith(data):
            return written, data
        return [*written, *self._encode(data.decode())], None

    def _encode(self, text: str) -> list[int]:
        data, size = text.encode(), self._encode_size
        if size is None:
            return [self._id(token) for token in _split(text)]
        return [self._id(data[at : at + size]) for at in range(0, len(data), size)]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._bytes[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def _id(self, token: bytes) -> int:
        if token not in self._ids:
            self._ids[token] = len(self._bytes)
            self._bytes.append(token)
        return self._ids[token]


async def _end_at_stop(stop: Sequence[str], events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
    """As servers do, which hold back what may be the beginning of a stop string."""
    matcher = StopMatcher(stop)
    async for event in events:
        if not isinstance(event, TextDelta):
            for delta in matcher.flush():
                yield delta
            yield event
            continue
        for delta in matcher.push(event.text):
            yield delta
        if matcher.matched is not None:
            yield Finish("stop", None, "stop_string")
            return


def bytewise(text: str | bytes) -> list[bytes]:
    """Tokens of one byte each."""
    return [bytes([byte]) for byte in (text if isinstance(text, bytes) else text.encode())]


def _split(text: str) -> list[bytes]:
    return [piece.encode() for piece in split_into_pieces(text)]
