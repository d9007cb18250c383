"""The table of fields: what each is at a server and in this process, and nothing decides by another list."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from speculating_share import judge_at_server, needs_more_than_text, send_all
from support.tool_models import FORMATS_BY_NAME, TOOLS, write_tool_model

from llm_spec import ChatRequest
from llm_spec.contract.fields import (
    FIELDS,
    LIMIT_FIELDS,
    METADATA_FIELDS,
    PASSED_FIELDS,
    TABLE,
    find_local_field_refusal,
    find_local_field_use,
)
from llm_spec.server.apis import chat_completions, completions, messages_parser, responses_parser
from llm_spec.strategies.base import find_multi_call_refusal, find_prediction_refusal

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_table() -> None:
    tool = ROOT / "tools" / "list_request_fields.py"
    ended = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "request-fields.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{ended.stdout}"), "run: python tools/list_request_fields.py --write"


@pytest.mark.parametrize(
    ("body", "is_more"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function"}, {"name": "f"}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "image"}]}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, True),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, True),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, True),
        ({"messages": [], "modalities": ["text", "audio"]}, True),
    ],
)
def test_bodies_that_want_more_than_text_are_counted_apart(body: dict[str, Any], is_more: bool) -> None:
    assert needs_more_than_text(body) == is_more


async def test_recorded_bodies_are_counted(tmp_path: Path) -> None:
    """By what becomes of each of them, at the server and in a program."""
    question = [{"role": "user", "content": "Weather?"}]
    lines = [
        {"path": "/v1/chat/completions", "body": {"messages": question, "tools": [*TOOLS], "user": "u"}},
        {"path": "/v1/messages", "body": {"messages": question, "max_tokens": 9, "tools": [{"type": "bash_1"}]}},
        {"path": "adapter", "body": {"messages": question, "tools": [*TOOLS], "logit_bias": {"5": 1}}},
        {"path": "adapter", "body": {"messages": question, "extra": {"mirostat": 1}}},
    ]
    outcomes = await send_all(lines, write_tool_model(tmp_path / "model", FORMATS_BY_NAME["hermes"]))
    assert [outcome.speculates for outcome in outcomes] == [True, False, True, False]
    assert "tools[0] is 'bash_1'" in outcomes[1].reason
    assert "mirostat is set" in outcomes[3].reason


def test_each_field_has_one_row() -> None:
    counts = Counter(name for row in TABLE for name in row.names.split())
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("parser", [chat_completions, completions, messages_parser, responses_parser])
def test_what_a_parser_reads_is_in_the_table(parser: Any) -> None:
    assert FIELDS.keys() >= parser._KNOWN_FIELDS
    for name in ("_IGNORED_FIELDS", "_STATEFUL_FIELDS", "_MESSAGES_ONLY_FIELDS", "_UNSUPPORTED_FIELDS"):
        assert set(getattr(parser, name, ())) <= FIELDS.keys()


def test_what_goes_to_servers_is_safe() -> None:
    """Another limit, what costs more, what jumps a queue and what loads things need the operator's word."""
    assert {"max_tokens"} == PASSED_FIELDS & LIMIT_FIELDS  # 0, as this server has read it
    unsafe = {"service_tier", "speed", "priority", "chat_template", "chat_template_kwargs", "mcp_servers", "container"}
    assert not unsafe & PASSED_FIELDS
    assert unsafe <= FIELDS.keys()


@pytest.mark.parametrize("name", sorted(METADATA_FIELDS))
def test_metadata_keeps_nothing_from_speculation(name: str) -> None:
    request = ChatRequest.create("q", extra={name: "x"})
    assert find_multi_call_refusal(request) is None
    assert find_prediction_refusal(request) is None
    assert find_local_field_use(name, "x") == "ignored"


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 1},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"parallel_tool_calls": True},
        {"modalities": ["text"]},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"effort": None, "summary": None}},
        {"verbosity": "medium"},
        {"function_call": "auto", "functions": []},
        {"vendor": None},
    ],
)
def test_defaults_say_nothing(extra: dict[str, Any]) -> None:
    request = ChatRequest.create("q", extra=extra)
    assert find_multi_call_refusal(request) is None
    assert find_prediction_refusal(request) is None
    assert {find_local_field_use(name, value) for name, value in extra.items()} == {"ignored"}


def test_a_text_format_is_the_default_one() -> None:
    assert find_multi_call_refusal(ChatRequest.create("q", response_format={"type": "text"})) is None
    assert find_multi_call_refusal(ChatRequest.create("q", response_format={"type": "json_object"})) is not None


@pytest.mark.parametrize(
    ("name", "value", "use", "message"),
    [
        ("reasoning_effort", "low", "kept", None),
        ("n", 2, "refused", r"n is set; m is a local model and cannot serve it (relayed from the server)"),
        ("n", True, "refused", r"n is set; m is a local model and cannot serve it (relayed from the server)"),
        ("mirostat", 1, "left_out", "mirostat is set; m is a local model and cannot serve it ("),
        ("vendor", 0, "left_out", "vendor is set; m is a local model and cannot serve it"),
        ("temperature", 0.5, "left_out", "extra has temperature, an option of its own; pass temperature outside extra"),
    ],
)
def test_other_values_do(name: str, value: Any, use: str, message: str | None) -> None:
    """At a server they mean plain, and here they are read, left out or refused."""
    assert find_multi_call_refusal(ChatRequest.create("q", extra={name: value})) == f"the request sets {name}"
    assert find_local_field_use(name, value) == use
    refusal = find_local_field_refusal(name, value, "m")
    assert (refusal is None) == (message is None)
    assert (refusal or "").startswith(message or "")


STRICT = {"type": "function", "function": {"name": "read", "strict": True}}


@pytest.mark.parametrize(
    ("fields", "with_ids", "with_parser", "with_reasoning"),
    [
        ({}, True, True, True),
        ({"tools": [TOOLS[0]], "tool_choice": "auto"}, False, True, True),
        ({"tools": [STRICT]}, False, True, True),
        ({"tools": [TOOLS[0]], "tool_choice": "required"}, False, False, True),
        ({"tools": [TOOLS[0]], "stop": ["x"]}, False, False, False),
        ({"response_format": {"type": "json_object"}}, False, False, True),
        ({"tools": [STRICT], "parallel_tool_calls": False}, False, False, False),
    ],
)
def test_what_may_speculate_at_a_server(
    fields: dict[str, Any], with_ids: bool, with_parser: bool, with_reasoning: bool
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], **fields}
    line = {"source": "test", "path": "/v1/chat/completions", "body": body}
    servers: list[dict[str, bool]] = [{}, {"has_parser": True}, {"reasons": True}]
    outcomes = [judge_at_server(line, **server).speculates for server in servers]
    assert outcomes == [with_ids, with_parser, with_reasoning]
