"""A chat model that answers by rules.

It calls tools, returns JSON that fits a schema, or repeats the question.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import islice
from typing import Any, Final, TypeAlias, cast

from llm_spec.contract.entry import ProviderEntry
from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.events import ChatResponse, Finish, StreamEvent, TextDelta, ToolCallDelta, Usage
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.response import complete_from_stream
from llm_spec.measure.tokens import count_prompt_pieces, iterate_piece_ends

__all__ = ["RULES", "RuleBasedProvider"]

Json: TypeAlias = Mapping[str, Any]

_WORD: Final = re.compile(r"[a-z]+")
_KEYS: Final = re.compile(r"((?:['\"]\w+['\"](?:\s*,)?\s+(?:and\s+)?)+)keys?\b")
_MIN_LONG_WORD: Final = 4  # letters of a word that can choose a tool
_CONSTANT_VALUES: Final = {"boolean": True, "null": None}


class RuleBasedProvider:
    """Answer from the last message alone, the same every time; for tests of other programs.

    - A tool's result is repeated: `The tool said: …`.
    - A tool is called if `tool_choice` requires it, or if the user's text has a long word of its
      name. Its arguments fit its schema: numbers come from the text in order; strings are the
      quoted parts of the text, or the whole text.
    - `response_format` is answered with such a value. `json_object` is answered with `{"answer":
      text}`, or with the keys that the text has in quotes before the word (`with 'a' and 'b'
      keys`).
    - Any other text is repeated: `You said: …`, word by word, within `max_tokens` words, up to a
      stop string.
    - `stream_chunks` serves `n`, `logprobs` and `top_logprobs`: equal choices, every piece certain
      and without alternatives.
    """

    def __init__(self, name: str = "rules:any") -> None:
        self.name = name
        self.capabilities = Capabilities(tools=True, response_format=True)

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with aclosing(self._stream_answer(request)) as events:
            yield events

    @asynccontextmanager
    async def stream_chunks(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[Json]]:
        async with aclosing(self._stream_chunks(request)) as chunks:
            yield chunks

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _stream_answer(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        for event in _generate_rule_based_answer(request):
            await asyncio.sleep(0)
            yield event

    async def _stream_chunks(self, request: ChatRequest) -> AsyncGenerator[Json]:
        num_choices = int(request.extra.get("n") or 1)
        async with aclosing(self._stream_answer(request)) as events:
            async for event in events:
                choice = _make_openai_choice(request, event)
                for index in range(num_choices):
                    yield _make_openai_chunk(request, self.name, [{"index": index, **choice}])
                if isinstance(event, Finish) and event.usage is not None:
                    yield {
                        **_make_openai_chunk(request, self.name, []),
                        "usage": _make_openai_usage(event.usage, num_choices),
                    }


def _make_openai_chunk(request: ChatRequest, model: str, choices: Sequence[Json]) -> Json:
    kind = "text_completion" if request.raw else "chat.completion.chunk"
    return {"id": "rules", "object": kind, "created": 0, "model": model, "choices": choices}


def _make_openai_choice(request: ChatRequest, event: StreamEvent) -> Json:
    """Make the choice of a chunk from one event, without its index."""
    text = event.text if isinstance(event, TextDelta) else ""
    finish_reason = event.finish_reason if isinstance(event, Finish) else None
    logprobs = _make_certain_logprobs(request, text) if isinstance(event, TextDelta) else None
    content: dict[str, Any] = {"text": text} if request.raw else {"delta": _make_openai_delta(event)}
    return {**content, "logprobs": logprobs, "finish_reason": finish_reason}


def _make_openai_delta(event: StreamEvent) -> Json:
    match event:
        case TextDelta():
            return {"role": "assistant", "content": event.text}
        case ToolCallDelta():
            begun = {} if event.id is None else {"id": event.id, "type": "function"}
            function = {} if event.name is None else {"name": event.name}
            return {
                "tool_calls": [{"index": event.index, **begun, "function": {**function, "arguments": event.arguments}}]
            }
        case _:
            return {}


def _make_certain_logprobs(request: ChatRequest, text: str) -> Json | None:
    """Make the log-probabilities of a certain piece without alternatives."""
    if request.raw:
        if request.extra.get("logprobs") is None:
            return None
        top = {text: 0.0} if request.extra["logprobs"] else {}
        return {"tokens": [text], "token_logprobs": [0.0], "top_logprobs": [top]}
    if not request.extra.get("logprobs"):
        return None
    certain: Json = {"token": text, "logprob": 0.0, "bytes": list(text.encode(errors="replace"))}
    return {"content": [{**certain, "top_logprobs": [certain] if request.extra.get("top_logprobs") else []}]}


def _make_openai_usage(usage: Usage, num_choices: int) -> Json:
    num_output = usage.output_tokens * num_choices
    total = usage.input_tokens + num_output
    return {"prompt_tokens": usage.input_tokens, "completion_tokens": num_output, "total_tokens": total}


def _generate_rule_based_answer(request: ChatRequest) -> Iterator[StreamEvent]:
    num_input = count_prompt_pieces(request)
    called = _choose_function(request)
    if called is not None:
        arguments = json.dumps(
            _make_value_for_schema(called.get("parameters") or {}, _ValueHints(_get_last_user_text(request)))
        )
        yield ToolCallDelta(0, "call_0", str(called["name"]))
        num_output = 0
        for piece in _iter_text_pieces(arguments):
            num_output += 1
            yield ToolCallDelta(0, arguments=piece)
        yield Finish("tool_calls", Usage(input_tokens=num_input, output_tokens=num_output), "tool_calls")
        return
    text = _write_answer_text(request)
    places = ((at, stop) for stop in request.stop if (at := text.find(stop)) >= 0)
    end, stop_string = min(places, default=(len(text), None))
    pieces = _iter_text_pieces(text[:end])
    num_output = 0
    limit = request.extra.get("max_tokens", request.max_tokens)  # 0 is only possible in `extra`
    for piece in islice(pieces, None if limit is None else min(limit, sys.maxsize)):
        num_output += 1
        yield TextDelta(piece)
    usage = Usage(input_tokens=num_input, output_tokens=num_output)
    if next(pieces, None) is not None:
        yield Finish("length", usage, "max_tokens")
    else:
        yield Finish("stop", usage, None if stop_string is None else "stop_string", stop_string=stop_string)


def _iter_text_pieces(text: str) -> Iterator[str]:
    """Yield the pieces of a text, each cut when it is needed."""
    start = 0
    for end in iterate_piece_ends(text, 0):
        yield text[start:end]
        start = end


def _get_last_user_text(request: ChatRequest) -> str:
    return next((m.text for m in reversed(request.messages) if m.role == "user"), "")


def _write_answer_text(request: ChatRequest) -> str:
    last = request.messages[-1]
    if request.response_format is not None and request.response_format.get("type") != "text":
        if request.response_format.get("type") == "json_object":
            keys = re.findall(r"\w+", " ".join(_KEYS.findall(_get_last_user_text(request))).replace(" and ", " "))
            return json.dumps(dict.fromkeys(keys or ["answer"], _get_last_user_text(request)))
        schema = cast("Json", request.response_format.get("json_schema") or {}).get("schema")
        return json.dumps(_make_value_for_schema(cast("Json", schema or {}), _ValueHints(_get_last_user_text(request))))
    return f"The tool said: {last.text}" if last.role == "tool" else f"You said: {last.text}"


def _choose_function(request: ChatRequest) -> Json | None:
    """Return the function to call, or None."""
    functions = [_get_tool_function(tool) for tool in request.tools if tool.get("type") == "function"]
    choice = request.tool_choice
    if isinstance(choice, Mapping):
        named = choice.get("function")
        function_name = cast("Json", named).get("name") if isinstance(named, Mapping) else named
        for function in functions:
            if function["name"] == function_name:
                return function
        raise InvalidRequestError(f"tool_choice names {function_name!r}, which is not among the tools")
    if not functions or choice == "none":
        return None
    if choice == "required":
        return functions[0]
    if request.messages[-1].role != "user":
        return None
    words = set(_WORD.findall(_get_last_user_text(request).lower()))
    return next((f for f in functions if words & _find_long_words(str(f["name"]))), None)


def _get_tool_function(tool: Json) -> Json:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(cast("Json", function).get("name"), str):
        raise InvalidRequestError(f"tools holds {tool!r}; a function needs a name")
    return cast("Json", function)


def _find_long_words(name: str) -> set[str]:
    return {word for word in _WORD.findall(name.lower()) if len(word) >= _MIN_LONG_WORD}


class _ValueHints:
    """The parts of a text that can fill values."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.numbers = iter(re.findall(r"-?\d+(?:\.\d+)?", text))
        self.quoted = iter(re.findall(r"['\"]([^'\"]+)['\"]", text))


