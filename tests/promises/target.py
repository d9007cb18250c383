"""A target by virtual clock that writes a `Language`, fails on purpose, and logs whatever it generates."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from llm_spec import (
    ChatRequest,
    ChatResponse,
    Finish,
    InvalidRequestError,
    ReasoningDelta,
    Sampling,
    StreamEvent,
    TargetError,
    TextDelta,
    TransientError,
    UnsupportedError,
    Usage,
)
from llm_spec.contract.endpoint import Feature, SampledToken, TopTokens
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.strategies.judge_verdict import split_into_passages
from llm_spec.testing.hosted_model import _JudgeQuestion, _parse_judge_question  # pyright: ignore[reportPrivateUsage]
from promises.bill import Bill
from promises.language import BOS, EOS, Context, Language, cut_at_stop, to_text

__all__ = [
    "FAILING_CALLS",
    "FOREVER_S",
    "ODD_TARGETS",
    "REASONING",
    "TRANSIENT",
    "FailingCall",
    "Fault",
    "Kind",
    "OddTarget",
    "Pace",
    "Target",
    "UsageLedger",
    "asking",
    "tag_of",
    "topic_of",
]

FOREVER_S: Final = 1e7
_GONE: Final = "the connection broke"

Kind: TypeAlias = Literal["chat", "text", "ids", "ids only", "scorer"]
Scope: TypeAlias = Literal["any", "root", "continued", "ids", "verdict"]
How: TypeAlias = Literal[
    "break", "status 500", "status 429", "error", "refuse", "silence", "cut", "lost", "bug", "unsupported"
]
TRANSIENT: Final[tuple[How, ...]] = ("break", "status 500", "status 429", "silence")


OddTarget: TypeAlias = Literal[
    "", "fewer tokens", "more tokens", "no ids", "rows are None", "fewer rows", "more rows", "empty rows", "nan"
]
FailingCall: TypeAlias = Literal[
    "",
    "encode, breaks",
    "encode, is refused",
    "decode, breaks",
    "decode, is refused",
    "encode_chat, breaks",
    "encode_chat, is refused",
]
ODD_TARGETS: Final[tuple[OddTarget, ...]] = get_args(OddTarget)[1:]
FAILING_CALLS: Final[tuple[FailingCall, ...]] = get_args(FailingCall)[1:]
Spoil: TypeAlias = Callable[[Any], Any]
_ODD_TOKENS: Final[Mapping[str, Spoil]] = {
    "fewer tokens": lambda tokens: tokens[:-1],
    "more tokens": lambda tokens: [*tokens, *tokens],
}
_ODD_ROWS: Final[Mapping[str, Spoil]] = {
    "rows are None": lambda _: None,
    "fewer rows": lambda rows: rows[:-1],
    "more rows": lambda rows: [*rows, *rows],
    "empty rows": lambda rows: [TopTokens(())] * len(rows),
    "nan": lambda rows: [TopTokens(tuple((i, math.nan) for i, _ in row.top)) for row in rows],
}
REASONING: Final = "so then"  # what a target that thinks shows of it


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to calls of one request.

    scope: which calls count. first, count: which of those fail. at: before which event (0: before the first text).
    how: `cut` ends a stream without a Finish, `lost` refuses and takes the capability away; the rest is raised, except
    silence. `bug` is an error of another kind, `unsupported` what a target says that cannot do it any more.
    """

    how: How = "break"
    scope: Scope = "any"
    first: int = 0
    count: int = 1
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds: of a call before anything, until its first token, between tokens."""

    round_trip_s: float = 0.01
    first_token_s: float = 0.1
    token_s: float = 0.05


@dataclass
class UsageLedger:
    """What was generated and what is open, by the tag of the request."""

    open: Counter[str] = field(default_factory=Counter[str])
    most_open: Counter[str] = field(default_factory=Counter[str])
    most_requests: int = 0
    num_calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    # (tag, topic, the answer's bytes so far) -> tokens generated there; the same of calls that continued a text
    edges: defaultdict[tuple[str, str, bytes], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    by_text: defaultdict[tuple[str, str, bytes], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    approved: defaultdict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    last_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # when the last token was
    generated: Counter[str] = field(default_factory=Counter[str])  # tokens, EOS and verdicts counted
    faults: Counter[str] = field(default_factory=Counter[str])
    silent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # until a call was left
    bills: defaultdict[str, list[Bill]] = field(default_factory=lambda: defaultdict(list))
    breaches: list[str] = field(default_factory=list[str])  # what a target must never be sent

    def bill(self, tag: str, bill: Bill) -> Bill:
        """One more call of a request, billed as `bill`."""
        self.bills[tag].append(bill)
        return bill

    @contextmanager
    def counted(self, tag: str) -> Iterator[None]:
        """One call of a request, open as long as this is."""
        self.open[tag] += 1
        self.most_open[tag] = max(self.most_open[tag], self.open[tag])
        self.most_requests = max(self.most_requests, sum(1 for n in self.open.values() if n))
        try:
            yield
        finally:
            self.open[tag] -= 1


asking: Final[ContextVar[str]] = ContextVar("asking")  # the mark of the request that this task works for


def tag_of(text: str) -> str:
    """A request's own mark, the first word of its first message."""
    return text.split(" ", 1)[0]


