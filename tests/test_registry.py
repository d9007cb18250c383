"""Provider strings to objects: parsing, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest

from llm_spec import (
    ConfigError,
    LlmProvider,
    MissingExtraError,
    PromptLookup,
    ProviderDraft,
    ProviderEntry,
    SuffixDraft,
    UnknownProviderError,
    open_draft,
    open_provider,
    registered_providers,
)
from llm_spec.registry import NamedProvider, ProviderSpec
from llm_spec.testing import RandomDraft, ScriptedProvider


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("opnai:gpt-4.1", "did you mean 'openai'?"),
        ("OpenAI:gpt-4.1", "did you mean 'openai'?"),
        ("llama-cpp:x@http://h:1/v1", "did you mean 'llamacpp'?"),
        ("openai/gpt-4.1", "did you mean 'openai:gpt-4.1'?"),
        ("vllm:big@gpubox:9000/v1", "has no scheme; write @http://gpubox:9000/v1 or"),
        ("vllm:big@10.0.0.7:9000", "has no scheme; write @http://10.0.0.7:9000 or"),
    ],
)
def test_an_unknown_provider_is_named_with_what_was_meant(text: str, said: str) -> None:
    """Rather than taken for a model's name, with which another server would get the prompt."""
    for open_named in (open_provider, open_draft):
        with pytest.raises(ConfigError, match=re.escape(said)):
            open_named(text)


def test_a_models_name_may_have_an_at_sign() -> None:
    """Only an address with a port is taken for one."""
    assert ProviderSpec.parse("generic:@cf/meta/llama-3@http://h/v1").model == "@cf/meta/llama-3"
    assert ProviderSpec.parse("torch:org/name@refs/pr/1").model == "org/name@refs/pr/1"


@pytest.mark.parametrize(
    ("text", "provider", "model", "base_url"),
    [
        ("lookup", "lookup", "", None),
        ("lookup:", "lookup", "", None),
        ("builtin:target", "builtin", "target", None),
        ("onnx:/models/a b", "onnx", "/models/a b", None),
        ("onnx:C:\\models\\tiny", "onnx", "C:\\models\\tiny", None),
        ("onnx:/models/v1:0/q8", "onnx", "/models/v1:0/q8", None),
        ("http:qwen@http://localhost:8000/v1", "http", "qwen", "http://localhost:8000/v1"),
        ("http:org/qwen:7b@https://host/v1", "http", "org/qwen:7b", "https://host/v1"),
        ("http:@https://host/v1", "http", "", "https://host/v1"),
        ("http:model@1.5@https://host/v1", "http", "model@1.5", "https://host/v1"),
        ("http:me@example.org", "http", "me@example.org", None),
        ("http:m@https://user@host/v1", "http", "m", "https://user@host/v1"),
    ],
)
def test_provider_strings(text: str, provider: str, model: str, base_url: str | None) -> None:
    """`provider:model[@http…]` comes apart at the first colon and before the address alone."""
    assert ProviderSpec.parse(text) == ProviderSpec(provider, model, base_url)


@pytest.mark.parametrize("text", ["", ":", ":model", "two words", "http://host/v1", "a/b:c", "lookup@http://host"])
def test_a_string_in_no_such_form_is_refused(text: str) -> None:
    """The error repeats the string and shows the form."""
    with pytest.raises(ConfigError) as caught:
        open_provider(text)
    assert_one_line(caught.value, repr(text))


def test_an_unknown_provider_is_named_beside_the_known_ones() -> None:
    """The error names what was asked for and lists what is installed."""
    with pytest.raises(UnknownProviderError) as caught:
        open_provider("nosuch:model")
    assert_one_line(caught.value, "'nosuch'", *registered_providers())
    with pytest.raises(UnknownProviderError):
        open_draft("nosuch:model")


