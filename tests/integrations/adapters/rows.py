"""The rows of the table: what is asked, and by what one sees that it is so."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from .probes import (
    EARLIER,
    IMAGE,
    LATER_SYSTEM,
    PDF,
    TEXT_FILE,
    Adapter,
    FileKind,
    Json,
    NotApplicableError,
    Place,
    Scenario,
    Seen,
)
from .scripted_server import LOGPROBS, MODEL, RESPONSE_ID, Call, Reply, ScriptedServer

__all__ = ["ROWS", "Row"]

Check: TypeAlias = Callable[[Seen], bool]
Way: TypeAlias = Literal["once", "blocking", "several loops", "cancelled", "cached"]
_ANSWERS_S: Final = 20.0  # what takes longer hangs, however busy the machine is


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One row. `names`: what an error that refuses it has to name; without a `check` an error is the framework's."""

    id: str
    group: str
    title: str
    scenario: Scenario
    look: Check | None = None
    names: Sequence[str] = ()
    is_option: bool = False  # so that it is ignored where it does not arrive
    way: Way = "once"
    modes: Sequence[bool] = (False, True)  # whether it is streamed
    words: str = field(default="", repr=False)

    def try_with(self, adapter: Adapter, *, streamed: bool, own: bool) -> Seen:
        """Ask; raises NotApplicableError where the framework has no such thing."""
        if own and self.scenario.dialect == "anthropic":
            raise NotApplicableError("the framework has another model for it")
        match self.way:
            case "cached":
                return _ask_two_servers(adapter, self.scenario, streamed=streamed, own=own)
            case _:
                with ScriptedServer(self.scenario.replies) as server:
                    seen = Seen(server)
                    with warnings.catch_warnings(record=True) as found:
                        warnings.simplefilter("always")
                        try:
                            _ask(self, adapter, seen, streamed=streamed, own=own)
                        except NotApplicableError:
                            raise
                        except Exception as error:  # noqa: BLE001 - what the user gets
                            seen.error = error
                    seen.warnings = [str(warning.message) for warning in found]
                    return seen

    def check(self, seen: Seen, adapter: Adapter) -> bool:
        """Whether it is as it should be."""
        if self.look is None:
            return _is_error_of(adapter, seen.error, self.words)
        try:
            return self.look(seen)
        except (LookupError, TypeError):  # there is no such request, or no such field in it
            return False

    def describe(self, seen: Seen) -> str:
        """What came, for who mends it."""
        known = {name: value for name, value in vars(seen).items() if value and name != "server"}
        return f"{known}; server: {json.dumps(seen.bodies[-1:])[:400]}"


def _ask(row: Row, adapter: Adapter, seen: Seen, *, streamed: bool, own: bool) -> None:
    model = adapter.open(row.scenario, seen.server.url, own=own)
    ask = lambda: asyncio.wait_for(  # noqa: E731 - a coroutine for each time
        adapter.ask(model, row.scenario, seen, streamed=streamed), _ANSWERS_S
    )
    try:
        match row.way:
            case "blocking":
                adapter.ask_blocking(model, row.scenario, seen, streamed=streamed)
            case "several loops":
                for _ in range(3):
                    seen.text = ""
                    asyncio.run(ask())
            case "cancelled":
                asyncio.run(_cancel(ask(), seen, attempts=2 if own else 1))
            case _:
                asyncio.run(ask())
    finally:
        asyncio.run(adapter.close(model))


async def _cancel(asking: Any, seen: Seen, *, attempts: int) -> None:
    """Cancel it once it is answered. The frameworks' own clients lose a cancellation now and then, so they get two."""
    task = asyncio.ensure_future(asking)
    await _wait_for(seen.server.begun, _ANSWERS_S)
    for _ in range(attempts):
        task.cancel()
        await _wait_for(seen.server.left, 3.0)
        if seen.server.left.is_set():
            break
    await asyncio.wait({task})


async def _wait_for(event: threading.Event, timeout_s: float) -> None:
    await asyncio.get_running_loop().run_in_executor(None, event.wait, timeout_s)


