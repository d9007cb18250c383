"""What is said to a model: options and files as ChatOpenAI takes them, what caches know it by, what it opens."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import BaseModel

from llm_spec import Finish, Fixed, InvalidRequestError, SpeculativeConfig, TransientError
from llm_spec.integrations import _shared
from llm_spec.integrations.langchain import SpeculativeChatModel
from llm_spec.testing import RuleBasedProvider, ScriptedProvider
from llm_spec.testing.server import MODEL, ScriptedModelServer


class Inner(BaseModel):
    """A part."""

    size: int = 3


class Place(BaseModel):
    """A place."""

    name: str
    inner: Inner = Inner()
    others: list[Inner] = []


@tool
def find_weather(place: str, unit: str = "C") -> str:
    """Tell the weather somewhere."""
    return f"{place} {unit}"


# ------------------------------------------------------------------------------------------------- caches

PROVIDER, DRAFT = ScriptedProvider("a"), RuleBasedProvider()
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "an address": {"target": "generic:m@http://127.0.0.1:1/v1"},
    "another address": {"target": "generic:m@http://127.0.0.1:2/v1"},
    "extra": {"target": "generic:m@http://127.0.0.1:1/v1", "extra": {"think": "low"}},
    "other extra": {"target": "generic:m@http://127.0.0.1:1/v1", "extra": {"think": "high"}},
    "nested extra": {"target": "generic:m@http://127.0.0.1:1/v1", "extra": {"think": {"low": 1}}},
    "a draft": {"target": "generic:m@http://127.0.0.1:1/v1", "draft": "lookup"},
    "another draft": {"target": "generic:m@http://127.0.0.1:1/v1", "draft": DRAFT},
    "a config": {"target": "generic:m@http://127.0.0.1:1/v1", "config": SpeculativeConfig(strategy="plain")},
    "another config": {
        "target": "generic:m@http://127.0.0.1:1/v1",
        "config": SpeculativeConfig(acceptance="lossy_typical"),
    },
    "a lookahead": {"target": "generic:m@http://127.0.0.1:1/v1", "config": SpeculativeConfig(lookahead=Fixed(3))},
    "an option": {"target": "generic:m@http://127.0.0.1:1/v1", "temperature": 0.5},
    "a provider": {"target": PROVIDER},
    "another of the same name": {"target": ScriptedProvider("b")},
}


def build_copy(value: Any) -> Any:
    """A configuration that says the same with values of its own, where it is not about which object it is."""
    if isinstance(value, dict):
        return {name: build_copy(part) for name, part in reversed(list(value.items()))}
    if isinstance(value, SpeculativeConfig):
        return SpeculativeConfig(strategy=value.strategy, acceptance=value.acceptance, lookahead=value.lookahead)
    return "".join(list(value)) if isinstance(value, str) else value


def test_caches_tell_configurations_apart() -> None:
    keys = {name: SpeculativeChatModel(**fields)._get_llm_string() for name, fields in CONFIGURATIONS.items()}
    assert len(set(keys.values())) == len(CONFIGURATIONS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_same_configuration_shares_its_answers(name: str) -> None:
    first, second = (SpeculativeChatModel(**build(CONFIGURATIONS[name])) for build in (dict, build_copy))
    assert first._get_llm_string(stop=["x"]) == second._get_llm_string(stop=["x"])
    assert first._get_llm_string(stop=["x"]) != first._get_llm_string(stop=["y"])
    assert first._get_llm_string() != first._get_llm_string(reasoning_effort="low")


def test_a_provider_that_has_gone_leaves_its_answers_to_no_other() -> None:
    """Though an object made later may be at its place in memory."""
    keys = [SpeculativeChatModel(target=ScriptedProvider("a"))._get_llm_string() for _ in range(50)]
    assert len(set(keys)) == 50


def test_secrets_of_a_call_are_not_in_its_key() -> None:
    model = SpeculativeChatModel(target="rules:any", extra={"token": "hunter2"})
    told = [model._get_llm_string(extra_body={"token": "hunter2"}), str(model._identifying_params)]
    assert [text for text in told if "hunter2" in text] == []


@pytest.fixture
def _cache() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


@pytest.mark.usefixtures("_cache")
def test_a_cached_answer_is_its_models_own() -> None:
    first, second = ScriptedProvider("a"), ScriptedProvider("b")
    answers = [SpeculativeChatModel(target=target).invoke("Hi").text for target in (first, second, first, second)]
    assert answers == ["a", "b", "a", "b"]
    assert (len(first.requests), len(second.requests)) == (1, 1)


# ------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("way", ["invoke", "stream", "bind"])
@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"max_completion_tokens": 5}, "max_tokens", 5),
        ({"max_output_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", 5),
        ({"extra_body": {"think": "low"}}, "extra", {"p": 1, "think": "low"}),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens", 5),
        ({"extra_body": {"think": "a"}, "extra": {"think": "b"}}, "extra", {"think": "a"}),
        ({"reasoning_effort": "low"}, "extra", {"p": 1, "reasoning_effort": "low"}),
        ({"stream_usage": True}, "extra", {"p": 1}),
        ({"stop": ["y"]}, "stop", ("y",)),
        ({"stop": "yz"}, "stop", ("yz",)),
        ({"logit_bias": {"5": -100}}, "sampling.logit_bias", {5: -100}),
        ({"prediction": {"type": "content", "content": "So"}}, "prediction", "So"),
        ({"response_format": {"type": "json_object"}}, "response_format", {"type": "json_object"}),
        ({"timeout": 30.0}, "extra", {"p": 1}),
    ],
)
def test_options_that_are_a_habit(options: dict[str, Any], name: str, value: Any, way: str) -> None:
    provider = ScriptedProvider("So.")
    model = SpeculativeChatModel(target=provider, max_tokens=9, extra={"p": 1})
    match way:
        case "invoke":
            model.invoke("Hi", **options)
        case "stream":
            list(model.stream("Hi", **options))
        case _:
            model.bind(**options).invoke("Hi")
    found: Any = provider.requests[0]
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("name", ["n_predict", "extra_headers", "model", "temprature", "strict"])
def test_options_that_are_not_taken_are_named(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        SpeculativeChatModel(target=ScriptedProvider("So.")).invoke("Hi", **{name: 1})


@pytest.mark.parametrize("stop", ["yz", ["yz"]])
def test_a_model_has_one_stop_string_or_several(stop: Any) -> None:
    provider = ScriptedProvider("So.")
    model = SpeculativeChatModel(target=provider, stop=stop)
    model.invoke("Hi")
    assert provider.requests[0].stop == ("yz",)
    assert model._get_ls_params()["ls_stop"] == ["yz"]


@pytest.mark.parametrize("way", ["call", "bind", "model"])
@pytest.mark.parametrize("timeout", [(1, 5), "soon", 0, -1.0, [5], {"read": 5}, float("nan")])
def test_a_timeout_that_is_none_is_named(timeout: Any, way: str) -> None:
    with pytest.raises(ValueError, match="timeout"):  # noqa: PT012 - a model, too, refuses its own
        fields = {"timeout": timeout} if way == "model" else {}
        model = SpeculativeChatModel(target=ScriptedProvider("So."), **fields)
        if way == "call":
            model.invoke("Hi", timeout=timeout)
        else:
            model.bind(timeout=timeout).invoke("Hi")


def test_two_limits_that_differ_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens is 5 and max_completion_tokens is 6"):
        SpeculativeChatModel(target=ScriptedProvider("So.")).invoke("Hi", max_tokens=5, max_completion_tokens=6)


def test_tools_and_classes_are_converted_wherever_they_are_given() -> None:
    provider = ScriptedProvider("So.")
    model = SpeculativeChatModel(target=provider)
    model.invoke("Hi", tools=[find_weather], tool_choice="any", response_format=Place)
    (request,) = provider.requests
    assert [described["function"]["name"] for described in request.tools] == ["find_weather"]
    assert (request.tool_choice, request.response_format["type"]) == ("required", "json_schema")  # type: ignore[index]


@pytest.mark.parametrize("max_retries", [0, 2])
async def test_nothing_is_retried_twice_over(max_retries: int) -> None:
    provider = ScriptedProvider("So.", fail_at={0: TransientError("gone", retry_after_s=0.0)})
    model = SpeculativeChatModel(target=provider, max_retries=max_retries)
    for ask in (model.ainvoke, lambda text: asyncio.to_thread(model.invoke, text)):
        provider.requests.clear()
        with pytest.raises(TransientError, match="gone"):
            await ask("Hi")
        assert len(provider.requests) == 1 + max_retries


# -------------------------------------------------------------------------------------- structure and strictness


def list_faults(schema: Any) -> list[str]:
    """What OpenAI refuses in a strict schema."""
    if isinstance(schema, list):
        return [fault for part in schema for fault in list_faults(part)]
    if not isinstance(schema, dict):
        return []
    faults = [fault for part in schema.values() for fault in list_faults(part)]
    if schema.get("type") == "object":
        faults += ["additionalProperties"] * (schema.get("additionalProperties") is not False)
        faults += ["required"] * (set(schema.get("required", ())) != set(schema.get("properties", ())))
    return faults


@pytest.mark.parametrize("schema", [Place, Place.model_json_schema()], ids=["class", "dict"])
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "tools"])
def test_a_strict_schema_is_strict(method: Any, schema: Any) -> None:
    provider = ScriptedProvider("{}")
    model = SpeculativeChatModel(target=provider)
    if method == "tools":
        model.bind_tools([schema, find_weather], strict=True).invoke("Hi")
    else:
        model.with_structured_output(schema, method=method, strict=True, include_raw=True).invoke("Hi")
    (request,) = provider.requests
    sent = [described["function"] for described in request.tools]
    if request.response_format is not None:
        sent.append(request.response_format["json_schema"])
    assert [described["strict"] for described in sent] == [True] * len(sent)
    assert [list_faults(described) for described in sent] == [[]] * len(sent)


OPEN = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CLOSED = OPEN | {"additionalProperties": False}
FORMS: dict[str, dict[str, Any]] = {
    "a response format": {"type": "json_schema", "json_schema": {"name": "place", "description": "d", "schema": OPEN}},
    "what it names": {"name": "place", "description": "d", "schema": OPEN},
    "a function": {"name": "place", "description": "d", "parameters": OPEN},
    "a tool": {"type": "function", "function": {"name": "place", "description": "d", "parameters": OPEN}},
}


def build_form(kind: str, strict: bool | None) -> dict[str, Any]:
    form = FORMS[kind]
    if strict is None:
        return form
    inner = next((name for name in ("json_schema", "function") if name in form), None)
    return form | ({"strict": strict} if inner is None else {inner: form[inner] | {"strict": strict}})


@pytest.mark.parametrize(
    ("own", "beside", "strict"),
    [
        (None, None, None),
        (None, True, True),
        (None, False, False),
        (True, None, True),
        (True, True, True),
        (True, False, True),
        (False, None, False),
        (False, True, False),
    ],
)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_schemas_in_openais_forms(method: Any, kind: str, own: Any, beside: Any, strict: Any) -> None:
    """Name, description, schema and strictness are sent; one that tells its own strictness is left as it is."""
    provider = ScriptedProvider('{"name": "Rome"}')
    chain = SpeculativeChatModel(target=provider).with_structured_output(
        build_form(kind, own), method=method, strict=beside, include_raw=True
    )
    found: Any = chain.invoke("Hi")
    (request,) = provider.requests
    if method == "json_schema":
        assert found["parsed"] == {"name": "Rome"}
        sent: Any = dict((request.response_format or {})["json_schema"])
        sent["parameters"] = sent.pop("schema")
    else:
        (described,) = request.tools
        sent = described["function"]
    wanted = {"name": "place", "description": "d", "parameters": CLOSED if beside and own is None else OPEN}
    assert sent == (wanted if strict is None else wanted | {"strict": strict})


@pytest.mark.parametrize("given", [None, False, True])
@pytest.mark.parametrize("schema", [Place, Place.model_json_schema(), FORMS["what it names"]])
def test_function_calling_wants_one_call(schema: Any, given: bool | None) -> None:
    provider = ScriptedProvider("So.")
    options = {} if given is None else {"parallel_tool_calls": given}
    model = SpeculativeChatModel(target=provider)
    model.with_structured_output(schema, method="function_calling", include_raw=True, **options).invoke("Hi")
    assert provider.requests[0].extra.get("parallel_tool_calls") is (given or False)


@pytest.mark.parametrize("form", [{"name": "place"}, {"type": "json_schema", "json_schema": {"name": "place"}}])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("strict", [None, True])
def test_a_form_without_a_schema_is_refused(strict: Any, method: Any, form: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'place' has no JSON schema"):
        SpeculativeChatModel(target="rules:any").with_structured_output(form, method=method, strict=strict)
    SpeculativeChatModel(target="rules:any").with_structured_output(form, method="json_mode", strict=strict)


def test_a_schema_without_properties_is_sent_whole() -> None:
    schema = {"title": "place", "anyOf": [OPEN, {"type": "null"}]}
    provider = ScriptedProvider("null")
    SpeculativeChatModel(target=provider).with_structured_output(schema, method="json_schema").invoke("Hi")
    assert provider.requests[0].response_format == {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": schema},
    }


def test_a_forms_strictness_is_its_own_alone() -> None:
    provider = ScriptedProvider("{}")
    form = build_form("a function", strict=True)
    chain = SpeculativeChatModel(target=provider).with_structured_output(form, tools=[find_weather], include_raw=True)
    chain.invoke("Hi")
    assert [described["function"].get("strict") for described in provider.requests[0].tools] == [True, None]


def test_a_class_as_response_format_has_its_description() -> None:
    provider = ScriptedProvider("{}")
    SpeculativeChatModel(target=provider).invoke("Hi", response_format=Place)
    sent: Any = provider.requests[0].response_format
    assert (sent["json_schema"]["name"], sent["json_schema"]["description"]) == ("Place", "A place.")


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output_beside_tools(method: Any) -> None:
    provider = ScriptedProvider("{}")
    chain = SpeculativeChatModel(target=provider).with_structured_output(
        Place, method=method, tools=[find_weather], include_raw=True
    )
    chain.invoke("Hi")
    names = [described["function"]["name"] for described in provider.requests[0].tools]
    assert names == (["Place", "find_weather"] if method == "function_calling" else ["find_weather"])


# -------------------------------------------------------------------------------------------------- content

MARK: Any = {"cache_control": {"type": "ephemeral"}}
TEXT, PDF = (base64.b64encode(data).decode() for data in (b"name: \xc3\xa4", b"%PDF-1.4"))
IMAGE = {"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}
PDF_PART = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}", "filename": "a.pdf"}}
FILE_ID = {"type": "file", "file": {"file_id": "file-1"}}


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ({"type": "text", "text": "a"} | MARK, {"type": "text", "text": "a"} | MARK),
        ({"type": "text", "text": "a", "extras": MARK}, {"type": "text", "text": "a"} | MARK),
        (IMAGE | MARK, IMAGE | MARK),
        ({"type": "image", "url": "https://127.0.0.1/a.png"}, IMAGE),
        ({"type": "file", "base64": PDF, "mime_type": "application/pdf", "filename": "a.pdf"}, PDF_PART),
        (PDF_PART, PDF_PART),
        ({"type": "file", "file_id": "file-1"}, FILE_ID),
        ({"type": "file", "file_id": "file-1"} | MARK, FILE_ID | MARK),
        ({"type": "file", "source_type": "id", "id": "file-1"}, FILE_ID),
        (FILE_ID, FILE_ID),
        ({"type": "file", "base64": TEXT, "mime_type": "text/plain"}, {"type": "text", "text": "name: ä"}),
        (
            {"type": "file", "base64": TEXT, "mime_type": "text/yaml", "filename": "a.yaml"} | MARK,
            {"type": "text", "text": "a.yaml:\nname: ä"} | MARK,
        ),
        (
            {"type": "file", "source_type": "base64", "data": TEXT, "mime_type": "application/json"},
            {"type": "text", "text": "name: ä"},
        ),
        (
            {"type": "file", "url": f"data:text/csv;base64,{TEXT}", "mime_type": "text/csv"},
            {"type": "text", "text": "name: ä"},
        ),
        ({"type": "text-plain", "text": "a", "mime_type": "text/plain"}, {"type": "text", "text": "a"}),
        ({"type": "text-plain", "base64": TEXT, "mime_type": "text/plain"}, {"type": "text", "text": "name: ä"}),
    ],
)
def test_blocks_of_content(block: Any, part: Any) -> None:
    provider = ScriptedProvider("So.")
    SpeculativeChatModel(target=provider).invoke([HumanMessage([block, {"type": "text", "text": "b"}, IMAGE])])
    content = provider.requests[0].messages[0].content
    assert content == (part, {"type": "text", "text": "b"}, IMAGE)


@pytest.mark.parametrize(
    "message",
    [
        SystemMessage([{"type": "text", "text": "a"} | MARK]),
        HumanMessage(["x", {"type": "text", "text": "a"} | MARK]),
        AIMessage([{"type": "text", "text": "a"} | MARK]),
        ToolMessage([{"type": "text", "text": "a"} | MARK], tool_call_id="c"),
    ],
)
def test_marks_of_a_prompt_cache_are_kept(message: BaseMessage) -> None:
    provider = ScriptedProvider("So.")
    SpeculativeChatModel(target=provider).invoke([message])
    content: Any = provider.requests[0].messages[0].content
    assert content[-1] == {"type": "text", "text": "a"} | MARK


TEXT_BLOCKS: dict[str, list[Any]] = {
    "texts": ["x", "y"],
    "blocks": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
    "both": ["x", {"type": "text", "text": "y"}],
    "a block": [{"type": "text", "text": "xy"}],
    "a mark": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"} | MARK],
    "newlines of its own": ["x\n", "\ny"],
    "nothing": [],
    "an image": ["x", IMAGE, "y"],
}


@pytest.mark.parametrize("kind", TEXT_BLOCKS)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "result"])
def test_nothing_is_put_between_blocks_of_text(role: str, kind: str) -> None:
    """A text is what LangChain's own `text` is of it, with marks of a cache and without."""
    blocks = TEXT_BLOCKS[kind]
    messages: dict[str, BaseMessage] = {
        "system": SystemMessage(blocks),
        "user": HumanMessage(blocks),
        "assistant": AIMessage(blocks),
        "tool": ToolMessage(blocks, tool_call_id="c"),
        "result": HumanMessage([{"type": "tool_result", "tool_use_id": "c", "content": blocks}]),
    }
    provider = ScriptedProvider("So.")
    SpeculativeChatModel(target=provider).invoke([messages[role]])
    (sent,) = provider.requests[0].messages
    assert sent.text == HumanMessage(blocks).text
    is_in_parts = kind == "an image" or (kind == "a mark" and role != "result")
    assert isinstance(sent.content, tuple) == is_in_parts