def _make_value_for_schema(schema: Json, hints: _ValueHints, definitions: Json | None = None) -> Any:
    """Make a value that fits a JSON schema."""
    definitions = definitions or cast("Json", schema.get("$defs") or schema.get("definitions") or {})
    if "$ref" in schema:
        return _make_value_for_schema(definitions[str(schema["$ref"]).rsplit("/", 1)[-1]], hints, definitions)
    for several in ("anyOf", "oneOf", "allOf"):
        if schema.get(several):
            return _make_value_for_schema(schema[several][0], hints, definitions)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = str(cast("list[str]", kind)[0] if isinstance(kind, list) else kind)
    if kind == "object":
        fields = cast("Mapping[str, Json]", schema.get("properties") or {})
        return {name: _make_value_for_schema(field, hints, definitions) for name, field in fields.items()}
    if kind == "array":
        return [_make_value_for_schema(schema.get("items") or {}, hints, definitions)]
    return _make_scalar_for_schema(schema, kind, hints)


def _make_scalar_for_schema(schema: Json, kind: str, hints: _ValueHints) -> Any:
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        choices = cast("Sequence[Any]", schema["enum"])
        return next((choice for choice in choices if str(choice).lower() in hints.text.lower()), choices[0])
    if kind in ("integer", "number"):
        number = float(next(hints.numbers, 1))
        return int(number) if kind == "integer" else number
    return _CONSTANT_VALUES[kind] if kind in _CONSTANT_VALUES else next(hints.quoted, hints.text)


def _load_rule_based_provider(model: str, base_url: str | None) -> RuleBasedProvider:  # noqa: ARG001 - it is nowhere
    return RuleBasedProvider(f"rules:{model or 'any'}")


RULES: Final = ProviderEntry(
    load=_load_rule_based_provider, summary="target for tests: calls tools, returns JSON, repeats what was said"
)