def _ask_two_servers(adapter: Adapter, scenario: Scenario, *, streamed: bool, own: bool) -> Seen:
    """The same question to two servers with models of one name; the text of both is the second's."""
    texts: list[str] = []
    with adapter.use_cache():
        for text in ("one", "two"):
            with ScriptedServer([Reply(text)]) as server:
                seen = Seen(server)
                try:
                    texts += asyncio.run(_ask_twice(adapter, scenario, seen, streamed=streamed, own=own))
                except ImportError as error:  # the framework's cache needs more packages
                    raise NotApplicableError("the framework's cache needs more packages") from error
    seen.text = " ".join(texts)
    return seen


async def _ask_twice(adapter: Adapter, scenario: Scenario, seen: Seen, *, streamed: bool, own: bool) -> list[str]:
    model = adapter.open(scenario, seen.server.url, own=own)
    texts: list[str] = []
    for _ in range(2):
        await adapter.ask(model, scenario, seen, streamed=streamed)
        texts.append(seen.text)
    await adapter.close(model)
    return texts


# -------------------------------------------------------------------------------------------- what to look for


def _is_error_of(adapter: Adapter, error: BaseException | None, words: str) -> bool:
    """Whether it is what users of the framework catch, by a class whose name says which error it is."""
    classes = [kind for kind in type(error).__mro__ if kind.__module__.split(".")[0] in adapter.error_packages]
    is_named = any(re.search(words, kind.__name__) for kind in classes)
    if adapter.has_one_error:
        return bool(classes) and re.search(f"(?i){words}", str(error)) is not None
    status = getattr(error, "status_code", None)
    return bool(classes) and (is_named or str(status) in words.split("|"))


def _has(body: Json, name: str, value: Any) -> bool:
    return body.get(name) == value


def _chooses(seen: Seen, choice: Any) -> bool:
    return _has(seen.bodies[0], "tool_choice", choice) and len(seen.bodies[0]["tools"]) == 1


def _get_calls(message: Json) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def _is_strict(schema: Json) -> bool:
    return schema.get("additionalProperties") is False and set(schema["required"]) == set(schema["properties"])


def _get_schema(body: Json) -> Json:
    return (body.get("response_format") or {}).get("json_schema") or {}


