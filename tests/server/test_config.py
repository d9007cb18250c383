"""A server's config: what is read, and what is refused with file, line and key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_spec import BreakerPolicy, ConfigError, Fixed
from llm_spec.cli.main import main
from llm_spec.server import KeyConfig, ModelConfig, Server, ServerConfig, load_config
from llm_spec.testing.server import ScriptedModelServer, ServerFaults

WHOLE = """
[server]
host = "127.0.0.1"
port = 0
workers = 2
default_model = "fast"
cors_origins = ["https://page.example"]

[providers.near]
type = "vllm"
base_url = "http://${HOST}:8000/v1"
api_key = "${KEY}"

[models.fast]
target = "near:tiny"
draft = "lookup"
strategy = "probe"
stream_always = true
lookahead = 4
max_attempts = 2

[models."a/b:c"]
target = "rules:any"

[keys.ann]
key = "${ANN}"
max_concurrent = 3
max_tokens = 1000
models = ["fast"]
"""
ENVIRONMENT = {"HOST": "10.0.0.5", "KEY": "sk-upstream", "ANN": "secret-of-ann"}

Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(text: str) -> Path:
        path = tmp_path / "server.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_whole_config_is_read(written: Written) -> None:
    """Every table, with variables of the environment in their place."""
    config = load_config(written(WHOLE), ENVIRONMENT)
    assert (config.host, config.port, config.workers, config.default_model) == ("127.0.0.1", 0, 2, "fast")
    assert config.cors_origins == ("https://page.example",)
    assert config.providers["near"].base_url == "http://10.0.0.5:8000/v1"
    assert config.providers["near"].api_key == "sk-upstream"
    fast = config.models["fast"]
    assert (fast.target, fast.draft, fast.speculative.strategy) == ("near:tiny", "lookup", "probe")
    assert fast.speculative.lookahead == Fixed(4)
    assert fast.speculative.stream_always
    assert not config.models["a/b:c"].speculative.stream_always
    assert fast.speculative.retry.max_attempts == 2
    assert config.models["a/b:c"] == ModelConfig(target="rules:any")
    assert config.keys["ann"] == KeyConfig(key="secret-of-ann", max_concurrent=3, max_tokens=1000, models=("fast",))


def test_what_is_not_written_is_the_default(written: Written) -> None:
    """A model is enough."""
    config = load_config(written('[models.fast]\ntarget = "rules:any"\n'), {})
    assert config == ServerConfig(models={"fast": ModelConfig(target="rules:any")})
    assert (config.host, config.default_model, config.cors_origins) == ("127.0.0.1", None, ())
    assert config.max_body_bytes == 8 * 1024 * 1024


MODEL = '[models.fast]\ntarget = "rules:any"\n'


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ('[server]\nport = "x"\n' + MODEL, 2, "server.port"),
        ("[server]\nport = 70000\n" + MODEL, 2, "server.port"),
        ("[server]\nhost = 1\nworkers = 0\n" + MODEL, 3, "server.workers"),
        ("[server]\nmystery = 1\n" + MODEL, 2, "server.mystery"),
        ('[server]\ndefault_model = "other"\n' + MODEL, 2, "server.default_model"),
        ("[mystery]\na = 1\n" + MODEL, 1, "mystery"),
        (MODEL + "lookahead = -1\n", 3, "models.fast.lookahead"),
        (MODEL + 'strategy = "magic"\n', 3, "models.fast.strategy"),
        (MODEL + "\n# a comment\nmax_attempts = 0\n", 5, "models.fast.max_attempts"),
        (MODEL + "draft = 3\n", 3, "models.fast.draft"),
        (MODEL + "tarket = 3\n", 3, "models.fast.tarket"),
        ('[models.fast]\ndraft = "lookup"\n', 1, "models.fast"),
        ('[models.fast]\ntarget = "nobody:x"\n', 2, "models.fast.target"),
        (MODEL + 'draft = "nobody:x"\n', 3, "models.fast.draft"),
        ('[models.fast]\ntarget = "vllm:${NOT_SET}"\n', 2, "models.fast.target"),
        (MODEL + '[keys.ann]\nkey = "short"\n', 4, "keys.ann.key"),
        (MODEL + '[keys.ann]\nkey = "${NOT_SET}"\n', 4, "keys.ann.key"),
        (MODEL + '[keys.ann]\nkey = "long enough"\nmax_tokens = -1\n', 5, "keys.ann.max_tokens"),
        (MODEL + "[keys.ann]\nmax_tokens = 1\n", 3, "keys.ann"),
        (MODEL + '[providers.near]\ntype = "mystery"\n', 4, "providers.near.type"),
        (MODEL + '[providers.near]\nbase_url = "x"\n', 3, "providers.near"),
    ],
)
def test_an_error_names_file_line_and_key(written: Written, text: str, line: int, key: str) -> None:
    """Whoever wrote it finds the place without reading the rest."""
    path = written(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert str(caught.value).startswith(f"{path}, line {line}: {key}: ")


@pytest.mark.parametrize("text", ["", "[server]\nport = 0\n", "models = 3\n", "[models]\nfast = 3\n", "a = \n", "\x00"])
def test_what_is_no_config_is_refused(written: Written, text: str) -> None:
    """The error names the file at least."""
    path = written(text)
    with pytest.raises(ConfigError, match=r"server\.toml"):
        load_config(path, {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """So it is for one that cannot be read."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")