_DISCOVERABLE: Final[Mapping[Kind, frozenset[Feature]]] = {
    "chat": frozenset(),
    "text": frozenset({"continue_prefix"}),
    "ids": frozenset({"continue_prefix", "token_endpoint"}),
    "ids only": frozenset({"token_endpoint"}),
    "scorer": frozenset({"continue_prefix", "token_endpoint", "token_scorer"}),
}


def topic_of(text: str) -> str:
    """What a request is about, its second word: the answer depends on it alone."""
    return text.split(" ", 2)[1]


class Target:
    """A chat model on a server, as able as its kind says. `capabilities` lose what a fault takes away.

    `frame` tokens come in one event. `says_why`: it gives `stopped_by`. `counts`: it gives a usage, `counts_eos`: with
    EOS as an output token. `takes_prediction`: predicted tokens take a fifth of the time. `judgement`: how it judges.
    `discover_s`: what it can do is known after `discover`, which takes that long (None: at once) and fails
    `num_failing_trials` times. `continues`: it does as its kind says with a prefix; else it begins anew, as `discover`
    finds out. `odd`: how it breaks its contract by token ids. `failing`: which call beside answers always fails.
    `close_s`: how long leaving an answer takes. `thinks`: it shows some reasoning before an answer.
    """

    max_top = 4
    context_length = None

    def __init__(
        self,
        language: Language,
        *,
        kind: Kind,
        seed: int,
        name: str = "promises:target",
        pace: Pace | None = None,
        frame: int = 1,
        says_why: bool = True,
        counts: bool = True,
        counts_eos: bool = False,
        takes_prediction: bool = False,
        judgement: Literal["honest", "lenient", "none"] = "honest",
        discover_s: float | None = None,
        continues: bool = True,
        num_failing_trials: int = 0,
        odd: OddTarget = "",
        failing: FailingCall = "",
        close_s: float = 0.0,
        thinks: bool = False,
        whole_answers: bool = False,
        faults: Mapping[str, Fault] | None = None,
        prefixes: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.language = language
        self.ledger = UsageLedger()
        self.num_acloses = 0
        self._kind = kind
        self._pace = pace or Pace()
        self._frame = frame
        self._says_why = says_why
        self._counts = counts
        self._counts_eos = counts_eos
        self._judgement = judgement
        self._discover_s = discover_s
        self._continues = continues
        self._num_failing_trials = num_failing_trials
        self._odd = odd
        self._failing = failing
        self._close_s = close_s
        self._thinks = thinks
        self._whole_answers = whole_answers
        self._is_seen_through = False
        self._faults = faults or {}
        self._prefixes = prefixes or {}
        self._rng = random.Random(f"target {seed}")  # noqa: S311 - a reproducible target, no secret
        self._by_ids = kind in ("ids", "ids only", "scorer")
        self._takes_prediction = takes_prediction
        self._discoverable = _DISCOVERABLE[kind]
        self._found: set[Feature] = set()
        self._lost: set[Feature] = set()
        if discover_s is None:
            self._found = {"token_endpoint", "token_scorer"}

    @property
    def capabilities(self) -> Capabilities:
        has = {feature for feature in self._found if feature not in self._lost}
        return Capabilities(
            continue_prefix=self._kind in ("text", "ids", "scorer") and not self._is_seen_through,
            whole_answers=self._whole_answers,
            prediction=self._takes_prediction,
            discoverable=self._discoverable,
            token_endpoint=self if self._by_ids and "token_endpoint" in has else None,
            token_scorer=self if self._kind == "scorer" and "token_scorer" in has else None,
        )

    async def discover(self, feature: Feature) -> None:
        await asyncio.sleep(0.0 if feature in self._found else self._discover_s or 0.0)
        if self._num_failing_trials > 0:
            self._num_failing_trials -= 1
            raise TransientError("cannot be asked now")
        if feature == "continue_prefix":
            self._is_seen_through = not self._continues
        else:
            self._found |= {feature, "token_endpoint"}

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        self.num_acloses += 1

    # ------------------------------------------------------------------------------------------ chat

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        tag, topic = tag_of(request.messages[0].text), topic_of(request.messages[0].text)
        question = _parse_judge_question(request.messages[-1].text)
        prefix = request.prefix if self._continues else ""
        if question is None and len(request.messages) >= 3:  # "Your answer broke off"
            prefix = request.messages[-2].text
        if request.prefix and not self.capabilities.continue_prefix:
            self.ledger.breaches.append(f"{tag}: a prefix was sent to a target that takes none")
        if request.prefix != request.prefix.rstrip():
            self.ledger.breaches.append(f"{tag}: the prefix {request.prefix!r} ends in whitespace")
        if "\N{REPLACEMENT CHARACTER}" in prefix:
            self.ledger.breaches.append(f"{tag}: the prefix {prefix!r} is cut within a character")
        if request.prediction is not None and any("\ud800" <= c <= "\udfff" for c in request.prediction):
            raise InvalidRequestError("half of a surrogate pair is not text")
        if request.prediction is not None and not self._takes_prediction:
            self.ledger.breaches.append(f"{tag}: a prediction was sent to a target that takes none")
        is_continued = prefix != self._prefixes.get(tag, "")
        scope: Scope = "verdict" if question is not None else "continued" if is_continued else "root"
        if question is not None:
            made = self._judge(tag, topic, question)
        else:
            context = Context(topic, tuple(self.language.encode(prefix)))
            made = self._write(tag, context, request, is_by_text=is_continued, with_ids=False)
        async with self._call(tag, {"any", scope}, made) as events:
            yield events

    @asynccontextmanager
    async def stream_with_token_ids(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with AsyncExitStack() as stack:
            try:
                opened = self.stream_chat(request) if self._by_ids else self.stream(request)
                events = await stack.enter_async_context(opened)
            except InvalidRequestError:
                if not self._by_ids:
                    raise
                events = await stack.enter_async_context(self.stream(request))
            yield events

    # ------------------------------------------------------------------------------------------ by ids

    async def encode(self, text: str) -> list[int]:
        await self._fail_call("encode")
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise InvalidRequestError("half of a surrogate pair is not text")
        return self.language.encode(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        await self._fail_call("decode")
        self._check_ids("decode", token_ids)
        return self.language.data(token_ids).decode(errors="replace")

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        await self._fail_call("encode_chat")
        words = [word for message in request.messages for word in message.text.split(" ")]
        return [BOS, *map(self.language.control_id, words), *self.language.encode(request.prefix)]

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        tag, topic = tag_of(request.messages[0].text), topic_of(request.messages[0].text)
        context = Context(topic, tuple(self.language.encode(request.prefix)))
        is_continued = request.prefix != self._prefixes.get(tag, "")
        scope: Scope = "continued" if is_continued else "root"
        made = self._write(tag, context, request, is_by_text=is_continued, with_ids=True)
        async with self._call(tag, {"any", "ids", scope}, made) as events:
            yield events

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        tag, context = self._read_ids(token_ids)
        made = self._write(tag, context, request, is_by_text=False, with_ids=True)
        async with self._call(tag, {"any", "ids", "continued"}, made, num_input=len(token_ids)) as events:
            yield events

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        read = [self._read_ids(prefix) for prefix in prefixes]
        tag = self._tag_of(prefixes[0])
        self.ledger.generated[tag] += len(prefixes)  # also where nobody waits for them
        bill = self.ledger.bill(tag, Bill(sum(map(len, prefixes)), len(prefixes)))
        with self.ledger.counted(tag), bill.failing():
            await self._fail(self._fault(tag, {"any", "ids", "continued"}), 0, tag)
            await asyncio.sleep(self._pace.round_trip_s + self._pace.first_token_s)
            out: list[SampledToken] = []
            for _, context in read:
                token_id = self._draw(context, sampling, self._rng_of(sampling))
                self._log(tag, context, token_id, is_by_text=False, is_written=False)
                text = self.language.data([token_id]).decode(errors="replace")
                out.append(SampledToken(token_id, text, token_id == EOS))
            return cast("list[SampledToken]", _ODD_TOKENS.get(self._odd, list[Any])(out))

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        tag = self._tag_of(token_ids)
        self.ledger.generated[tag] += 1  # a server writes one token at least
        bill = self.ledger.bill(tag, Bill(len(token_ids), 1))
        with self.ledger.counted(tag), bill.failing():
            await self._fail(self._fault(tag, {"any", "ids", "continued"}), 0, tag)
            await asyncio.sleep(self._pace.round_trip_s + self._pace.first_token_s)
            rows: list[TopTokens] = []
            for end in range(len(token_ids) - num_rows + 1, len(token_ids) + 1):
                _, context = self._read_ids(token_ids[:end])
                logits = self.language.candidates(context)
                logits += [(i, -20.0 - i) for i in range(top) if i not in dict(logits)]  # a server reports so many
                total = math.log(sum(math.exp(logit) for _, logit in logits))
                rows.append(TopTokens(tuple((i, logit - total) for i, logit in logits[:top])))
                for token_id, _ in logits[:top]:
                    self._log(tag, context, token_id, is_by_text=False, is_written=False)
            return cast("list[TopTokens]", _ODD_ROWS.get(self._odd, list[Any])(rows))

    async def _fail_call(self, name: str) -> None:
        await asyncio.sleep(self._pace.round_trip_s)
        if self._failing.startswith(f"{name}, "):
            raise TransientError(_GONE) if self._failing.endswith("breaks") else InvalidRequestError("answered 404")

    def _check_ids(self, what: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self.language.knows(token_id):
                self.ledger.breaches.append(f"{what}: {token_id!r} is not a token id")
                raise InvalidRequestError(f"{token_id!r} is not a token id")

    def _tag_of(self, token_ids: Sequence[int]) -> str:
        """Whose prompt it is; a part of one that begins anywhere does not say that."""
        return self._read_ids(token_ids)[0] if token_ids[0] == BOS else asking.get()

    def _read_ids(self, token_ids: Sequence[int]) -> tuple[str, Context]:
        """The request and the context that a prompt's ids stand for."""
        self._check_ids("a prompt", token_ids)
        is_text = [not self.language.is_control(token_id) for token_id in token_ids]
        start = is_text.index(True) if True in is_text else len(token_ids)
        if any(self.language.is_control(t) for t in token_ids[start:]) or EOS in token_ids:
            self.ledger.breaches.append(f"a control token stands in an answer: {list(token_ids)}")
            raise InvalidRequestError("a control token stands in an answer")
        tag, topic = (self.language.control_name(token_id) for token_id in token_ids[1:3])
        return tag, Context(topic, tuple(token_ids[start:]))

    # ------------------------------------------------------------------------------------------ generating

    def _rng_of(self, sampling: Sampling) -> random.Random:
        return self._rng if sampling.seed is None else random.Random(sampling.seed)  # noqa: S311 - as above

    def _draw(self, context: Context, sampling: Sampling, rng: random.Random) -> int:
        if not sampling.temperature:
            return self.language.greedy(context, sampling.logit_bias)
        return self.language.sample(context, rng, sampling.temperature, sampling.top_k, sampling.logit_bias)

    def _log(self, tag: str, context: Context, token_id: int, *, is_by_text: bool, is_written: bool = True) -> None:
        key = (tag, context.topic, self.language.data(context.ids))
        self.ledger.last_s[tag] = asyncio.get_running_loop().time()
        if is_written:
            self.ledger.generated[tag] += 1
        tokens = (self.ledger.by_text if is_by_text else self.ledger.edges)[key]
        if token_id != EOS:
            tokens.add(self.language.data([token_id]))

    async def _write(
        self, tag: str, context: Context, request: ChatRequest, *, is_by_text: bool, with_ids: bool
    ) -> AsyncGenerator[StreamEvent]:
        """The answer, or what follows of it, held back up to whole characters and where a stop string may begin."""
        loop, pace = asyncio.get_running_loop(), self._pace
        rng, sampling = self._rng_of(request.sampling), request.sampling
        prediction = (request.prediction or "").encode()
        at_s = loop.time() + pace.round_trip_s + pace.first_token_s
        begun, ids = context, list[int]()
        if self._thinks and not context.ids:
            await asyncio.sleep(pace.round_trip_s)
            yield ReasoningDelta(REASONING[:3])
            yield ReasoningDelta(REASONING[3:])
        num_shown, frame = 0, list[int]()
        reason: Literal["eos", "max_tokens", "stop_string"] | None = None
        while reason is None:
            token_id = self._draw(Context(begun.topic, (*begun.ids, *ids)), sampling, rng)
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            here = Context(begun.topic, (*begun.ids, *ids))
            self._log(tag, here, token_id, is_by_text=is_by_text)
            if token_id == EOS:
                reason = "eos"
            else:
                ids.append(token_id)
                frame.append(token_id)
                is_predicted = self.language.data([token_id]) in prediction if prediction else False
                at_s += pace.token_s * (0.2 if is_predicted else 1.0)
                if request.max_tokens is not None and len(ids) >= request.max_tokens:
                    reason = "max_tokens"
            text = to_text(self.language.data(ids))
            cut = cut_at_stop(text, request.stop)
            if cut is not None:
                reason = "stop_string"
                text = text[:cut]
            if reason is None and len(frame) < self._frame:
                continue
            end = len(text) if reason is not None else len(text) - _held(text, request.stop)
            shown, num_shown = text[num_shown:end], max(num_shown, end)
            if shown or (with_ids and frame):
                yield TextDelta(shown, token_ids=tuple(frame) if with_ids and self._odd != "no ids" else None)
            frame = []
        yield self._finish(reason, request, begun, ids)

    def _finish(self, reason: str, request: ChatRequest, begun: Context, ids: Sequence[int]) -> Finish:
        usage = None
        if self._counts:
            num_input = 1 + sum(len(message.text.split(" ")) for message in request.messages) + len(begun.ids)
            num_output = len(ids) + (self._counts_eos and reason == "eos")
            usage = Usage(input_tokens=num_input, output_tokens=num_output)
        finish_reason = "length" if reason == "max_tokens" else "stop"
        return Finish(finish_reason, usage, reason if self._says_why else None)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------ judging

    async def _judge(self, tag: str, topic: str, question: _JudgeQuestion) -> AsyncGenerator[StreamEvent]:
        await asyncio.sleep(self._pace.round_trip_s + self._pace.first_token_s)
        answer, text = self.language.answer(topic), "I would rather not."
        begun = question.answer
        for number, passage in enumerate(question.passages[: question.num_settled], 1):
            begun += question.replaced.get(str(number), passage)
        if self._judgement != "none":
            num, end = question.num_settled, begun
            for passage in question.passages[question.num_settled :]:
                is_right = answer.startswith(end) and answer[len(end) :].startswith(passage)
                if not is_right and (self._judgement == "honest" or self._rng.random() < 0.5):
                    break
                num, end = num + 1, end + passage
            rest = answer[len(end) :] if answer.startswith(end) else ""
            then = next(iter(split_into_passages(rest)), None)
            self.ledger.approved[tag].append((begun, end[len(begun) :]))
            if then is not None:
                for at, character in enumerate(then):
                    self.ledger.edges[tag, topic, (end + then[:at]).encode()].add(character.encode())
            text = json.dumps({"nonce": question.nonce, "accepted": num, "then": then}, ensure_ascii=False)
        words = text.split(" ")
        for index, word in enumerate(words):
            self.ledger.generated[tag] += 1
            await asyncio.sleep(self._pace.token_s if index else 0.0)
            yield TextDelta(word if index == 0 else f" {word}")
        yield Finish("stop", Usage(input_tokens=40, output_tokens=len(words)) if self._counts else None, None)

    # ------------------------------------------------------------------------------------------ failing

    def _fault(self, tag: str, scopes: set[str]) -> Fault | None:
        """The fault that this call meets, if any; it is one more of each of its scopes."""
        fault = self._faults.get(tag)
        for scope in scopes:
            self.ledger.num_calls[tag, scope] += 1
        if fault is None or fault.scope not in scopes:
            return None
        number = self.ledger.num_calls[tag, fault.scope] - 1
        return fault if fault.first <= number < fault.first + fault.count else None

    async def _fail(self, fault: Fault | None, index: int, tag: str) -> None:
        if fault is None or index != fault.at:
            return
        self.ledger.faults[tag] += 1
        match fault.how:
            case "silence":
                began_s = asyncio.get_running_loop().time()
                try:
                    await asyncio.sleep(FOREVER_S)
                finally:
                    lasted_s = asyncio.get_running_loop().time() - began_s
                    self.ledger.silent_s[tag] = max(self.ledger.silent_s[tag], lasted_s)
            case "status 500":
                raise TransientError("answered 500", status=500)
            case "status 429":
                raise TransientError("answered 429", status=429, retry_after_s=0.5)
            case "error":
                raise TargetError("answered in another form")
            case "bug":
                raise RuntimeError("a bug")
            case "unsupported":
                raise UnsupportedError("not any more")
            case "refuse":
                raise InvalidRequestError("answered 400: not with these fields")
            case "lost":
                self._lost |= {"token_endpoint", "token_scorer"}
                raise InvalidRequestError("answered 404: not here any more")
            case _:
                raise TransientError(_GONE)

    @asynccontextmanager
    async def _call(
        self, tag: str, scopes: set[str], made: AsyncGenerator[StreamEvent], *, num_input: int | None = None
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """One answer, open until it is left."""
        bill = self.ledger.bill(tag, Bill(num_input))
        with self.ledger.counted(tag):
            async with aclosing(self._billed(bill, self._faulty(tag, scopes, made))) as events:
                try:
                    yield events
                finally:
                    await asyncio.sleep(self._close_s)

    async def _billed(self, bill: Bill, made: AsyncGenerator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        with bill.failing():
            async with aclosing(made) as events:
                async for event in events:
                    bill.send(event)
                    yield event

    async def _faulty(
        self, tag: str, scopes: set[str], made: AsyncGenerator[StreamEvent]
    ) -> AsyncGenerator[StreamEvent]:
        fault = self._fault(tag, scopes)
        index = 0
        async with aclosing(made) as events:
            if fault is not None and fault.at == 0 and fault.how != "cut":
                await asyncio.sleep(self._pace.round_trip_s)
                await self._fail(fault, 0, tag)
            async for event in events:
                if fault is not None and fault.how == "cut" and (index == fault.at or isinstance(event, Finish)):
                    self.ledger.faults[tag] += 1
                    return
                if index:
                    await self._fail(fault, index, tag)
                yield event
                index += 1


def _held(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = max((len(s) for s in stop), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
