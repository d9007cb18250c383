"""`provider:model[@base_url]` strings to objects, through the entry points of installed packages.

A package registers a `ProviderEntry` under its name in the entry-point group `llm_spec.providers`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from llm_spec.contract.checks import suggest_name
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import TargetFeature
from llm_spec.contract.entry import ProviderEntry
from llm_spec.contract.errors import ConfigError, MissingExtraError, UnknownProviderError
from llm_spec.contract.provider import LlmProvider
from llm_spec.kit.server_addresses import parse_server_address, strip_credentials

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "NamedProvider",
    "ProviderSpec",
    "find_target_features",
    "list_model_specs_of_draft",
    "list_provider_names",
    "open_draft",
    "open_provider",
    "registered_providers",
    "strip_address",
    "strip_credentials",
]

_ENTRY_POINT_GROUP: Final = "llm_spec.providers"
_SPEC: Final = re.compile(
    r"(?P<provider>[A-Za-z0-9_-]+)(:(?P<model>.*?)(@(?P<base_url>https?://.*))?)?", re.DOTALL | re.IGNORECASE
)
_ADDRESS_START: Final = re.compile(r"@https?://", re.IGNORECASE)
_BROKEN_SCHEME: Final = re.compile(r"\s*(?:https?(?::/*|/+)|[a-z][a-z0-9+.-]*:/+|:?/+)?\s*", re.IGNORECASE)
# What only an address has after an @ in the path of a file: a scheme, a port, an IP address, or a
# domain and a path
_ADDRESS_IN_PATH: Final = re.compile(
    r"\s*(?:\[|//|https?[:/]|[a-z][a-z0-9+.-]*:/|localhost(?:[:/]|$)|[^/\s:]*:\d{1,5}(?:/|$)"
    r"|\d{1,3}(?:\.\d{1,3}){3}(?:/|$)|[\w.-]+\.[a-z]{2,}/)",
    re.IGNORECASE,
)
_URL: Final = re.compile(r"\s*https?:/", re.IGNORECASE)
# What only an address has anywhere in a model's name: a scheme, this machine or an IP address (with
# a port or alone), or a host before the version of an API. A tag (`llama3:8b`) or a registry
# (`hf.co/org/name:Q4`) is not an address.
_ADDRESS_IN_NAME: Final = re.compile(
    r"(?:[a-z][a-z0-9+.-]*)?://|https?//|(?<![^\s,;|#=?&])//|https?:(?=[/\[]|localhost|[\w-]+[.:])"
    r"|(?<![\w.-])(?:localhost|\d{1,3}(?:\.\d{1,3}){3}|\[[0-9a-f:.]+\]):\d{1,5}(?!\w)"
    r"|(?<![^\s,;|#=?&])(?:localhost|\d{1,3}(?:\.\d{1,3}){3}|\[[0-9a-f:.]+\])(?:/|\s*$)"
    r"|(?<![\w./-])[\w.-]+(?::\d{1,5}|\.[a-z]{2,})/v\d+(?:/|\s*$)",
    re.IGNORECASE,
)
_NAME_END: Final = re.compile(r"(?:[\s,;|#?&]+\w+=)?[\s,;|#=:@?&/]*$")


class ProviderSpec(NamedTuple):
    """The parts of a provider string."""

    provider: str
    model: str
    base_url: str | None

    @classmethod
    def parse(cls, text: str) -> ProviderSpec:
        """Parse `provider:model[@http…]`; raises ConfigError for anything else."""
        match = _SPEC.fullmatch(text)
        if match is None:
            name, slash, model = text.partition("/")
            spec = strip_credentials(f"{name}:{model}")
            meant = f"; did you mean '{spec}'?" if slash and name in list_provider_names() else ""
            raise ConfigError(
                f"provider is {strip_credentials(text)!r}; write it as provider:model or "
                f"provider:model@http://host/v1{meant}"
            )
        return cls(match["provider"], match["model"] or "", match["base_url"])

    def check_address_is_read(self, *, names_files: bool, has_server: bool = False) -> None:
        """Raise ConfigError if the model's name seems to contain an address.

        Otherwise another server would receive the prompt and its key. So every @, and everything
        that only an address has, counts as an address, unless models are files. If a server is
        named elsewhere (`has_server`), a name may have an @.
        """
        if self.base_url is not None:
            return
        model = unicodedata.normalize("NFKC", self.model)  # a full-width @ counts, too
        found = _URL.match(model) if names_files else _ADDRESS_IN_NAME.search(model)
        name, at, written = (model[: found.start()], "", model[found.start() :]) if found else model.rpartition("@")
        may_have_at = names_files or (has_server and written.strip())
        if not found and (not at or (may_have_at and _ADDRESS_IN_PATH.match(written) is None)):
            return
        if names_files and Path(self.model.partition("?")[0]).exists():
            return
        if found and names_files:
            raise ConfigError(f"{self.provider} runs a model in this process; name its folder or file, not an address")
        address = _clean_address(written)
        if found and not (name.rstrip().endswith("@") and model.count("@") == self.model.count("@")):
            name = _NAME_END.sub("", name, count=1)
            meant = name if name and not any(character.isspace() for character in name) else "MODEL"
            scheme = "https" if written.strip().lower().startswith("https") else "http"
            raise ConfigError(
                f"the model of {self.provider!r} has an address in its name; "
                f"write {self.provider}:{meant}@{scheme}://{address}"
            )
        named = f"; a name with an @ needs the address behind it, {self.provider}:NAME@http://host/v1"
        shown = re.split("[@:]", name)[0]  # text after a colon may be a password
        raise ConfigError(
            f"the address of {f'{self.provider}:{shown}'!r} has no scheme; write @http://{address} "
            f"or @https://{address}{'' if names_files else named}"
        )

    def __repr__(self) -> str:
        base_url = None if self.base_url is None else strip_credentials(self.base_url)
        model = strip_credentials(f"{self.provider}:{self.model}").partition(":")[2]
        return f"ProviderSpec(provider={self.provider!r}, model={model!r}, base_url={base_url!r})"


@dataclass(frozen=True, kw_only=True)
class NamedProvider:
    """A provider under a name of its own: its entry, server and key. No repr shows keys."""

    type: str
    base_url: str | None = None
    api_key: str | None = None

    def __repr__(self) -> str:
        base_url = (
            None if self.base_url is None else strip_credentials(f"@{self.base_url}")[1:]
        )  # also without a scheme
        return f"NamedProvider(type={self.type!r}, base_url={base_url!r})"


def strip_address(text: str) -> str:
    """Return a provider string without the address at its end, as results name a provider."""
    return _ADDRESS_START.split(text, maxsplit=1)[0]


def _clean_address(written: str) -> str:
    """Return an address for errors, without its scheme, credentials and query."""
    _, _, rest = written.rpartition("@")
    scheme = cast("re.Match[str]", _BROKEN_SCHEME.match(rest))
    address = re.split(r"[?#]", rest[scheme.end() :])[0].rstrip()
    return "host:port/v1" if not address or any(character.isspace() for character in address) else address


_NO_NAMED_PROVIDERS: Final[Mapping[str, NamedProvider]] = {}


def registered_providers() -> dict[str, ProviderEntry]:
    """Return all installed entries by name.

    This imports the packages that register them, but not their requirements.
    """
    return {name: _load_provider_entry(point) for name, point in sorted(_find_provider_entry_points().items())}


def list_provider_names() -> list[str]:
    """Return the names of all installed entries; imports no package."""
    return sorted(_find_provider_entry_points())


def open_provider(text: str, named: Mapping[str, NamedProvider] = _NO_NAMED_PROVIDERS) -> LlmProvider:
    """Open the chat model that a string names; the caller closes it.

    `named` adds providers to the installed ones. Raises UnknownProviderError, MissingExtraError
    (with the command that installs what is missing), ConfigError, and what the provider raises for
    its model.
    """
    opened = _open_provider_spec(text, _find_provider_entry_points(), named)
    if not isinstance(opened, LlmProvider):
        raise ConfigError(f"{strip_credentials(text)!r} is a draft, not a model that can answer; use it as draft")
    return opened


def open_draft(text: str, named: Mapping[str, NamedProvider] = _NO_NAMED_PROVIDERS) -> DraftProvider:
    """Open the draft that a string names, a chat model or a bare draft; the caller closes it.

    `lookup+builtin:draft` joins drafts: the cheap one first, the next if that is unsure
    (`CascadeDraft`). Raises as `open_provider` does.
    """
    from llm_spec.drafting.cascade import CascadeDraft  # late: reading a config does not need it
    from llm_spec.drafting.provider_draft import ProviderDraft

    points = _find_provider_entry_points()
    opened = [
        _open_provider_spec(part, points, named) for part in _split_joined_specs(text, points.keys() | named.keys())
    ]
    drafts = [ProviderDraft(d) if isinstance(d, LlmProvider) else d for d in opened]
    return drafts[0] if len(drafts) == 1 else CascadeDraft(*drafts)


def find_target_features(text: str) -> tuple[TargetFeature, ...] | None:
    """Return the features of a target that strategies need, or None if unknown; asks no server."""
    spec = ProviderSpec.parse(text)
    point = _find_provider_entry_points().get(spec.provider)
    if point is None:
        return None
    entry = _load_provider_entry(point)
    spec.check_address_is_read(names_files=entry.names_files)
    return None if entry.features is None else tuple(entry.features(spec.model))


def list_model_specs_of_draft(text: str) -> list[str]:
    """Return the parts of a draft's string that call a model.

    If no installed package registers a part, it counts as well.
    """
    points = _find_provider_entry_points()
    parts = [(part, points.get(part.partition(":")[0])) for part in _split_joined_specs(text, points.keys())]
    return [part for part, point in parts if point is None or not _load_provider_entry(point).is_free]


def _split_joined_specs(text: str, names: AbstractSet[str]) -> list[str]:
    """Split at `+` if each part names a provider (a path may hold a `+` too)."""
    parts = text.split("+")
    return parts if all(part.partition(":")[0] in names for part in parts) else [text]


def _find_provider_entry_points() -> dict[str, EntryPoint]:
    # late: it takes a third of this package's import time
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=_ENTRY_POINT_GROUP)}


def _open_provider_spec(
    text: str, points: Mapping[str, EntryPoint], named: Mapping[str, NamedProvider]
) -> LlmProvider | DraftProvider:
    spec = ProviderSpec.parse(text)
    settings = named.get(spec.provider, NamedProvider(type=spec.provider))
    if settings.type not in points:
        raise UnknownProviderError(
            f"provider {settings.type!r} (in {strip_credentials(text)!r}) is not known; installed are: "
            f"{', '.join(sorted(points))}{suggest_name(settings.type, points)}"
        )
    entry = _load_provider_entry(points[settings.type])
    spec.check_address_is_read(names_files=entry.names_files, has_server=settings.base_url is not None)
    base_url = spec.base_url or settings.base_url
    if base_url is not None:
        parse_server_address(base_url)
    if entry.missing_modules:
        missing = ", ".join(entry.missing_modules)
        raise MissingExtraError(
            f"provider {settings.type!r} needs {missing}, which is not installed; run: {entry.install}"
        )
    if settings.api_key is None:
        return entry.load(spec.model, base_url)
    if entry.load_with_key is None:
        raise ConfigError(f"provider {settings.type!r} takes no key; leave out api_key of {spec.provider!r}")
    return entry.load_with_key(spec.model, base_url, settings.api_key)


def _load_provider_entry(point: EntryPoint) -> ProviderEntry:
    entry: object = point.load()
    if not isinstance(entry, ProviderEntry):
        raise ConfigError(f"entry point {point.name} = {point.value} is not a ProviderEntry")
    return entry
