"""Discovers what a server can do: an ignored field is as bad as a missing endpoint.

Each check compares two ways to the same greedy tokens. It costs a handful of short requests, once
per process. A feature that was missing is checked again after a pause, because servers are updated
or replaced at the same address. If a check failed for a passing reason (the server is still loading
its model), it is soon repeated. Calls that use the model run one at a time, while no answer is open
(`trial_turns.py`).

The check for continuing a text runs at once, because an answer that broke off waits for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

from llm_spec import ChatRequest, LlmSpecError, ReasoningDelta, Sampling, StreamEvent, TextDelta, TransientError
from llm_spec.contract.endpoint import Feature, MessagePart
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.tools import find_message_parts
from llm_spec.measure.clock import now
from llm_spec_http.messages import HttpMessageParser
from llm_spec_http.tokens import HttpTokenEndpoint
from llm_spec_http.trial_turns import TrialTurns

__all__ = ["ServerFeatures", "forget_all_server_findings"]

_FIRST_PAUSE_S: Final = 60.0  # until a missing feature is checked again; doubled each time
_LAST_PAUSE_S: Final = 3600.0
_PAUSE_AFTER_FAILURE_S: Final = 2.0  # the first one if the server could not answer

_MAX_SERVERS: Final = 1024  # whose findings a process keeps

_GREEDY: Final = Sampling(temperature=0.0)
_USER: Final = {"role": "user", "content": "Count from one to ten."}
# Without a system message many templates add a long one of their own.
_SYSTEM: Final = {"role": "system", "content": "Count."}
_REQUESTS: Final = tuple(
    ChatRequest.create(messages, temperature=0.0, max_tokens=2) for messages in ([_SYSTEM, _USER], [_USER])
)
_WORDS: Final = "return one more word"  # each of its beginnings likely continues with another token
_ROUND_TRIP_TEXT: Final = "def naïve(x):\n    return x + 1  # one more\n"


T = TypeVar("T")
# Returns an error if the server cannot answer now.
Check: TypeAlias = Callable[[], Awaitable["bool | TransientError"]]
_TextAndIds: TypeAlias = tuple[str, list[int]]
_EventStream: TypeAlias = AbstractAsyncContextManager[AsyncIterator[StreamEvent]]


@dataclass(slots=True)
class _FeatureFinding:
    """The findings about one feature of a server."""

    is_supported: bool = False
    pause_s: float = 0.0
    found_at_s: float | None = None  # when it was last checked, or None if never
    trial: asyncio.Task[Any] | None = None  # running; others on its event loop wait for it


@dataclass(slots=True)
class _ServerFindings:
    """The findings about one server, and the turns of its trials."""

    endpoint: _FeatureFinding = field(default_factory=_FeatureFinding)
    scorer: _FeatureFinding = field(default_factory=_FeatureFinding)
    continuation: _FeatureFinding = field(default_factory=_FeatureFinding)
    messages: _FeatureFinding = field(default_factory=_FeatureFinding)
    message_parts: frozenset[MessagePart] = frozenset()  # that the message parser read as chat did
    separates_reasoning: bool = False
    turns: TrialTurns = field(default_factory=TrialTurns)
    wants_messages: bool = False  # True once `discover` was called for the message parser


_servers: Final[OrderedDict[Hashable, _ServerFindings]] = OrderedDict()  # shared by all providers


def forget_all_server_findings() -> None:
    """Forget this process's findings about servers; existing providers keep theirs."""
    _servers.clear()


def _get_shared_findings(server: Hashable | None) -> _ServerFindings:
    """Return the findings about a server, shared by its providers; None is never shared."""
    if server is None:
        return _ServerFindings()
    findings = _servers.setdefault(server, _ServerFindings())
    _servers.move_to_end(server)
    while len(_servers) > _MAX_SERVERS:
        _servers.popitem(last=False)
    return findings