def test_a_missing_extra_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without onnxruntime, the error holds the command that brings it."""
    find_spec = importlib.util.find_spec

    def without_onnxruntime(name: str, package: str | None = None) -> object:
        return None if name.split(".", maxsplit=1)[0] == "onnxruntime" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_onnxruntime)
    for text in ("builtin:target", "builtin:draft", "onnx:/models/tiny"):
        with pytest.raises(MissingExtraError) as caught:
            open_draft(text)
        assert_one_line(caught.value, "onnxruntime", "pip install 'llm-spec[onnx]'")
    assert registered_providers()["onnx"].missing_modules == ("onnxruntime",)


def test_a_draft_used_as_target_is_refused() -> None:
    """What can only guess cannot answer; the error says where it belongs."""
    with pytest.raises(ConfigError, match="draft") as caught:
        open_provider("lookup")
    assert_one_line(caught.value, "'lookup'")


def test_a_bare_draft_opens_as_it_is() -> None:
    """Prompt lookup and the random draft are drafts without a model."""
    assert isinstance(open_draft("lookup"), PromptLookup)
    assert isinstance(open_draft("suffix"), SuffixDraft)
    draft = open_draft("random:7")
    assert isinstance(draft, RandomDraft)
    assert draft.name == "random:7"


@pytest.mark.parametrize(
    "text",
    [
        "lookup:model",
        "lookup:@http://host",
        "suffix:model",
        "suffix:@http://host",
        "random:x",
        "random:-1",
        "random:@http://host",
    ],
)
def test_what_a_draft_cannot_take_is_refused(text: str) -> None:
    """A model or address given to a draft that has none is an error, not ignored."""
    with pytest.raises(ConfigError) as caught:
        open_draft(text)
    assert_one_line(caught.value)


def test_installed_providers_are_listed_in_order() -> None:
    """What is installed can be listed, with a summary each, without opening anything."""
    entries = registered_providers()
    assert list(entries) == sorted(entries)
    assert {"builtin", "lookup", "onnx", "random"} <= set(entries)
    assert all(entry.summary for entry in entries.values())


# ------------------------------------------------------------------------------- third-party packages


def install(monkeypatch: pytest.MonkeyPatch, **entries: object) -> None:
    """Let the entry points be these, as if a package had registered them."""
    module = ModuleType("some_package")
    for name, entry in entries.items():
        setattr(module, name, entry)
    monkeypatch.setitem(sys.modules, "some_package", module)
    points = EntryPoints(EntryPoint(name, f"some_package:{name}", "llm_spec.providers") for name in entries)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points.select(group=group))


def test_a_package_registers_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point is all it takes; model and address come to it as written."""
    asked: list[tuple[str, str | None]] = []

    def load(model: str, base_url: str | None) -> LlmProvider:
        asked.append((model, base_url))
        return ScriptedProvider("answer", name=f"mine:{model}")

    install(monkeypatch, mine=ProviderEntry(load=load, summary="a test"))
    assert open_provider("mine:a:b@http://host").name == "mine:a:b"
    draft = open_draft("mine")
    assert isinstance(draft, ProviderDraft)
    assert draft.name == "mine:"
    assert asked == [("a:b", "http://host"), ("", None)]


def test_an_entry_point_that_is_no_provider_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken package is named."""
    install(monkeypatch, broken=object())
    with pytest.raises(ConfigError, match="broken") as caught:
        open_provider("broken:model")
    assert_one_line(caught.value, "some_package")


def test_one_broken_package_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider opens although another package's entry is broken."""
    install(
        monkeypatch,
        broken=object(),
        fine=ProviderEntry(
            load=lambda model, base_url: ScriptedProvider("answer", name=f"{model}{base_url}"), summary=""
        ),
    )
    assert open_provider("fine:model").name == "modelNone"


def assert_one_line(error: Exception, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"


def test_a_provider_under_a_name_of_ones_own() -> None:
    """Its type, address and key are those of the name; an address in the string comes first, joined drafts take it."""
    named = {"big": NamedProvider(type="vllm", base_url="http://127.0.0.1:1/v1", api_key="sk-secret")}
    provider = open_provider("big:tiny", named)
    assert provider.name == "vllm:tiny"
    assert "sk-secret" not in repr(named) + repr(provider)
    assert open_draft("lookup+big:tiny", named).name == "lookup+vllm:tiny"


def test_a_key_for_what_takes_none_is_refused() -> None:
    """A key that would be left unused is a mistake."""
    with pytest.raises(ConfigError, match="takes no key"):
        open_draft("mine", {"mine": NamedProvider(type="lookup", api_key="sk-secret")})
    with pytest.raises(UnknownProviderError, match="'nothing'"):
        open_provider("mine:a", {"mine": NamedProvider(type="nothing")})