def _get_parts(seen: Seen) -> list[Json]:
    content = seen.bodies[0]["messages"][-1]["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _is_refused(seen: Seen) -> bool:
    error = "" if seen.error is None else f"{[kind.__name__ for kind in type(seen.error).__mro__]} {seen.error}"
    return bool(seen.refusal or re.search("(?i)refus|contentfilter", error)) and not seen.text


def _keeps_later_system(seen: Seen) -> bool:
    roles = [message["role"] for message in seen.last_messages]
    contents = [message["content"] for message in seen.last_messages]
    return roles[-2] == "system" and LATER_SYSTEM in str(contents[-2]) and EARLIER[1] in str(contents[-3])


# ---------------------------------------------------------------------------------------------------- the rows

_HI: Final = Reply("Hi, it rains in Rome.")
_CALL: Final = Reply(calls=[Call()])
_SIGNED: Final = Reply(reasoning="Let me think.", signature="c2lnbmVk", calls=[Call()])
_DETAIL: Final = {"type": "reasoning.encrypted", "data": "c2VjcmV0", "id": "r1", "format": "x", "index": 0}
_PLACE: Final = Reply('{"name": "Rome", "size": 3}')
_PLACE_CALL: Final = Call(name="", arguments='{"name": "Rome", "size": 3}')


def _row(id_: str, title: str, reply: Reply | Sequence[Reply], look: Check | None, **fields: Any) -> Row:
    replies = [reply] if isinstance(reply, Reply) else reply
    of_row = {name: fields.pop(name) for name in ("names", "is_option", "way", "words", "modes") if name in fields}
    return Row(id=id_, group="", title=title, scenario=Scenario(replies=replies, **fields), look=look, **of_row)


def _option(name: str, value: Any, *, arrives_as: Sequence[str] = (), **fields: Any) -> Row:
    """An option by the name of chat completions, which arrives under that name or another of the same meaning."""
    names = arrives_as or (name,)
    return _row(
        name,
        f"`{name}`",
        _HI,
        lambda seen: any(_has(seen.bodies[0], field, value) for field in names),
        options={name: value},
        names=(name,),
        is_option=True,
        **fields,
    )


def _error(status: int, title: str, words: str, **error: Any) -> Row:
    message = "maximum context length is 8 tokens" if error else "the server says no"
    body = {"message": message, "type": "error", "code": None, **error}
    id_ = f"error-{error.get('code') or status}"
    return _row(id_, title, Reply(status=status, error=body), None, words=words)


def _file(kind: FileKind, look: Check) -> Row:
    title = {"image": "an image", "PDF": "a PDF file", "text": "a text file"}[kind]
    return _row(
        f"file-{kind.lower()}", title, _HI, look, file=kind, names=("image", "file", "Attachment"), is_option=True
    )


def _sends(seen: Seen, kind: str, data: bytes) -> bool:
    parts = [part for part in _get_parts(seen) if part["type"] == kind]
    return base64.b64encode(data).decode() in json.dumps(parts)


def _tool_choice(name: str, title: str, look: Check) -> Row:
    return _row(
        f"tool-choice-{name}",
        title,
        _HI if name == "none" else [_CALL, _HI],
        look,
        uses_tools=True,
        tool_choice=name,
        names=("tool_choice",),
        is_option=True,
    )


def _count(id_: str, title: str, number: int) -> Row:
    return _row(f"usage-{id_}", title, _HI, lambda seen: seen.usage.get(id_.replace("-", "_")) == number)


_NAMED: Final = {"type": "function", "function": {"name": "get_weather"}}
_GROUPS: Final[dict[str, Sequence[Row]]] = {
    "Answers": (
        _row("text", "text", _HI, lambda seen: seen.text == _HI.content),
        _row("reasoning", "reasoning is given beside the text", replace(_HI, reasoning="Let me think."),
             lambda seen: seen.reasoning == "Let me think." and seen.text == _HI.content),
        _row("think-tags", "`<think>` in the text is reasoning", Reply("<think>Let me think.</think>Hi."),
             lambda seen: seen.text == "Hi."),
        _row("refusal", "a refusal is the framework's refusal", Reply(refusal="I cannot do that."), _is_refused),
        _row("finish-reason", "finish reason", replace(_HI, finish="length"),
             lambda seen: seen.finish_reason == "length"),
        _row("response-id", "id of the response", _HI, lambda seen: seen.response_id == RESPONSE_ID),
        _row("model-name", "the model's name, as lists of prices have it", _HI,
             lambda seen: seen.model_name in (MODEL, "gpt-4o-mini")),
        _row("logprobs", "log-probabilities", replace(_HI, logprobs=True),
             lambda seen: list(seen.logprobs) == [LOGPROBS[0]["logprob"]], options={"logprobs": True},
             names=("logprobs",)),
        _row("acceptance", "how the answer came about (acceptance, guarantee, reason)", _HI,
             lambda seen: seen.figures is not None and {"guarantee", "acceptance_rate"} <= seen.figures.keys()),
    ),
    "Tools": (
        _row("tool", "a call is run, its result goes back", [_CALL, _HI],
             lambda seen: seen.runs == [{"city": "Rome"}] and seen.last_messages[-1]["content"] == "It rains."
             and seen.text == _HI.content, uses_tools=True),
        _row("tools-parallel", "several calls in an answer",
             [Reply(calls=[Call(), Call(arguments='{"city": "Bern"}', id="call_2")]), _HI],
             lambda seen: sorted(run["city"] for run in seen.runs) == ["Bern", "Rome"]  # maybe at once
             and [m["tool_call_id"] for m in seen.last_messages if m["role"] == "tool"] == ["call_1", "call_2"],
             uses_tools=True),
        _tool_choice("required", "`tool_choice`: some tool", lambda seen: _chooses(seen, "required")),
        _tool_choice("get_weather", "`tool_choice`: one tool",
                     lambda seen: _chooses(seen, _NAMED) or _chooses(seen, "required")),
        _tool_choice("none", "`tool_choice`: none",
                     lambda seen: _has(seen.bodies[0], "tool_choice", "none") or not seen.bodies[0].get("tools")),
        _row("parallel-tool-calls", "`parallel_tool_calls`", [_CALL, _HI],
             lambda seen: _has(seen.bodies[0], "parallel_tool_calls", False), uses_tools=True,
             options={"parallel_tool_calls": False}, names=("parallel_tool_calls",), is_option=True),
        _row("strict-tools", "a strict tool has a strict schema", [_CALL, _HI],
             lambda seen: seen.bodies[0]["tools"][0]["function"]["strict"] is True
             and _is_strict(seen.bodies[0]["tools"][0]["function"]["parameters"]), uses_tools=True, strict_tools=True),
        _row("cut-off-call", "a call that was cut off is not run",
             [Reply(calls=[Call(arguments='{"city": "Ro')], finish="length"), _HI], lambda seen: seen.runs == [],
             uses_tools=True),
        _row("broken-arguments", "broken arguments are not run, and go back",
             [Reply(calls=[Call(arguments='{"city": Rome')]), _HI],
             lambda seen: seen.runs == [] and "Rome" in _get_calls(seen.assistant_message)[0][1],
             uses_tools=True),
        _row("repeated-name", "a name in every piece of a call is one name",
             [replace(_CALL, repeats_names=True), _HI],
             lambda seen: seen.runs == [{"city": "Rome"}]
             and _get_calls(seen.assistant_message)[0][0] == "get_weather", uses_tools=True),
    ),
    "What goes back with the next question": (
        _row("answer-goes-back", "the answer, and nothing of ours", _HI,
             lambda seen: len(seen.bodies) == 2 and "llm_spec" not in json.dumps(seen.bodies[1])
             and seen.assistant_message["content"] in (_HI.content, [{"type": "text", "text": _HI.content}])
             and set(seen.assistant_message) <= {"role", "content", "refusal", "name", "tool_calls"}, asks_again=True),
        _row("reasoning-goes-back", "reasoning, as text (`reasoning_content`)",
             [replace(_CALL, reasoning="Let me think."), _HI],
             lambda seen: seen.assistant_message.get("reasoning_content") == "Let me think.", uses_tools=True),
        _row("reasoning-details-go-back", "reasoning, encrypted (`reasoning_details`)",
             [replace(_CALL, reasoning_details=[_DETAIL]), _HI],
             lambda seen: [d["data"] for d in seen.assistant_message["reasoning_details"]] == ["c2VjcmV0"],
             uses_tools=True),
        _row("signature-goes-back", "Anthropic's thinking, with its signature", [_SIGNED, _HI],
             lambda seen: [(b["thinking"], b["signature"]) for b in seen.assistant_message["content"]
                           if b["type"] == "thinking"] == [("Let me think.", "c2lnbmVk")],
             uses_tools=True, dialect="anthropic"),
        _row("later-system", "a later system message keeps its place", _HI, _keeps_later_system, later_system=True),
    ),
    "Structured output": (
        _row("schema", "by a JSON schema", _PLACE,
             lambda seen: seen.structured == Place(name="Rome") and _get_schema(seen.bodies[0]) != {}, output="schema"),
        _row("strict-schema", "a strict schema is strict", _PLACE,
             lambda seen: _get_schema(seen.bodies[0]).get("strict") is True
             and _is_strict(_get_schema(seen.bodies[0])["schema"]), output="strict schema"),
        _row("schema-by-tool", "by a call of a tool", Reply(calls=[_PLACE_CALL]),
             lambda seen: seen.structured == Place(name="Rome"), output="tool"),
        _row("schema-and-tools", "beside tools", _PLACE,
             lambda seen: seen.structured == Place(name="Rome") and bool(seen.bodies[0].get("tools")),
             output="schema and tools"),
    ),
    "Usage": (
        _row("usage", "input and output tokens", _HI,
             lambda seen: (seen.usage.get("input"), seen.usage.get("output")) == (110, 70)),
        _count("cached", "tokens read from a prompt cache", 30),
        _count("cache-written", "tokens written to a prompt cache", 50),
        _count("reasoning", "tokens of reasoning", 20),
        _row("cost", "cost, by the framework's list of prices", _HI, lambda seen: bool(seen.cost), dialect="openai"),
    ),
    "Errors, as the framework's own": (
        _error(400, "400", "BadRequest|InvalidRequest|RequestRejected|400"),
        _error(401, "401", "Authentication|401"),
        _error(403, "403", "PermissionDenied|Authentication|403"),
        _error(404, "404", "NotFound|404"),
        _error(429, "429", "RateLimit|429"),
        _error(500, "500", "InternalServer|ModelServer|ModelAPIError|500"),
        _error(400, "context length exceeded", "Context", code="context_length_exceeded"),
        _row("timeout", "timeout", replace(_HI, holds=True), None, timeout_s=0.3, words="Timeout|TimedOut"),
        _row("max-retries", "the framework's number of retries holds", Reply(status=503),
             lambda seen: len(seen.bodies) == 2, max_retries=1, names=("max_retries",), is_option=True),
    ),
    "Options": (
        _option("temperature", 0.5),
        _option("top_p", 0.5),
        _option("max_tokens", 9, arrives_as=("max_tokens", "max_completion_tokens")),
        _option("stop", ["END"]),
        _option("seed", 3),
        _option("frequency_penalty", 0.5),
        _option("presence_penalty", 0.5),
        _option("logit_bias", {"7": -9}),
        _option("reasoning_effort", "low"),
        _option("prediction", {"type": "content", "content": "It rains."}, dialect="openai"),
        _option("user", "ann"),
        _option("metadata", {"job": "1"}),
        _option("service_tier", "flex"),
        _row("extra_body", "`extra_body`", _HI, lambda seen: _has(seen.bodies[0], "top_k", 5),
             options={"extra_body": {"top_k": 5}}, names=("extra_body",), is_option=True),
        _row("extra_headers", "`extra_headers`", _HI,
             lambda seen: {name.lower(): v for name, v in seen.server.headers[0].items()}.get("x-job") == "1",
             options={"extra_headers": {"x-job": "1"}}, names=("extra_headers",), is_option=True),
    ),
    "Files and marks": (
        _file("image", lambda seen: _sends(seen, "image_url", IMAGE)),
        _file("PDF", lambda seen: _sends(seen, "file", PDF)),
        _file("text", lambda seen: TEXT_FILE.decode() in json.dumps(_get_parts(seen))
              or _sends(seen, "file", TEXT_FILE)),
        _row("cache-control", "marks of prompt caches (`cache_control`)", _HI,
             lambda seen: "cache_control" in json.dumps(seen.bodies[0]["messages"]), marks_cache=True, is_option=True,
             names=("cache_control",)),
    ),
    "Running": (
        _row("pieces", "text comes in pieces", _HI, lambda seen: seen.num_pieces > 1, modes=(True,)),
        _row("cancelled", "cancelling ends the request", replace(_HI, holds=True),
             lambda seen: seen.server.num_left == 1, way="cancelled"),
        _row("several-loops", "one model on several event loops", _HI,
             lambda seen: seen.text == _HI.content and len(seen.bodies) == 3, way="several loops"),
        _row("blocking", "blocking calls", _HI, lambda seen: seen.text == _HI.content, way="blocking"),
        _row("cache", "the framework's cache tells servers apart", _HI, lambda seen: seen.text == "one one two two",
             way="cached"),
    ),
}  # fmt: skip
ROWS: Final = tuple(replace(row, group=group) for group, rows in _GROUPS.items() for row in rows)
