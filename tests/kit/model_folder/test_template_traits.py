"""Conversations that not every chat template takes: each text is said once, in its place, by every kind of template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.conversations import AGENTS, SPECIAL_TOKENS, TOOLS, check_agents_turns, make_conversation

from llm_spec import ChatMessage, ChatRequest, InvalidRequestError, ToolCall
from llm_spec.kit.model_folder.chat_template import ChatTemplate

END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = (
    '{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}"}</tool_call>'
    "{% endfor %}{% endif %}"
)
ANSWER = "<|assistant|>{{ m.content }}" + CALLS
LOOP = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
TEMPLATES = {
    "takes all": LOOP + "<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endfor %}" + END,
    "refuses later ones": LOOP
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endfor %}" + END,
    "drops later ones": LOOP
    + "{% if m.role == 'system' and loop.first %}<|system|>{{ m.content }}{% elif m.role in ['user', 'tool'] %}"
    "<|{{ m.role }}|>{{ m.content }}{% elif m.role == 'assistant' %}" + ANSWER + "{% endif %}{% endfor %}" + END,
    "moves later ones to the front": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}" + LOOP + "{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endif %}"
    "{% endfor %}" + END,
    "takes them for answers": LOOP
    + "{% if m.role in ['user', 'tool'] %}<|{{ m.role }}|>{{ m.content }}{% else %}"
    + ANSWER
    + "{% endif %}{% endfor %}"
    + END,
    "alternates": LOOP + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}{{ raise_exception('alternate') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endfor %}" + END,
    "drops neighbours": LOOP
    + "{% if m.role == 'user' and loop.nextitem and loop.nextitem.role == 'user' %}{% elif m.role != 'system' or "
    "loop.first %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endif %}{% endfor %}" + END,
    "counts turns": "{% set ns = namespace(n=0) %}"
    + LOOP
    + "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endfor %}" + END,
    "knows no system": LOOP + "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endfor %}" + END,
    "drops every one": LOOP
    + "{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}"
    + CALLS
    + "{% endif %}{% endfor %}"
    + END,
    "knows developers": LOOP + "{% if m.role in ['developer', 'system'] and loop.first %}<|developer|>{{ m.content }}"
    "{% elif m.role in ['user', 'tool'] %}<|{{ m.role }}|>{{ m.content }}{% elif m.role == 'assistant' %}"
    + ANSWER
    + "{% endif %}{% endfor %}"
    + END,
    "before the last one of the user": "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    + LOOP
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% if m.role != 'system' %}"
    "<|{{ m.role }}|>{% if loop.last %}{{ s }}{% endif %}{{ m.content }}" + CALLS + "{% endif %}{% endfor %}" + END,
    "asks nothing about tools": LOOP.replace("{% if tools %}", "").replace("{% endfor %}{% endif %}", "{% endfor %}", 1)
    + "<|{{ m.role }}|>{{ m.content }}"
    + CALLS
    + "{% endfor %}"
    + END,
}
TAKES_LATER = {"takes all", "asks nothing about tools"}


def compile_template(source: str) -> ChatTemplate:
    return ChatTemplate(Path("model"), source, source)


def render(source: str, roles: str, **options: Any) -> str:
    return compile_template(source).render(ChatRequest(messages=make_conversation(roles), **options), SPECIAL_TOKENS)


@pytest.mark.parametrize("uses_tools", [False, True], ids=["text", "tools"])
@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_agents_turns(name: str, agent: str, uses_tools: bool) -> None:
    """Every text once and in order, and no turn changes what was before it."""
    check_agents_turns(compile_template(TEMPLATES[name]), agent, uses_tools=uses_tools)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_later_text_has_the_templates_own_turn_or_is_marked(name: str) -> None:
    """A template that takes it for an answer, or moves it, does not take it."""
    prompt = render(TEMPLATES[name], "system user assistant system user")
    shown = "<|system|>mark003x" if name in TAKES_LATER else "<system>\nmark003x\n</system>"
    assert shown in prompt
    assert "<|assistant|>mark003x" not in prompt


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("roles", ["user", "user assistant user", "system user", "system user assistant user"])
def test_a_plain_conversation_is_rendered_as_it_is(name: str, roles: str) -> None:
    """What the template takes is not changed: the prompt is the bare template's."""
    if "system" in roles and name in ("knows no system", "drops every one", "takes them for answers"):
        assert "<|user|><system>\nmark000x\n</system>" in render(TEMPLATES[name], roles)
        return
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": message.role, "content": message.text} for message in make_conversation(roles)]
    tools: Any = {} if name == "asks nothing about tools" else {"tools": None}
    bare = environment.from_string(TEMPLATES[name]).render(messages=messages, add_generation_prompt=True, **tools)
    assert render(TEMPLATES[name], roles) == bare


def test_without_a_text_of_the_system_nothing_is_said_for_it() -> None:
    """An empty one is left out where there is no place for it."""
    empty = (ChatMessage("system", ""), ChatMessage("user", "u"))
    template = compile_template(TEMPLATES["knows no system"])
    assert template.render(ChatRequest(messages=empty), SPECIAL_TOKENS) == "<|user|>u<|assistant|>"


def test_what_it_refuses_all_the_same_is_its_own_error() -> None:
    """With its words."""
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render(TEMPLATES["counts turns"], "user assistant assistant user")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_back_by_each_of_its_names(field: str) -> None:
    """Templates read it as one of them."""
    source = LOOP + f"<|{{{{ m.role }}}}|>[{{{{ m.{field} }}}}]{{{{ m.content }}}}{{% endfor %}}"
    answer = ChatMessage("assistant", "a", reasoning="because")
    request = ChatRequest(messages=(ChatMessage("user", "u"), answer, ChatMessage("user", "v")))
    assert compile_template(source).render(request, {}) == "<|user|>[]u<|assistant|>[because]a<|user|>[]v"


def test_text_and_reasoning_beside_calls_are_one_where_the_template_takes_one() -> None:
    """As gpt-oss's, which refuses both; neither is lost."""
    source = (
        LOOP + "{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception('not both') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.thinking }}{{ m.content }}" + CALLS + "{% endfor %}"
    )
    call = ToolCall("c", "f", "{}")
    answer = ChatMessage("assistant", "text", tool_calls=(call,), reasoning="because")
    messages = (ChatMessage("user", "u"), answer, ChatMessage("tool", "r", tool_call_id="c"))
    prompt = compile_template(source).render(ChatRequest(messages=messages, tools=TOOLS), {})
    assert "<|assistant|>because\n\ntext<tool_call>" in prompt


@pytest.mark.parametrize(
    "condition", ["tools is not none", "tools != none", "not tools is none", "documents is not none"]
)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no tools", "none of them"])
def test_a_template_that_asks_for_none_is_told_none(condition: str, options: Any) -> None:
    """As by transformers."""
    source = TEMPLATES["takes all"].replace("{% for m", f"{{% if {condition} %}}TOOLS{{% endif %}}{{% for m", 1)
    assert render(source, "user", **options) == "<|user|>mark000x<|assistant|>"


def test_calls_of_custom_tools_are_shown_with_their_input() -> None:
    """Templates know functions alone."""
    source = LOOP + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    calls = (ToolCall("c", "patch", "*** Begin", "custom"),)
    messages = (ChatMessage("user", "u"), ChatMessage("assistant", None, tool_calls=calls))
    prompt = compile_template(source).render(ChatRequest(messages=messages), {})
    assert prompt == 'u{"name": "patch", "arguments": {"input": "*** Begin"}}'