def test_no_error_tells_a_key(written: Written) -> None:
    """A key that is wrong is not repeated, nor is a right one in the config's own text."""
    with pytest.raises(ConfigError) as caught:
        load_config(written(MODEL + '[keys.ann]\nkey = "tiny-k"\n'), {})
    assert "tiny-k" not in str(caught.value)
    config = load_config(written(WHOLE), ENVIRONMENT)
    assert "secret-of-ann" not in repr(config)
    assert "sk-upstream" not in repr(config)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])  # noqa: S104 - what is refused
async def test_without_keys_only_a_loopback_address_is_bound(host: str) -> None:
    """Nobody on the network may ask without a key, whichever way the server is begun."""
    config = ServerConfig(models={"fast": ModelConfig(target="rules:any")}, host=host, port=0)
    with pytest.raises(ConfigError, match="no keys"):
        config.check_address_is_protected()
    with pytest.raises(ConfigError, match="no keys"):
        Server(config)
    keys = {"ann": KeyConfig(key="secret-of-ann")}
    ServerConfig(models=config.models, host=host, port=0, keys=keys).check_address_is_protected()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_address_needs_no_key(host: str) -> None:
    """Those that only this machine can reach."""
    ServerConfig(models={"fast": ModelConfig(target="rules:any")}, host=host).check_address_is_protected()


def test_without_a_config_the_builtin_pair_is_served() -> None:
    """One model, of the name `builtin`."""
    config = ServerConfig.builtin(port=0)
    assert list(config.models) == ["builtin"]
    assert config.models["builtin"].target == "builtin:target"
    assert config.models["builtin"].draft is not None


# ---------------------------------------------------------------------------------------------- --check


