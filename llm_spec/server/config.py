"""The configuration of a server, read from TOML. Errors name the file, the line and the key."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from llm_spec.contract.checks import check_number, suggest_name
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.fields import LIMIT_FIELDS
from llm_spec.decoder.config import BreakerPolicy, RetryPolicy, SpeculativeConfig, StrategyName, Timeouts
from llm_spec.decoder.entry_points import NamedProvider, list_provider_names, strip_credentials
from llm_spec.decoder.pricing import Price, parse_price
from llm_spec.local.lookahead import Fixed
from llm_spec.strategies.registry import AUTO, PLAIN, get_strategies_by_name, list_strategy_choices

__all__ = ["KeyConfig", "ModelConfig", "ServerConfig", "load_config"]

T = TypeVar("T")
Table = Mapping[str, Any]

_VARIABLE: Final = re.compile(r"\$\{([^}]*)\}")
_TABLE_HEADER: Final = re.compile(r"\s*\[+\s*(?P<path>[^\]]+?)\s*\]+\s*(#.*)?$")
_MIN_SECRET_LENGTH: Final = 8  # a shorter text may be part of any word
# Name, target and draft of the model that is served without a config
_BUILTIN_MODEL: Final = ("builtin", "builtin:target", "lookup+builtin:draft")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model that clients may use.

    `target`, `draft`: provider strings. Without a draft, answers are plain.
    `strategies`: the strategies that requests may choose by header, besides the model's own. By
    default any exact one if the model's own is `auto`, else only plain.
    `extra_fields`: request fields to pass to the target, besides those that are always safe. `*`
    passes all but other limits of length.
    `images`: True if the target sees images and files. A model in this process never does.
    """

    target: str
    draft: str | None = None
    speculative: SpeculativeConfig = field(default_factory=partial(SpeculativeConfig, stream_always=False))
    strategies: tuple[StrategyName, ...] | None = None
    extra_fields: tuple[str, ...] = ()
    images: bool = True

    def __post_init__(self) -> None:
        if type(self.images) is not bool:
            raise ConfigError(f"images is {self.images!r}; it must be true or false")
        for name in self.strategies or ():
            if name not in list_strategy_choices():
                raise ConfigError(f"strategies has {name!r}; each must be one of {', '.join(list_strategy_choices())}")
        for field_name in self.extra_fields:
            if str(field_name).lower() in LIMIT_FIELDS:
                raise ConfigError(
                    f"extra_fields has {field_name!r}, which would let clients exceed their limits; remove it"
                )

    @property
    def allowed_strategies(self) -> tuple[StrategyName, ...]:
        """The strategies that requests may choose."""
        own = self.speculative.strategy
        if self.strategies is not None:
            return tuple(dict.fromkeys((own, *self.strategies)))
        if own == AUTO:
            return (AUTO, *(s.name for s in get_strategies_by_name().values() if s.guarantee == "exact"))
        return tuple(dict.fromkeys((own, PLAIN.name)))

    def __repr__(self) -> str:
        target, draft = strip_credentials(self.target), self.draft and strip_credentials(self.draft)
        return f"ModelConfig(target={target!r}, draft={draft!r}, speculative={self.speculative!r})"


