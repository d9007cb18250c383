"""Models in this process that are shown tools: the built-in pair with a chat template for a format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llm_spec_onnx

from llm_spec.contract.formats import FORMATS, MessageFormat

__all__ = ["FORMATS_BY_NAME", "TOOLS", "write_tool_model"]

_BUILTIN = Path(str(llm_spec_onnx.__file__)).parent / "builtin"
FORMATS_BY_NAME = {row.name: row for row in FORMATS}
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
)
_TEMPLATE = """
{%- if tools %}{{ 'TOOLS' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{ message['role'] + ': ' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- OPEN + call['function']['name'] + (call['function']['arguments'] | tojson) }}
{%- endfor %}{{ '\\n' }}{% endfor %}{# MARKS #}"""


def _build_template(row: MessageFormat, reasoning: str = "") -> str:
    """A chat template that has the marks of a format."""
    marks = [mark if isinstance(mark, str) else mark[0] for mark in row.template_marks]
    return _TEMPLATE.replace("OPEN", json.dumps(row.call_open)).replace("MARKS", " ".join([*marks, reasoning]))


def write_tool_model(folder: Path, row: MessageFormat, *, reasoning: str = "") -> Path:
    """The built-in draft model with the chat template of a format; `reasoning` stands at the end of each prompt."""
    return write_templated_model(folder, _build_template(row, reasoning and "</think>") + reasoning)


def write_model_without_tools(folder: Path) -> Path:
    """The built-in draft model with a chat template that has no place for tools."""
    return write_templated_model(folder, "{% for message in messages %}{{ message['content'] }}{% endfor %}")


def write_templated_model(folder: Path, template: str) -> Path:
    """The built-in draft model with a chat template."""
    folder.mkdir()
    for path in (_BUILTIN / "draft").iterdir():
        if path.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (folder / path.name).symlink_to(path)
    config = json.loads((_BUILTIN / "draft" / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