def test_a_file_that_is_not_its_type_is_told() -> None:
    block: Any = {"type": "file", "base64": base64.b64encode(b"\xff\xfe").decode(), "mime_type": "text/plain"}
    with pytest.raises(InvalidRequestError, match="text/plain is not UTF-8"):
        SpeculativeChatModel(target="rules:any").invoke([HumanMessage([block])])
    linked: Any = {"type": "file", "url": "https://127.0.0.1/a.pdf"}
    with pytest.raises(InvalidRequestError, match=r"messages\[1\] cannot be sent"):
        SpeculativeChatModel(target="rules:any").invoke(["Hi", HumanMessage([linked])])


# ------------------------------------------------------------------------------------------ opening, names, counts


@pytest.mark.parametrize("field", ["temperature", "max_retries", "timeout", "target"])
async def test_copies_for_other_fields_open_nothing_again(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class CountedDecoder(_shared.SpeculativeDecoder):
        def __init__(self, **given: Any) -> None:
            opened.append(given)
            super().__init__(**given)

    monkeypatch.setattr(_shared, "SpeculativeDecoder", CountedDecoder)
    async with ScriptedModelServer("So.") as server:
        spec = f"generic:{MODEL}@{server.url}"
        async with SpeculativeChatModel(target=spec) as model:
            chain = model.configurable_fields(**{field: ConfigurableField(id="f")})
            values = [spec, f"{spec}/"] if field == "target" else [1, 2]
            for value in values * 4:
                await chain.with_config(configurable={"f": value}).ainvoke("Hi")
    assert len(opened) == (2 if field == "target" else 1)


def test_names_are_those_of_price_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    model = SpeculativeChatModel(target="openai:gpt-4.1@http://127.0.0.1:9/v1", draft="lookup")
    params = model._get_ls_params()
    assert (params.get("ls_provider"), params.get("ls_model_name")) == ("openai", "gpt-4.1")
    provider = ScriptedProvider([Finish("stop")])
    provider.name = "openai:gpt-4.1"
    metadata = SpeculativeChatModel(target=provider).invoke("Hi").response_metadata
    assert (metadata["model_provider"], metadata["model_name"]) == ("openai", "gpt-4.1")


@pytest.mark.parametrize("target", ["rules:any", "builtin:target"])
def test_tokens_are_counted_without_a_download(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly where the model is here; `custom_get_token_ids` comes first."""
    monkeypatch.setattr("langchain_core.language_models.base.get_tokenizer", None)
    text = "def test_spawnl(self):\n" * 10
    with SpeculativeChatModel(target=target) as model:
        counted = model.get_num_tokens(text)
        if target == "builtin:target":
            assert counted == len(model.get_token_ids(text))
        else:
            assert counted == pytest.approx(len(text) / 4, abs=5)
            with pytest.raises(InvalidRequestError, match="set custom_get_token_ids"):
                model.get_token_ids(text)
        messages: list[BaseMessage] = [HumanMessage(text), AIMessage("So.")]
        plain = model.get_num_tokens_from_messages(messages)
        assert counted < plain < model.get_num_tokens_from_messages(messages, tools=[find_weather])
    counting = SpeculativeChatModel(target=target, custom_get_token_ids=lambda text: [1] * len(text.split()))
    assert counting.get_num_tokens("a b c") == 3
    counting.close()


def test_definitions_are_json() -> None:
    """What LangChain's tracers write down."""
    model = SpeculativeChatModel(target="rules:any", temperature=0.5)
    assert json.loads(json.dumps(dict(model._identifying_params)))["temperature"] == 0.5