@dataclass(frozen=True, kw_only=True)
class KeyConfig:
    """A client's API key and its limits; None means no limit.

    `max_concurrent`: requests at once.
    `max_tokens`, `max_cost`: for all requests since the server started, drafts and waste included.
    `models`: the names of the models that the client may use.
    """

    key: str = field(repr=False)
    max_concurrent: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    models: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.key) < 8 or not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError(
                "key is too short, or has characters that a header cannot carry; "
                "it must have at least 8 printable ASCII characters"
            )
        check_number(ConfigError, "max_concurrent", self.max_concurrent, 1, integer=True)
        check_number(ConfigError, "max_tokens", self.max_tokens, 0, integer=True)
        check_number(ConfigError, "max_cost", self.max_cost, 0.0)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The configuration of a server.

    `keys`: clients by name. Without keys anybody may send requests, but only to a loopback address.
    `default_model`: the model for names that are not in `models`. By default they are answered with
    404.
    `max_body_bytes`: the longest request.
    `max_bodies_bytes`: the bytes of all requests over 64 KiB that a worker holds at a time. By
    default four of the longest.
    `max_requests`: requests at once in one worker. Requests beyond either bound are answered with
    503.
    `cors_origins`: web pages that may send requests from a browser, besides the server's own.
    `keep_alive_s`: the time between comments that are sent while an answer pauses.
    `body_timeout_s`: how long a request's body may take, and how long a client may read nothing.
    `idle_s`: how long a connection may be silent, or take to send a request's headers.
    `shutdown_s`: how long running answers may continue once the server shuts down.
    `session_key`: the secret from which all workers derive conversation ids
    (`SpeculativeConfig.session_header`).
    """

    models: Mapping[str, ModelConfig]
    providers: Mapping[str, NamedProvider] = field(default_factory=dict[str, NamedProvider])
    keys: Mapping[str, KeyConfig] = field(default_factory=dict[str, KeyConfig])
    host: str = "127.0.0.1"
    port: int = 8700
    workers: int = 1
    default_model: str | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    max_bodies_bytes: int | None = None
    max_requests: int = 2000
    cors_origins: tuple[str, ...] = ()
    keep_alive_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_s: float = 75.0
    shutdown_s: float = 30.0
    session_key: bytes = field(default_factory=partial(os.urandom, 32), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("models is empty; add at least one [models.NAME] with a target")
        check_number(ConfigError, "port", self.port, 0, 65535, integer=True)
        check_number(ConfigError, "workers", self.workers, 1, 256, integer=True)
        check_number(ConfigError, "max_body_bytes", self.max_body_bytes, 1, integer=True)
        check_number(ConfigError, "max_bodies_bytes", self.max_bodies_bytes, self.max_body_bytes, integer=True)
        check_number(ConfigError, "max_requests", self.max_requests, 1, integer=True)
        for name in ("keep_alive_s", "body_timeout_s", "idle_s"):
            check_number(ConfigError, name, getattr(self, name), 0.0, above=True)
        check_number(ConfigError, "shutdown_s", self.shutdown_s, 0.0)
        if self.default_model is not None and self.default_model not in self.models:
            raise ConfigError(f"default_model is {self.default_model!r}; it must be one of {', '.join(self.models)}")
        if len({key.key for key in self.keys.values()}) < len(self.keys):
            raise ConfigError("keys has the same key twice; each client needs its own")
        for name, key in self.keys.items():
            for model in key.models or ():
                if model not in self.models:
                    raise ConfigError(f"keys.{name}.models has {model!r}; it must be among {', '.join(self.models)}")

    def check_address_is_protected(self) -> None:
        """Raise ConfigError if other machines could send requests without a key."""
        if not self.keys and not is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host!r}, which other machines can reach, and there are no keys; add [keys.NAME]"
            )

    @classmethod
    def builtin(cls, **settings: Any) -> ServerConfig:
        """Return the config without a file: the built-in pair, as the model `builtin`."""
        name, target, draft = _BUILTIN_MODEL
        return cls(models={name: ModelConfig(target=target, draft=draft)}, **settings)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_config(path: str | Path, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """Read a TOML file. `${NAME}` in its texts is replaced by that variable of the environment.

    `environment`: the variables, by default those of this process.

    Raises ConfigError, which names the file, the line and the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the config {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return _ConfigReader(str(path), text, os.environ if environment is None else environment).read_config(table)


# ------------------------------------------------------------------------------------------- inside


class _ConfigReader:
    """Reads the tables of one file."""

    def __init__(self, path: str, text: str, environment: Mapping[str, str]) -> None:
        self._path = path
        self._key_lines = _find_key_lines(text)
        self._environment = environment
        self._secret_replacements: dict[str, str] = {}  # what errors show in their place

    def read_config(self, table: Table) -> ServerConfig:
        self._secret_replacements |= dict.fromkeys(_iterate_written_secrets(table), "***")
        table = self._expand_variables(table, ())
        self._refuse_unknown_keys(table, (), ("server", "providers", "models", "keys"))
        providers = {name: self._read_provider(name, t) for name, t in self._iterate_named_tables(table, "providers")}
        models = {name: self._read_model(name, t) for name, t in self._iterate_named_tables(table, "models")}
        keys = {name: self._read_client_key(name, t) for name, t in self._iterate_named_tables(table, "keys")}
        if not models:
            raise ConfigError(f"{self._path}: no model is configured; add [models.NAME] with a target")
        names = [f.name for f in dataclasses.fields(ServerConfig) if f.name not in _OTHER_FIELDS]
        settings = self._get_known_settings(table.get("server", {}), ("server",), names)
        config = self._construct_with_line_in_error(
            ("server",), ServerConfig, models=models, providers=providers, keys=keys, **settings
        )
        self._check_model_providers(config)
        return config

    # --------------------------------------------------------------------------------------- tables

    def _read_provider(self, name: str, table: Table) -> NamedProvider:
        key_path = ("providers", name)
        settings = self._get_known_settings(table, key_path, [f.name for f in dataclasses.fields(NamedProvider)])
        self._require_key(table, key_path, "type")
        known = list_provider_names()
        if settings["type"] not in known:
            raise self._build_config_error(
                (*key_path, "type"),
                f"{settings['type']!r} is not known; installed are: "
                f"{', '.join(known)}{suggest_name(settings['type'], known)}",
            )
        for part in settings.values():
            if not isinstance(part, str):
                raise self._build_config_error(key_path, f"{part!r} must be a text")
        return NamedProvider(**settings)

    def _read_model(self, name: str, table: Table) -> ModelConfig:
        key_path = ("models", name)
        self._require_key(table, key_path, "target")
        known = [f.name for f in dataclasses.fields(SpeculativeConfig) if f.name in _SPECULATIVE_KEYS]
        names = [*_OWN_KEYS, "prices", *known, *_RETRY_KEYS, *_TIMEOUT_KEYS, *_BREAKER_KEYS]
        settings = self._get_known_settings(table, key_path, names)
        for part in ("target", "draft"):
            if not isinstance(settings.get(part, ""), str):
                raise self._build_config_error((*key_path, part), f"{part} is {settings[part]!r}; it must be a text")
        for part in _LIST_KEYS:
            if not isinstance(settings.get(part, ()), tuple):
                raise self._build_config_error(
                    (*key_path, part), f"{part} is {settings[part]!r}; it must be a list of texts"
                )
        own = {key: settings.pop(key) for key in _OWN_KEYS if key in settings}
        retry = {key: settings.pop(key) for key in _RETRY_KEYS if key in settings}
        timeouts = {key: settings.pop(key) for key in _TIMEOUT_KEYS if key in settings}
        breaker = {key: settings.pop(key) for key in _BREAKER_KEYS if key in settings}
        for key, read in _VALUE_READERS.items():
            if key in settings:
                settings[key] = self._construct_with_line_in_error((*key_path, key), read, settings[key])
        settings.setdefault("stream_always", False)
        settings["retry"] = self._construct_with_line_in_error(key_path, RetryPolicy, **retry)
        settings["timeouts"] = self._construct_with_line_in_error(key_path, Timeouts, **timeouts)
        settings["breaker"] = self._construct_with_line_in_error(key_path, BreakerPolicy, **breaker)
        speculative = self._construct_with_line_in_error(key_path, SpeculativeConfig, **settings)
        return self._construct_with_line_in_error(key_path, ModelConfig, speculative=speculative, **own)

    def _read_client_key(self, name: str, table: Table) -> KeyConfig:
        key_path = ("keys", name)
        self._require_key(table, key_path, "key")
        settings = self._get_known_settings(table, key_path, [f.name for f in dataclasses.fields(KeyConfig)])
        if not isinstance(settings["key"], str):
            raise self._build_config_error((*key_path, "key"), "key must be a text")
        return self._construct_with_line_in_error(key_path, KeyConfig, **settings)

    def _check_model_providers(self, config: ServerConfig) -> None:
        """Raise ConfigError with the line of a provider that is not known."""
        known = {*list_provider_names(), *config.providers}
        for name, model in config.models.items():
            for part, text in (("target", model.target), ("draft", model.draft)):
                provider = "" if text is None else text.partition(":")[0].partition("+")[0]
                if text is not None and provider not in known:
                    message = f"provider {provider!r} is not known; known are: {', '.join(sorted(known))}"
                    raise self._build_config_error(("models", name, part), message)

    # --------------------------------------------------------------------------------------- values

    def _iterate_named_tables(self, table: Table, name: str) -> Iterator[tuple[str, Table]]:
        found = table.get(name, {})
        if not isinstance(found, Mapping):
            raise self._build_config_error((name,), f"{name} must be tables, [{name}.NAME]")
        for key, value in cast("Table", found).items():
            if not isinstance(value, Mapping):
                raise self._build_config_error((name, key), f"{name}.{key} must be a table, [{name}.{key}]")
            yield key, cast("Table", value)

    def _get_known_settings(self, table: Any, key_path: tuple[str, ...], names: Sequence[str]) -> dict[str, Any]:
        if not isinstance(table, Mapping):
            raise self._build_config_error(key_path, f"{'.'.join(key_path)} must be a table, [{'.'.join(key_path)}]")
        self._refuse_unknown_keys(cast("Table", table), key_path, names)
        return {name: _list_to_tuple(value) for name, value in cast("Table", table).items()}

    def _refuse_unknown_keys(self, table: Table, key_path: tuple[str, ...], names: Sequence[str]) -> None:
        for name in table:
            if name not in names:
                raise self._build_config_error(
                    (*key_path, name), f"{name} is not known here; known keys are: {', '.join(names)}"
                )

    def _require_key(self, table: Table, key_path: tuple[str, ...], name: str) -> None:
        if name not in table:
            raise self._build_config_error(key_path, f"{name} is missing; add it")

    def _construct_with_line_in_error(
        self, key_path: tuple[str, ...], make: Callable[..., T], *values: Any, **settings: Any
    ) -> T:
        """Call `make`; add to its error the line of the key that the error begins with."""
        try:
            return make(*values, **settings)
        except (ConfigError, TypeError) as error:
            named = re.match(r"\w+", str(error))
            key = (*key_path, named[0]) if named is not None and (*key_path, named[0]) in self._key_lines else key_path
            raise self._build_config_error(key, str(error)) from None  # it may quote a key

    def _expand_variables(self, value: Any, key_path: tuple[str, ...]) -> Any:
        """Replace the variables in the texts of a value."""
        if isinstance(value, Mapping):
            return {k: self._expand_variables(v, (*key_path, k)) for k, v in cast("Table", value).items()}
        if isinstance(value, list):
            return [self._expand_variables(item, key_path) for item in _list_to_tuple(value)]
        return (
            _VARIABLE.sub(lambda found: self._get_environment_variable(found[1], key_path), value)
            if isinstance(value, str)
            else value
        )

    def _get_environment_variable(self, name: str, key_path: tuple[str, ...]) -> str:
        if name not in self._environment:
            raise self._build_config_error(key_path, f"the variable {name!r} is not set in the environment")
        self._secret_replacements[self._environment[name]] = f"${{{name}}}"
        return self._environment[name]

    def _build_config_error(self, key_path: tuple[str, ...], what: str) -> ConfigError:
        line = next(
            (self._key_lines[key_path[:n]] for n in range(len(key_path), 0, -1) if key_path[:n] in self._key_lines),
            None,
        )
        place = self._path if line is None else f"{self._path}, line {line}"
        message = f"{'.'.join(key_path)}: {what}"
        for secret, shown in self._secret_replacements.items():
            if len(secret) >= _MIN_SECRET_LENGTH:
                message = message.replace(secret, shown)
        return ConfigError(f"{place}: {strip_credentials(message)}")


# Fields of a ServerConfig that no key of [server] sets
_OTHER_FIELDS: Final = ("models", "providers", "keys", "session_key")
_LIST_KEYS: Final = ("strategies", "extra_fields")
_OWN_KEYS: Final = ("target", "draft", "images", *_LIST_KEYS)  # of a ModelConfig
_RETRY_KEYS: Final = tuple(f.name for f in dataclasses.fields(RetryPolicy))
_BREAKER_KEYS: Final = tuple(f.name for f in dataclasses.fields(BreakerPolicy))
_TIMEOUT_KEYS: Final = tuple(f.name for f in dataclasses.fields(Timeouts))
_SPECULATIVE_KEYS: Final = (
    "strategy",
    "lookahead",
    "acceptance",
    "max_draft_tokens",
    "max_total_tokens",
    "max_iterations",
    "max_concurrent_streams",
    "max_extra_cost",
    "session_header",
    "deadline_s",
    "draft_timeout_s",
    "prices",
    "max_request_tokens",
    "max_request_cost",
    "stream_always",
)


def _iterate_written_secrets(value: Any, name: str = "") -> Iterator[str]:
    """Yield the keys that are written out in a table or value."""
    if isinstance(value, Mapping):
        for inner_name, inner in cast("Table", value).items():
            yield from _iterate_written_secrets(inner, inner_name)
    elif isinstance(value, list):
        for item in _list_to_tuple(value):
            yield from _iterate_written_secrets(item, name)
    elif isinstance(value, str) and name in ("key", "api_key"):
        yield value


def _list_to_tuple(value: Any) -> Any:
    """Convert a list to a tuple; return anything else unchanged."""
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _parse_price_table(table: Any) -> Mapping[str, Price]:
    if not isinstance(table, Mapping):
        raise ConfigError('prices must be a table, such as { "openai:gpt-4.1" = "2:8:0.5" }')
    return {name: parse_price(str(price)) for name, price in cast("Table", table).items()}


_VALUE_READERS: Final[Mapping[str, Callable[[Any], object]]] = {"lookahead": Fixed, "prices": _parse_price_table}


def _find_key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Find the line of each table and key that is written on a line of its own."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = _TABLE_HEADER.match(line)
        if header is not None:
            table = _split_dotted_key(header["path"])
            lines.setdefault(table, number)
            for n in range(1, len(table)):
                lines.setdefault(table[:n], number)
        elif "=" in line and not line.lstrip().startswith("#"):
            lines.setdefault((*table, *_split_dotted_key(line.partition("=")[0])), number)
    return lines


def _split_dotted_key(path: str) -> tuple[str, ...]:
    """Split a dotted key into its parts, without quotes."""
    found = re.findall(r'"([^"]*)"|\'([^\']*)\'|([^.\s]+)', path)
    return tuple(a or b or c for a, b, c in found)
