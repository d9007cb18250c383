"""The chat template of a model folder, which turns messages and tools into the text of a prompt.

It runs in jinja2's sandbox with the names that Hugging Face's templates expect: `messages`,
`tools`, `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception`, `strftime_now`, the
filter `tojson`, `break`, `continue` and `generation`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from llm_spec.contract.errors import InvalidRequestError, ModelLoadError
from llm_spec.contract.formats import find_message_format, find_reasoning_marks
from llm_spec.contract.messages import ChatMessage, ToolCall
from llm_spec.contract.request import ChatRequest
from llm_spec.kit.model_folder.files import read_text_file
from llm_spec.kit.model_folder.template_traits import TemplateTraits, arrange_messages, find_template_traits

__all__ = ["ChatTemplate"]

# Names under which templates read the reasoning of earlier turns: most; some of vLLM's; gpt-oss's
# and LFM's.
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
_TRIAL_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": "trial", "description": "", "parameters": {"type": "object", "properties": {}}},
}
# The variables for absent tools and documents. The first are transformers', since templates test
# for absence in several ways. The second are for templates that accept none of these values.
_ABSENT: Final[tuple[Mapping[str, None], ...]] = ({"tools": None, "documents": None}, {})


class ChatTemplate:
    """The templates of a folder: a default one, and another for requests with tools, if any.

    - `message_format`: how the model writes tool calls, or None if the template shows it no tools
      or shows them in an unknown form.
    - `reasoning`: the marks of the model's reasoning, or None if it has none.
    """

    def __init__(self, folder: Path, default: str, with_tools: str) -> None:
        self._folder = folder
        self._default = _compile_template(default, folder)
        self._with_tools = self._default if with_tools == default else _compile_template(with_tools, folder)
        # by whether there are tools
        self._traits: dict[bool, tuple[TemplateTraits, Mapping[str, None]]] = {}
        self.message_format = find_message_format(with_tools)
        self.reasoning = find_reasoning_marks(default)

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """Load `chat_template.jinja`, or the field of tokenizer_config.json.

        Returns None if the folder has neither. Raises ModelLoadError if the template is broken.
        """
        sources = _read_template_sources(folder, config)
        if "default" not in sources:
            return None
        return cls(folder, sources["default"], sources.get("tool_use", sources["default"]))

    def render(self, request: ChatRequest, special_tokens: Mapping[str, str]) -> str:
        """Return the prompt of a request, ready for the answer.

        Raises InvalidRequestError if the template refuses the messages, or has no place for tools.
        """
        uses_tools = bool(request.tools) and request.tool_choice != "none"
        if uses_tools and self.message_format is None:
            raise InvalidRequestError(
                f"tools are set; the chat template in {self._folder} has no place for them, or shows calls in an "
                "unknown form; give the folder a chat_template.jinja that lists `tools`"
            )
        traits, absent = self._get_traits(special_tokens, uses_tools=uses_tools)
        variables = {**absent, **special_tokens, **_read_template_variables(request)}
        if uses_tools:
            variables["tools"] = [dict(tool) for tool in request.tools]
        names = _find_names_of_calls(request.messages)
        return self._render_messages(arrange_messages(request.messages, traits), names, variables)

    def _render_messages(
        self, messages: Sequence[ChatMessage], names: Mapping[str, str], variables: Mapping[str, Any]
    ) -> str:
        from jinja2 import TemplateError

        template = self._default if variables.get("tools") is None else self._with_tools
        converted = [self._convert_message_for_template(message, names) for message in messages]
        try:
            return str(template.render(**{**variables, "messages": converted, "add_generation_prompt": True}))
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            reason = f"the chat template in {self._folder} refuses these messages"
            raise InvalidRequestError(f"{reason}: {error}") from error

    def _get_traits(
        self, special_tokens: Mapping[str, str], *, uses_tools: bool
    ) -> tuple[TemplateTraits, Mapping[str, None]]:
        """Return the template's traits with or without tools, and the variables for absent things.

        They are found once.
        """
        if uses_tools not in self._traits:
            ways = [self._find_traits({**absent, **special_tokens}, uses_tools=uses_tools) for absent in _ABSENT]
            found = ((traits, absent) for traits, absent in zip(ways, _ABSENT, strict=True) if traits is not None)
            self._traits[uses_tools] = next(found, (TemplateTraits(), _ABSENT[0]))
        return self._traits[uses_tools]

    def _find_traits(self, variables: Mapping[str, Any], *, uses_tools: bool) -> TemplateTraits | None:
        def render(messages: Sequence[ChatMessage]) -> str | None:
            try:
                tools = {"tools": [_TRIAL_TOOL]} if uses_tools else {}
                return self._render_messages(messages, _find_names_of_calls(messages), {**variables, **tools})
            except InvalidRequestError:
                return None

        return find_template_traits(render, uses_tools=uses_tools)

    def _convert_message_for_template(self, message: ChatMessage, names: Mapping[str, str]) -> dict[str, Any]:
        """Convert a message to the form that templates expect.

        Arguments are objects, and a result has the name of the called tool.
        """
        fields = {**message.to_openai(), "role": message.role, "content": message.text}
        if message.reasoning:
            fields |= dict.fromkeys(_REASONING_FIELDS, message.reasoning)
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": self._shorten_call_id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parse_tool_call_arguments(call)},
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            call_id = message.tool_call_id or ""
            fields |= {"tool_call_id": self._shorten_call_id(call_id), "name": message.name or names[call_id]}
        return fields

    def _shorten_call_id(self, call_id: str) -> str:
        """Return a call's id in the length that the template takes.

        Some templates require a fixed number of letters and digits, but clients write other ids.
        """
        length = None if self.message_format is None else self.message_format.id_characters
        if length is None or (len(call_id) == length and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:length]


def _read_template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name, from the file or the field; the older layout is a list."""
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
        """Ignores `{% generation %}`, which marks the model's text for training."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    extensions: list[Any] = ["jinja2.ext.loopcontrols", GenerationExtension]
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals.update(raise_exception=_raise_template_error, strftime_now=_strftime_now)
    # jinja2's own escapes the characters of HTML
    environment.filters["tojson"] = _dump_template_json
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelLoadError(f"the chat template in {folder} is broken: {error}") from error


def _read_template_variables(request: ChatRequest) -> dict[str, Any]:
    """Return the variables that a request sets for the template."""
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
    """Return a text inside an object of `extra`.

    Raises InvalidRequestError if either has another type.
    """
    value: Any = request.extra.get(name) or {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} is {value!r}; it must be an object")
    text: Any = cast("Mapping[str, Any]", value).get(part)
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"{name}.{part} is {text!r}; it must be a text")
    return text


def _find_names_of_calls(messages: Sequence[ChatMessage]) -> Mapping[str, str]:
    """Return the name of each call in a conversation, by its id.

    Raises InvalidRequestError if a result belongs to no call.
    """
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        names.update((call.id, call.name) for call in message.tool_calls)
        if message.role == "tool" and (message.tool_call_id or "") not in names:
            raise InvalidRequestError(
                f"messages[{index}].tool_call_id is {message.tool_call_id!r}; no message before it makes such a call"
            )
    return names


def _parse_tool_call_arguments(call: ToolCall) -> Any:
    """Return arguments as an object, which templates can format; other JSON stays text."""
    if call.kind == "custom":
        return {"input": call.arguments}
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return cast("Any", value) if isinstance(value, dict) else call.arguments


def _dump_template_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _raise_template_error(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
