"""Provider strings to objects: parsing, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType

import pytest

from llm_spec import ConfigError, LlmProvider, PromptLookup, ProviderDraft, SuffixDraft, open_draft, open_provider
from llm_spec.contract.entry import ProviderEntry
from llm_spec.contract.errors import MissingExtraError, ModelLoadError, UnknownProviderError
from llm_spec.decoder.entry_points import NamedProvider, ProviderSpec, registered_providers
from llm_spec.kit.server_addresses import parse_server_address
from llm_spec.server.config import ModelConfig
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
        ("vllm:big@ http://10.0.0.7:9000", "has no scheme; write @http://10.0.0.7:9000 or"),
        ("vllm:big@http:/10.0.0.7:9000", "has no scheme; write @http://10.0.0.7:9000 or"),
        ("openai:claude@20240620", "a name with an @ needs the address behind it, openai:NAME@http://host/v1"),
    ],
)
def test_an_unknown_provider_is_named_with_what_was_meant(text: str, said: str) -> None:
    """Rather than taken for a model's name, with which another server would get the prompt."""
    for open_named in (open_provider, open_draft):
        with pytest.raises(ConfigError, match=re.escape(said)):
            open_named(text)


SERVERS = sorted(name for name, entry in registered_providers().items() if not entry.names_files)
FILES = sorted(name for name, entry in registered_providers().items() if entry.names_files)
NO_ADDRESSES = (
    "127.0.0.1:8000/v1",
    "localhost:8000/v1",
    "localhost/v1",
    "host.example/v1",
    "[::1]:8000/v1",
    " http://127.0.0.1:8000/v1",
    "\nhttp://127.0.0.1:8000/v1",
    "http:/127.0.0.1:8000/v1",
    "http:127.0.0.1:8000/v1",
    "http//127.0.0.1:8000/v1",
    "htp://127.0.0.1:8000/v1",
    "ftp://127.0.0.1:8000/v1",
    "//127.0.0.1:8000/v1",
    "https://",
    "http:///v1",
    "http://127.0.0.1:port/v1",
    "http://127.0.0.1:99999/v1",
    "http://127.0.0.1 /v1",
    "http://127.0.0.1:8000/v1\n",
    "http://[::1/v1",
    "http://127.0.0.1:8000/v1#part",
)
NAMES_ALONE = ("gpubox", "gpubox/v1", "20240620", "", ":8000")  # a host or a part of a model's name: nobody can say
NAMES_BESIDE_A_SERVER = ("gpubox", "gpubox/v1", "20240620")  # names, where a config has the server's address