def test_a_config_can_be_checked(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    """`--check` opens the models, says which there are, and ends."""
    assert main(["serve", "--config", str(written(MODEL)), "--check"]) == 0
    assert "fast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MODEL + "lookahead = -1\n", "line 3: models.fast.lookahead"),
        ('[models.fast]\ntarget = "onnx:nowhere/at-all"\n', "models.fast"),
        ('[server]\nhost = "0.0.0.0"\n' + MODEL, "no keys"),
    ],
)
def test_a_check_finds_what_would_keep_it_from_serving(
    written: Written, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    """One line on stderr, and a status that scripts can see."""
    assert main(["serve", "--config", str(written(text)), "--check"]) != 0
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


async def check_against(written: Written, url: str, draft: str) -> int:
    config = f'[models.one]\ntarget = "generic:m@{url}"\n[models.two]\ntarget = "rules:any"\ndraft = "{draft}"\n'
    return await asyncio.to_thread(main, ["serve", "--config", str(written(config)), "--check"])


async def test_a_check_asks_every_server_once(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    """A target and a draft that two models have are asked once each, for little."""
    async with ScriptedModelServer("yes") as server:
        assert await check_against(written, server.url, f"generic:m@{server.url}") == 0
        (asked,) = server.requests
    assert asked["max_tokens"] == 16
    assert "one, two" in capsys.readouterr().out


async def test_a_check_says_what_cannot_be_reached(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    """The model, which part of it, and why: nobody listens, or the key is refused."""
    async with ScriptedModelServer("yes", faults=ServerFaults(status=401)) as server:
        assert await check_against(written, "http://127.0.0.1:9/v1", f"vllm:m@{server.url}") != 0
    err = capsys.readouterr().err
    assert "models.one: generic:m cannot answer: " in err
    assert "cannot be reached; check the address" in err
    assert "models.two: vllm:m cannot answer: " in err
    assert "answered 401" in err
    assert "Traceback" not in err


def test_a_models_circuit_is_set_in_toml(tmp_path: Path) -> None:
    """Its two settings stand beside the others, and a wrong one is named with its line."""
    path = tmp_path / "serve.toml"
    path.write_text('[models.a]\ntarget = "builtin:target"\nmax_failures = 0\nopen_s = 2.5\n', encoding="utf-8")
    assert load_config(path).models["a"].speculative.breaker == BreakerPolicy(max_failures=0, open_s=2.5)
    path.write_text('[models.a]\ntarget = "builtin:target"\nopen_s = 0\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 3: models\.a\.open_s: open_s is 0"):
        load_config(path)


SECRET = "-".join(("sk", "secret", "0123456789"))
MODEL = '[models.fast]\ntarget = "rules:any"\n'


@pytest.mark.parametrize("secret", [SECRET, "${SECRET}"], ids=["written", "variable"])
@pytest.mark.parametrize(
    "text",
    [
        MODEL + '[keys.ann]\nkey = "{}"\n"{}" = 1',
        MODEL + '[keys.ann]\nkey = "{}"\nmodels = ["{}"]',
        MODEL + '[providers.big]\ntype = "generic"\napi_key = ["{}"]',
        MODEL + '[providers.big]\napi_key = "{}"\ntype = "{}"',
        '[models.fast]\ntarget = "{}:any"\n[keys.ann]\nkey = "{}"',
        '[models.fast]\ntarget = "nothing:any@http://user:{}@host/v1"',
    ],
)
def test_no_error_tells_a_key_in_another_place(written: Written, text: str, secret: str) -> None:
    """Wherever it was written by mistake."""
    with pytest.raises(ConfigError) as caught:
        load_config(written(text.replace("{}", secret)), {"SECRET": SECRET})
    assert SECRET not in str(caught.value)
    assert SECRET not in str(caught.value.__cause__)


def test_no_repr_tells_a_key(written: Written) -> None:
    """Neither keys nor what stands before the host of an address."""
    text = """
[models.fast]
target = "generic:x@http://user:sk-secret-0123456789@host/v1"
draft = "big:x"
[providers.big]
type = "generic"
base_url = "http://user:sk-secret-0123456789@other/v1"
api_key = "sk-secret-0123456789"
[keys.ann]
key = "sk-secret-0123456789"
"""
    shown = repr(load_config(written(text), {}))
    assert SECRET not in shown
    assert "http://***@host/v1" in shown
    assert "http://***@other/v1" in shown


def test_a_short_variable_does_not_mangle_errors(written: Written) -> None:
    with pytest.raises(ConfigError, match="strategy is 'a'; it must be one of auto, plain"):
        load_config(written(MODEL + 'strategy = "${WORD}"'), {"WORD": "a"})
