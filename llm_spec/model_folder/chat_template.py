"""The chat template of a model folder: messages and tools to the text of a prompt.

It runs in jinja2's sandbox with what Hugging Face's templates expect: `messages`, `tools`, `add_generation_prompt`,
`bos_token`, `eos_token`, `raise_exception`, `strftime_now`, the filter `tojson`, `break`, `continue` and `generation`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

from llm_spec.chat import ChatMessage, ChatRequest
from llm_spec.errors import InvalidRequestError, ModelLoadError
from llm_spec.message_format.formats import find_message_format, find_reasoning_marks
from llm_spec.model_folder.files import read_text_file

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """The templates of a folder: its default, and the one for requests with tools where there is another.

    message_format: how the model writes tool calls; None: it is shown no tools, or in a way that is not known.
    reasoning: the marks of its reasoning; None: it has none.
    """

    def __init__(self, folder: Path, default: str, with_tools: str) -> None:
        self._folder = folder
        self._default = _compile_template(default, folder)
        self._with_tools = self._default if with_tools == default else _compile_template(with_tools, folder)
        self.message_format = find_message_format(with_tools)
        self.reasoning = find_reasoning_marks(default)

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """`chat_template.jinja`, or the field of tokenizer_config.json; None: the folder has none.

        Raises ModelLoadError for one that is broken.
        """
        sources = _read_template_sources(folder, config)
        if "default" not in sources:
            return None
        return cls(folder, sources["default"], sources.get("tool_use", sources["default"]))

    def render(self, request: ChatRequest, special_tokens: Mapping[str, str]) -> str:
        """The prompt of a request, ready for the answer; raises InvalidRequestError for what the template refuses."""
        from jinja2 import TemplateError

        uses_tools = bool(request.tools) and request.tool_choice != "none"
        if uses_tools and self.message_format is None:
            raise InvalidRequestError(
                f"tools are set; the chat template in {self._folder} has no place for them, or shows calls in a form "
                "that is not known; give the folder a chat_template.jinja that lists `tools`"
            )
        variables: dict[str, Any] = {**special_tokens, **_read_template_variables(request)}
        if uses_tools:
            variables["tools"] = [dict(tool) for tool in request.tools]
        template = self._with_tools if uses_tools else self._default
        messages = self._convert_messages_for_template(request.messages)
        try:
            return str(template.render(**{**variables, "messages": messages, "add_generation_prompt": True}))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = f"the chat template in {self._folder} refuses these messages"
            raise InvalidRequestError(f"{reason}: {error}") from error

    def _convert_messages_for_template(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Messages as templates want them: arguments as objects, results with the names of what was called."""
        names: dict[str, str] = {}
        converted: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            fields = {**message.to_openai(), "role": _map_developer_role_to_system(message), "content": message.text}
            if message.tool_calls:
                fields["tool_calls"] = [
                    {
                        "id": self._shorten_call_id(call.id),
                        "type": "function",
                        "function": {"name": call.name, "arguments": _parse_tool_call_arguments(call.arguments)},
                    }
                    for call in message.tool_calls
                ]
                names.update((call.id, call.name) for call in message.tool_calls)
            if message.role == "tool":
                call_id = message.tool_call_id or ""
                if call_id not in names:
                    raise InvalidRequestError(
                        f"messages[{index}].tool_call_id is {message.tool_call_id!r}; no message before it makes such "
                        "a call"
                    )
                fields |= {"tool_call_id": self._shorten_call_id(call_id), "name": message.name or names[call_id]}
            converted.append(fields)
        return converted

    def _shorten_call_id(self, call_id: str) -> str:
        """A call's id as the template takes it: some want so many letters and digits, and clients write others."""
        length = None if self.message_format is None else self.message_format.id_characters
        if length is None or (len(call_id) == length and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:length]


def _read_template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: the file's, the field's, or the field's list of several (the older layout)."""
    found: Any = config.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(found, str):
        sources["default"] = found
    elif isinstance(found, list):
        sources = {t["name"]: t["template"] for t in cast("list[dict[str, str]]", found)}
    if (folder / "chat_template.jinja").is_file():
        sources = {"default": read_text_file(folder / "chat_template.jinja")}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = read_text_file(path)
    return sources


def _compile_template(source: str, folder: Path) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationExtension(Extension):
        """`{% generation %}` marks what a model writes, for training; here it is left out."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    extensions: list[Any] = ["jinja2.ext.loopcontrols", GenerationExtension]
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals.update(raise_exception=_raise_template_error, strftime_now=_strftime_now)
    environment.filters["tojson"] = _dump_template_json  # jinja2's own escapes what HTML does not like
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelLoadError(f"the chat template in {folder} is broken: {error}") from error


def _read_template_variables(request: ChatRequest) -> dict[str, Any]:
    """What a request says to the template itself."""
    given: Any = request.extra.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs is {given!r}; it must be an object")
    variables = dict(cast("Mapping[str, Any]", given))
    effort = request.extra.get("reasoning_effort") or _get_extra_field_text(request, "reasoning", "effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        variables.setdefault("enable_thinking", effort != "none")
    thinking = request.extra.get("enable_thinking")
    if thinking is None:
        thinking = {"enabled": True, "disabled": False}.get(_get_extra_field_text(request, "thinking", "type") or "")
    if thinking is not None:
        variables.setdefault("enable_thinking", thinking)
    return variables


def _get_extra_field_text(request: ChatRequest, name: str, part: str) -> str | None:
    """A text of a field of `extra` that is an object; raises InvalidRequestError where it is another."""
    value: Any = request.extra.get(name) or {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} is {value!r}; it must be an object")
    text: Any = cast("Mapping[str, Any]", value).get(part)
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"{name}.{part} is {text!r}; it must be a text")
    return text


def _parse_tool_call_arguments(arguments: str) -> Any:
    """Arguments as an object, which templates write in their own way; other JSON stays text."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return cast("Any", value) if isinstance(value, dict) else arguments


def _map_developer_role_to_system(message: ChatMessage) -> str:
    """Templates know no developers, whose messages are what those of the system were before."""
    return "system" if message.role == "developer" else message.role


def _dump_template_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _raise_template_error(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