@pytest.mark.parametrize("address", [*NO_ADDRESSES, *NAMES_ALONE])
@pytest.mark.parametrize("kind", SERVERS)
def test_what_is_no_address_is_not_taken_for_a_models_name(
    kind: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server would get the prompt, and its key: each such string is refused, with the right form."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.setenv(name, "sk-any")
    named = {
        "mine": NamedProvider(type=kind, base_url="http://127.0.0.1:1/v1"),
        "bare": NamedProvider(type=kind),
    }
    texts = [f"{kind}:m@{address}", f"bare:m@{address}", f"lookup+{kind}:m@{address}"]
    if address not in NAMES_BESIDE_A_SERVER:
        texts.append(f"mine:m@{address}")
    for text in texts:
        for open_named in (open_provider, open_draft):
            with pytest.raises(ConfigError, match=r"https?://") as caught:
                open_named(text, named)
            assert_one_line(caught.value)


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("http://127.0.0.1:8001/v1", "MODEL@http://127.0.0.1:8001/v1"),
        ("HTTPS://h/v1", "MODEL@https://h/v1"),
        ("http://127.0.0.1:8001/v1/m", "MODEL@http://127.0.0.1:8001/v1/m"),
        ("http:/gpubox/v1", "MODEL@http://gpubox/v1"),
        ("http//gpubox/v1", "MODEL@http://gpubox/v1"),
        ("http:gpubox:8001/v1", "MODEL@http://gpubox:8001/v1"),
        ("ftp://gpubox/v1", "MODEL@http://gpubox/v1"),
        ("127.0.0.1:8001/v1", "MODEL@http://127.0.0.1:8001/v1"),
        ("127.0.0.1:8001", "MODEL@http://127.0.0.1:8001"),
        ("127.0.0.1/v1", "MODEL@http://127.0.0.1/v1"),
        ("[::1]:8001/v1", "MODEL@http://[::1]:8001/v1"),
        ("localhost:8001/v1", "MODEL@http://localhost:8001/v1"),
        ("localhost:8001/m", "MODEL@http://localhost:8001/m"),
        ("gpubox:8001/v1", "MODEL@http://gpubox:8001/v1"),
        ("api.example.com/v1", "MODEL@http://api.example.com/v1"),
        ("//127.0.0.1:8001/v1", "MODEL@http://127.0.0.1:8001/v1"),
        ("//gpubox/v1", "MODEL@http://gpubox/v1"),
        *((f"m{sign}http://gpubox/v1", "m@http://gpubox/v1") for sign in (" ", ",", ";", "|", "#", "=", ":", "?")),
        ("m http://gpubox/v1", "m@http://gpubox/v1"),
        ("m 127.0.0.1:8001/v1", "m@http://127.0.0.1:8001/v1"),
        ("m,//gpubox/v1", "m@http://gpubox/v1"),
        ("llama3:8b https://gpubox/v1", "llama3:8b@https://gpubox/v1"),
        ("m?base_url=http://gpubox/v1", "m@http://gpubox/v1"),
        ("m\uff20http://gpubox/v1", "m@http://gpubox/v1"),
        ("m\uff20http\uff1a\uff0f\uff0fgpubox/v1", "m@http://gpubox/v1"),
        ("m\ufe6b127.0.0.1:8001/v1", "m@http://127.0.0.1:8001/v1"),
        ("http://svc:s3cr3t-pw@gpubox/v1", "MODEL@http://gpubox/v1"),
        ("m http://svc:s3cr3t-pw@gpubox/v1?key=s3cr3t-pw", "m@http://gpubox/v1"),
    ],
)
@pytest.mark.parametrize("kind", SERVERS)
def test_an_address_without_an_at_sign_is_not_taken_for_a_models_name(
    kind: str, model: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vendor would get the prompt, and its key: the error has the form that was meant."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.setenv(name, "sk-any")
    named = {"mine": NamedProvider(type=kind, base_url="http://127.0.0.1:1/v1")}
    for prefix in (kind, "mine"):
        for open_named in (open_provider, open_draft):
            with pytest.raises(ConfigError) as caught:
                open_named(f"{prefix}:{model}", named)
            assert str(caught.value).endswith(f"; write {prefix}:{form}")
            assert_one_line(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        "llama3:8b",
        "llama3:7000",
        "hf.co/org/name:Q4",
        "registry.example:5000/org/name:7b",
        "vendor/model:free",
        "ft:gpt-4o:org::id",
        "org/name",
        "/models/llama",
        "accounts/team/models/v1",
        "us.vendor.model-20241022-v2:0",
        "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.vendor.model-v2:0",
        "model-1.0.0.0",
        "m?a=b",
    ],
)
@pytest.mark.parametrize("kind", ["openai", "anthropic", "ollama", "openrouter", "vllm"])
def test_names_that_are_not_addresses_stay(kind: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags, registries, fine-tuned models and paths have colons, dots and slashes, too."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.setenv(name, "sk-any")
    assert open_provider(f"{kind}:{model}").name == f"{kind}:{model}"


@pytest.mark.parametrize("address", NO_ADDRESSES)
@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_address_is_no_file_either(kind: str, address: str) -> None:
    """A model in this process has no address; its error does not look for a file of that name."""
    for open_named in (open_provider, open_draft):
        with pytest.raises(ConfigError):
            open_named(f"{kind}:m@{address}")


@pytest.mark.parametrize("name", ["team@host.example/q8", "org/name@refs/pr/1", "a@1.5", "a@b"])
@pytest.mark.parametrize("kind", FILES)
def test_a_file_may_have_an_at_sign(kind: str, name: str, tmp_path: Path) -> None:
    """The path of one that is there is never taken for an address, and most of others are not."""
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises((ModelLoadError, MissingExtraError)):  # it is there, and empty; not a ConfigError about it
        open_provider(f"{kind}:{tmp_path / name}")


@pytest.mark.parametrize("model", ["@cf/meta/llama-3", "claude-3-5-sonnet@20240620", "m@host:1/v1"])
@pytest.mark.parametrize(
    "address", ["http://h:1/v1", "HTTP://h:1/v1", "https://h/v1?api-version=3", "http://[::1]:1/v1"]
)
def test_a_models_name_may_have_an_at_sign_before_its_address(model: str, address: str) -> None:
    """With its address there is no doubt; a scheme is one in capitals, too."""
    assert ProviderSpec.parse(f"generic:{model}@{address}") == ProviderSpec("generic", model, address)
    assert open_provider(f"generic:{model}@{address}").name == f"generic:{model}"


@pytest.mark.parametrize("model", ["@cf/meta/llama-3", "claude@20240620", "m@gpubox", "ft:m@team:org::id"])
@pytest.mark.parametrize("kind", ["generic", "vllm", "openai", "anthropic"])
def test_a_models_name_may_have_an_at_sign_where_its_server_is_named(
    kind: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt goes to the server of the config, whatever the name."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "sk-any")
    named = {"mine": NamedProvider(type=kind, base_url="http://127.0.0.1:1/v1")}
    assert open_provider(f"mine:{model}", named).name == f"{kind}:{model}"
    with pytest.raises(ConfigError, match="needs the address behind it"):
        open_provider(f"mine:{model}", {"mine": NamedProvider(type=kind)})


@pytest.mark.parametrize(
    "text",
    [
        "openai:m@svc:s3cr3t-pw@127.0.0.1:8000/v1",
        "openai:m@ http://svc:s3cr3t-pw@h/v1",
        "openai:m@http://svc:s3cr3t-pw@h/v1#x",
        "openai:m@http://svc:s3cr3t pw@h/v1",
        "openai:m@http://svc:s3cr3t-pw/x@h/v1",
        "openai:m@http://svc:s3cr3t-pw@/v1",
        "generic:m@http://svc:s3cr3t-pw@h:x/v1",
        "onnx:/x@http://svc:s3cr3t-pw@h/v1",
        "gguf:/x@http://svc:s3cr3t-pw@h/v1",
        "torch:/x@http://svc:s3cr3t-pw@h/v1",
        "random:1@http://svc:s3cr3t-pw@h/v1",
        "lookup:@http://svc:s3cr3t-pw@h/v1",
        "nosuch:m@http://svc:s3cr3t-pw@h/v1",
        "nosuch:m@svc:s3cr3t-pw@h/v1",
        "nosuch:svc:s3cr3t-pw@h/v1",
        "nosuch:m@http://h/v1?key=s3cr3t-pw",
        "nosuch:m@h:8000/v1?key=s3cr3t-pw",
        "openai/m@http://svc:s3cr3t-pw@h/v1",
        "openai/m@http://h/v1?key=s3cr3t-pw",
        "torch:/x@http://h/v1?key=s3cr3t-pw",
        "random:1@http://h/v1?key=s3cr3t-pw",
        "http://svc:s3cr3t-pw@h/v1",
        "lookup@http://svc:s3cr3t-pw@h/v1",
        "lookup@svc:s3cr3t-pw@h/v1",
        "openai:m@http://h/v1?key=s3cr3t-pw#x",
        "openai:http://svc:s3cr3t-pw@h/v1",
        "openai:m http://svc:s3cr3t-pw@h/v1",
        "openai:svc:s3cr3t-pw@h/v1",
        "torch:http://svc:s3cr3t-pw@h/m",
        "onnx:http://svc:s3cr3t-pw@h/m",
        "gguf:https://svc:s3cr3t-pw@h/m",
    ],
)
def test_no_error_of_a_string_has_its_password(text: str) -> None:
    """However wrong the string is."""
    for open_named in (open_provider, open_draft):
        with pytest.raises(ConfigError) as caught:
            open_named(text)
        assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "address",
    [
        "http://svc:s3cr3t-pw@h/v1",
        "http://h/v1?key=s3cr3t-pw",
        "svc:s3cr3t-pw@h/v1",
        "http:/svc:s3cr3t-pw@h/v1",
        "http//svc:s3cr3t-pw@h/v1",
        "ftp://svc:s3cr3t-pw@h/v1",
        " svc:s3cr3t-pw@h/v1",
    ],
)
def test_no_repr_has_a_password(address: str) -> None:
    """Nor the key in a query; also where the address has no scheme."""
    text = f"generic:m@{address}"
    spec, named = ProviderSpec.parse(text), NamedProvider(type="generic", base_url=address)
    shown = f"{spec!r} {named!r} {ModelConfig(target=text, draft=text)!r}"
    assert "s3cr3t" not in shown
    assert shown.count("***") == 4
    assert shown.count("h/v1") == 4


def test_no_repr_of_an_address_has_a_password() -> None:
    address = parse_server_address("http://svc:s3cr3t-pw@h/v1?key=s3cr3t-pw")
    assert "s3cr3t" not in f"{address!r} {address}"


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