class ServerFeatures:
    """The features of a server: `known` ones, corrected by what checks found.

    Any number of event loops may use it. `server` identifies the server: providers in this process
    with the same `server` share its findings. With None, nothing is shared. `check_continuation`
    tests if the server continues a text; until then, `known` counts.
    """

    def __init__(
        self,
        known: Capabilities,
        tokens: HttpTokenEndpoint | None,
        check_continuation: Check,
        *,
        messages: HttpMessageParser | None = None,
        server: Hashable | None = None,
    ) -> None:
        self._findings = findings = _get_shared_findings(server)
        self.turns = findings.turns
        self._tokens = tokens
        self._token_id_trial = (
            None if tokens is None else _TokenIdTrial(tokens, self.turns, lambda: findings.separates_reasoning)
        )
        self._messages = messages
        self._known = replace(known, discoverable=_list_discoverable_features(known, tokens, messages))
        self._check_continuation = check_continuation
        self._endpoint, self._scorer = _FeatureProbe(findings.endpoint), _FeatureProbe(findings.scorer)
        self._continuation = _FeatureProbe(findings.continuation)
        self._message_parser = _FeatureProbe(findings.messages)
        self._capabilities_by_findings: dict[tuple[bool, ...], Capabilities] = {}
        if tokens is not None:
            tokens.note_reasoning = self.note_reasoning

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that are known now."""
        has_tokens, has_messages = self._endpoint.is_supported, self._message_parser.is_supported
        is_reasoning = self._findings.separates_reasoning
        findings = (has_tokens, self._scorer.is_supported, self._continuation.is_missing, has_messages, is_reasoning)
        if self._messages is not None:
            self._messages.parts = self._findings.message_parts
        if findings not in self._capabilities_by_findings:
            self._capabilities_by_findings[findings] = replace(
                self._known,
                token_endpoint=self._tokens if self._endpoint.is_supported else None,
                token_scorer=self._tokens if self._scorer.is_supported else None,
                continue_prefix=self._known.continue_prefix and not self._continuation.is_missing,
                message_parser=self._messages if has_tokens and has_messages else None,
                separates_reasoning=is_reasoning,
            )
        return self._capabilities_by_findings[findings]

    def try_messages_on_answer(self, request: ChatRequest) -> _EventStream | None:
        """Return a request's chat answer that also tests the message parser.

        Returns None if nothing asked for the parser, or if the answer would show nothing. A fully
        constrained answer shows nothing if the server's answers do not reason first.
        """
        findings, tokens, messages = self._findings, self._tokens, self._messages
        if tokens is None or messages is None or not findings.wants_messages:
            return None
        parts = find_message_parts(request, separates_reasoning=findings.separates_reasoning)
        is_due = self._message_parser.is_supported or self._message_parser.is_due
        is_untried = not parts <= findings.message_parts
        is_telling = request.tool_choice != "none" and (
            findings.separates_reasoning or "form_after_reasoning" not in parts
        )
        has_more = request.stop or request.top_logprobs is not None or request.extra or request.raw
        if not (is_untried and is_due and is_telling and self._endpoint.is_supported) or has_more:
            return None
        return self._try_messages(request, tokens, messages)

    @asynccontextmanager
    async def _try_messages(
        self, request: ChatRequest, tokens: HttpTokenEndpoint, messages: HttpMessageParser
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with (
            tokens.stream_chat(request) as events,
            aclosing(messages.try_on_answer(request, events, self._note_message_trial)) as tried,
        ):
            yield tried

    def _note_message_trial(self, parts: frozenset[MessagePart] | None) -> None:
        if parts is None:
            self.mark_feature_lost("message_parser")
        elif parts:
            self._findings.message_parts |= parts
            self._message_parser.mark_supported()

    def note_reasoning(self, events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        """Pass on chat's events, and note if the server separates reasoning from the text."""
        return events if self._messages is None or self._findings.separates_reasoning else self._watch_reasoning(events)

    async def _watch_reasoning(self, events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        async with aclosing(events):
            async for event in events:
                if type(event) is ReasoningDelta:
                    self._findings.separates_reasoning = True
                yield event

    def get_untried_token_endpoint(self) -> HttpTokenEndpoint | None:
        """Return the token endpoint, or None if it is known to be missing."""
        return None if self._endpoint.is_known_missing else self._tokens

    def mark_token_ids_missing(self) -> None:
        """Mark the token endpoint as missing: the server refused to give token ids."""
        self._endpoint.mark_missing()

    async def aclose(self) -> None:
        """End running checks before connections are closed; shared findings do not change."""
        for feature in (self._endpoint, self._scorer, self._continuation):
            await feature.aclose()

    async def discover(self, feature: Feature) -> None:
        """Check a feature if that is due; raises TransientError if the server cannot answer now."""
        tokens, trial = self._tokens, self._token_id_trial
        if feature == "message_parser":
            self._findings.wants_messages = True
            if self._messages is not None and not self._message_parser.is_supported and self._message_parser.is_due:
                raise TransientError("the server's message parser is tested with the next answer that calls a tool")
        elif feature == "continue_prefix":
            if self._known.continue_prefix:
                await self._continuation.probe_if_due(self._check_continuation)
        elif tokens is not None and trial is not None:
            await self._endpoint.probe_if_due(trial.run_to_end)
            if feature == "token_scorer" and tokens.max_top and self._endpoint.is_supported:
                await self._scorer.probe_if_due(lambda: _passes_check(_can_score_tokens(tokens, self.turns)))

    def mark_feature_lost(self, feature: Feature) -> None:
        """Mark a feature as missing because a call failed."""
        if feature == "continue_prefix":
            self._continuation.mark_missing()
        elif feature == "message_parser":
            self._findings.message_parts = frozenset()
            self._message_parser.mark_missing()
        elif feature == "token_scorer" and self._scorer.is_supported:
            self._scorer.mark_missing()
        elif feature == "token_endpoint" and self._endpoint.is_supported:
            self._endpoint.mark_missing()
            self._scorer.forget_finding()
            if self._tokens is not None:
                self._tokens.forget_vocabulary()  # another model may have another vocabulary


class _FeatureProbe:
    """Checks one feature of a server when it is first needed, and after a pause if it was missing.

    The pause doubles, up to an hour, unless the feature had been there for longer than the last
    pause.
    """

    def __init__(self, finding: _FeatureFinding) -> None:
        self._finding = finding
        self._trials: dict[asyncio.AbstractEventLoop, _RunningTrial] = {}

    @property
    def is_supported(self) -> bool:
        """True if the feature was found."""
        return self._finding.is_supported

    @property
    def is_missing(self) -> bool:
        """True if the feature was checked and not found."""
        return self._finding.found_at_s is not None and not self._finding.is_supported

    @property
    def is_known_missing(self) -> bool:
        """True if the feature is missing and not yet due for another check."""
        return self.is_missing and not self.is_due

    @property
    def is_due(self) -> bool:
        """True if the feature was never checked, or was missing and the pause is over."""
        return self._is_probe_due()

    async def aclose(self) -> None:
        """End this event loop's check; later findings are not shared."""
        self._finding = replace(self._finding, trial=None)
        loop = asyncio.get_running_loop()
        trial = self._trials.get(loop)
        if trial is not None:
            await self._cancel_trial(loop, trial)

    async def probe_if_due(self, check: Check) -> None:
        """Run `check` if it is due; if it raises, nothing is known afterwards.

        If `check` returns an error, that is raised too, and the feature counts as missing for a
        short while.

        Callers at the same time share one check. Each may stop waiting; the check ends with the
        last of them.
        """
        if not self._is_probe_due():
            return
        loop = asyncio.get_running_loop()
        trial = self._trials.get(loop)
        if trial is None or trial.task.done():
            trial = self._trials[loop] = _RunningTrial(asyncio.create_task(self._run_check_and_set_finding(check)))
        trial.num_waiting += 1
        try:
            await asyncio.wait([trial.task])
            if not trial.task.cancelled():  # it is if the provider was closed
                trial.task.result()
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting:
                await self._cancel_trial(loop, trial)

    def mark_supported(self) -> None:
        self._set_finding(is_supported=True)

    def mark_missing(self) -> None:
        finding = self._finding
        if self.is_known_missing:
            return
        was_missing = self.is_missing  # then the pause doubles
        if not was_missing and (finding.found_at_s is None or now() - finding.found_at_s > finding.pause_s):
            finding.pause_s = 0.0
        self._set_finding(is_supported=False)

    def forget_finding(self) -> None:
        finding = self._finding
        finding.is_supported, finding.pause_s, finding.found_at_s = False, 0.0, None

    # --------------------------------------------------------------------------------------- inside

    def _is_probe_due(self) -> bool:
        finding = self._finding
        return not finding.is_supported and (
            finding.found_at_s is None or now() - finding.found_at_s >= finding.pause_s
        )

    def _set_finding(self, *, is_supported: bool, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        finding = self._finding
        finding.is_supported, finding.found_at_s = is_supported, now()
        if not is_supported:
            finding.pause_s = min(max(first_pause_s, 2 * finding.pause_s), _LAST_PAUSE_S)

    async def _run_check_and_set_finding(self, check: Check) -> None:
        """Run a check; if another provider of the same server runs one, wait and use its result."""
        finding = self._finding
        while (other := _find_running_trial(finding)) is not None:
            await asyncio.wait([other])
            if not self._is_probe_due():
                return
        finding.trial = asyncio.current_task()
        try:
            passes = await check()
        finally:
            finding.trial = None
        if isinstance(passes, TransientError):
            self._set_finding(is_supported=False, first_pause_s=_PAUSE_AFTER_FAILURE_S)
            raise passes
        self._set_finding(is_supported=passes)

    async def _cancel_trial(self, loop: asyncio.AbstractEventLoop, trial: _RunningTrial) -> None:
        if self._trials.get(loop) is trial:
            del self._trials[loop]
        trial.task.cancel()
        await asyncio.gather(trial.task, return_exceptions=True)  # its callers got its errors


def _list_discoverable_features(
    known: Capabilities, tokens: HttpTokenEndpoint | None, messages: HttpMessageParser | None
) -> frozenset[Feature]:
    """Return the features that a server of this kind may have."""
    features: dict[Feature, bool] = {
        "token_endpoint": tokens is not None,
        "token_scorer": tokens is not None and tokens.max_top > 0,
        "continue_prefix": known.continue_prefix,
        "message_parser": messages is not None,
    }
    return frozenset(feature for feature, is_possible in features.items() if is_possible)


@dataclass(slots=True, eq=False)
class _RunningTrial:
    """A running check, and the number of callers that wait for it."""

    task: asyncio.Task[None]
    num_waiting: int = 0


def _find_running_trial(finding: _FeatureFinding) -> asyncio.Task[Any] | None:
    """Return the check that runs on this event loop."""
    trial = finding.trial
    is_here = trial is not None and not trial.done() and trial.get_loop() is asyncio.get_running_loop()
    return trial if is_here else None


async def _passes_check(check: Awaitable[bool]) -> bool | TransientError:
    """Return the result of a check; any failure is False.

    If the server cannot answer now, the error is returned.
    """
    try:
        return await check
    except TransientError as error:
        return error
    except Exception:  # noqa: BLE001 - any other failure means no
        return False


class _TokenIdTrial:
    """Tests that chat, continued ids and batched one-token completions give the same tokens.

    It also tests that a text survives encoding and decoding. It reads few tokens: the beginnings of
    a few words, and one short conversation in two ways. The second way may find the first one's
    prompt in the server's cache. The tokenizer is called at once, since that delays no answer.
    Results are kept: an interrupted trial (its event loop ended) continues where it was.
    """

    def __init__(
        self, tokens: HttpTokenEndpoint, turns: TrialTurns, may_separate_reasoning: Callable[[], bool]
    ) -> None:
        self._tokens = tokens
        self._may_separate_reasoning = may_separate_reasoning
        self._turns = turns
        self._cached_results: dict[str, Any] = {}

    async def run_to_end(self) -> bool | TransientError:
        """Return True if token ids work, or an error if the server cannot answer now."""
        works = await _passes_check(self._check_token_id_support())
        self._cached_results.clear()
        return works

    async def _check_token_id_support(self) -> bool:
        tokens = self._tokens
        request, prompt_ids = await self._call_cached("conversation", self._encode_conversation)
        word_ids = await self._call_cached("word ids", lambda: tokens.encode(_WORDS))
        if await self._call_cached("round trip", lambda: _round_trip_test_text(tokens)) != _ROUND_TRIP_TEXT:
            return False
        has_good_batch = await self._check_batch("words", [word_ids[:2], word_ids[:3]])
        if has_good_batch is False:
            return False
        chat_text, chat_ids = await self._collect_in_turn("answer", lambda: tokens.stream_chat(request))
        text, ids = await self._collect_in_turn("continued", lambda: tokens.stream_after(prompt_ids, request))
        # The text may differ if chat separates reasoning from it.
        is_same = chat_ids == ids and (chat_text == text or self._may_separate_reasoning())
        if not is_same or has_good_batch:
            return is_same
        ends = [prompt_ids[: len(prompt_ids) - cut] for cut in range(3)]
        return await self._check_batch("ends", ends) is not False

    async def _check_batch(self, name: str, prefixes: list[list[int]]) -> bool | None:
        """Return True if a batch gives what each prefix gives by itself.

        Returns None if all give the same token, since that does not show their order.
        """
        tokens, one_token = self._tokens, replace(_REQUESTS[-1], max_tokens=1)
        batch = await self._call_in_turn(name, lambda: tokens.sample_next(prefixes, _GREEDY))
        first, *others = batch
        text, token_ids = await self._collect_in_turn(
            f"{name}, streamed", lambda: tokens.stream_after(prefixes[0], one_token)
        )
        if token_ids[:1] != [first.token_id] or not (first.is_end or text.startswith(first.text)):
            return False
        for prefix, other in zip(prefixes[1:], others, strict=True):
            alone = await self._call_in_turn(f"{name}, {len(prefix)}", partial(tokens.sample_next, [prefix], _GREEDY))
            if alone != [other]:
                return False
        return None if len({token.token_id for token in batch}) == 1 else True

    async def _call_in_turn(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return the cached result of a call, or run the call in its turn."""
        return await self._call_cached(name, lambda: self._turns.run_call(call))

    async def _collect_in_turn(self, name: str, open_stream: Callable[[], _EventStream]) -> _TextAndIds:
        return await self._call_in_turn(name, lambda: _collect_text_and_ids(open_stream()))

    async def _call_cached(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if name in self._cached_results:
            return cast("T", self._cached_results[name])
        value = self._cached_results[name] = await call()
        return value

    async def _encode_conversation(self) -> tuple[ChatRequest, list[int]]:
        """Return a request that the server's template accepts, and its tokens."""
        *others, last = _REQUESTS
        for request in others:
            try:
                return request, await self._tokens.encode_chat(request)
            except LlmSpecError:
                continue
        return last, await self._tokens.encode_chat(last)


async def _can_score_tokens(tokens: HttpTokenEndpoint, turns: TrialTurns) -> bool:
    """Return True if, at each position, the likeliest token in the scores is the sampled one."""
    ids, picked = await tokens.encode_chat(_REQUESTS[-1]), list[int]()
    for _ in range(2):
        (token,) = await turns.run_call(lambda: tokens.sample_next([[*ids, *picked]], _GREEDY))
        picked.append(token.token_id)
    rows = await turns.run_call(lambda: tokens.score([*ids, picked[0]], num_rows=2, top=2))
    same_tokens = [row.top[0][0] for row in rows] == picked
    # Scores have no text, so a token's text must not depend on its neighbours.
    alone = [await tokens.decode([token_id]) for token_id in await tokens.encode(_WORDS)]
    return same_tokens and "".join(alone) == _WORDS


async def _collect_text_and_ids(opened: _EventStream) -> _TextAndIds:
    text, token_ids = "", list[int]()
    async with opened as events:
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
                token_ids += event.token_ids or ()
    return text, token_ids


async def _round_trip_test_text(tokens: HttpTokenEndpoint) -> str:
    return await tokens.decode(await tokens.encode(_ROUND_TRIP_TEXT))
