"""The contenders: the target alone, twice, each draft with each strategy, and other models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import ConfigError, LlmSpecError, UnsupportedError, format_error_line
from llm_spec.contract.optional import copy_draft_for_new_client
from llm_spec.contract.provider import LlmProvider
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.entry_points import open_draft, open_provider, strip_credentials
from llm_spec.strategies.registry import PLAIN

__all__ = [
    "PLAIN_NAME",
    "Contender",
    "ContenderSpec",
    "format_error_without_secrets",
    "list_contenders",
    "open_contenders",
]

PLAIN_NAME: Final = "plain"
_T = TypeVar("_T", LlmProvider, DraftProvider)
# an address, or the folders of a path
_PLACE: Final = re.compile(r"@(?i:https?)://[^+]*|(?<=:)[^+@]*/")
_MAX_FAILURES: Final = 3  # in a row, until a contender is left out


@dataclass(frozen=True, kw_only=True)
class ContenderSpec:
    """A contender by the names of its parts.

    `again` is plain a second time. It shows how much noise there is.
    """

    name: str
    kind: Literal["plain", "again", "pair", "other"]
    target: str
    draft: str | None = None
    strategy: str = PLAIN.name


@dataclass
class Contender:
    """A contender with its models; `failure` says why it is left out from now on."""

    spec: ContenderSpec
    target: LlmProvider | None = None
    draft: DraftProvider | None = None
    config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    failure: str | None = None
    failures_in_a_row: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.spec.name

    def make_decoder(self) -> SpeculativeDecoder | None:
        """Return a new decoder with a fresh draft, or None if there is no target."""
        if self.target is None:
            return None
        return SpeculativeDecoder(
            target=self.target,
            draft=None if self.draft is None else copy_draft_for_new_client(self.draft),
            config=self.config,
        )

    def drop_if_failing(self, error: Exception | None) -> None:
        """Leave the contender out if it cannot work, or after several failures in a row.

        `failure` is then the first of these errors.
        """
        if error is None:
            self.failures_in_a_row.clear()
            return
        self.failures_in_a_row.append(format_error_without_secrets(error))
        if isinstance(error, (UnsupportedError, ConfigError)) or len(self.failures_in_a_row) >= _MAX_FAILURES:
            self.failure = self.failure or self.failures_in_a_row[0]


def format_error_without_secrets(error: Exception) -> str:
    """Return an error in one line, without secrets of addresses."""
    line = " ".join(str(error).split()) if isinstance(error, LlmSpecError) else format_error_line(error)
    return strip_credentials(line)


def list_contenders(
    target: str, drafts: Sequence[str], strategies: Sequence[str], others: Mapping[str, str]
) -> list[ContenderSpec]:
    """Return plain, plain again, every draft with every strategy, and the others by their names.

    Raises ConfigError if two contenders have the same name.
    """
    listed = [
        ContenderSpec(name=PLAIN_NAME, kind="plain", target=target),
        ContenderSpec(name=f"{PLAIN_NAME} again", kind="again", target=target),
    ]
    names = _shorten_draft_names(list(dict.fromkeys(drafts)))
    for draft, draft_name in names.items():
        for strategy in dict.fromkeys(strategies):
            name = f"{strategy} with {draft_name}"
            listed.append(ContenderSpec(name=name, kind="pair", target=target, draft=draft, strategy=strategy))
    listed += [ContenderSpec(name=name, kind="other", target=spec) for name, spec in others.items()]
    all_names = [spec.name for spec in listed]
    doubled = next((name for name in all_names if all_names.count(name) > 1), None)
    if doubled is not None:
        raise ConfigError(f"two contenders are called {doubled!r}; give them different names")
    return listed


def _shorten_draft_names(drafts: Sequence[str]) -> dict[str, str]:
    """Return names of drafts without addresses and folders, if the short names differ."""
    names = {draft: _PLACE.sub("", draft) for draft in drafts}
    is_clear = len(set(names.values())) == len(names)
    return names if is_clear else {draft: strip_credentials(draft) for draft in drafts}


def open_contenders(
    specs: Iterable[ContenderSpec], config: SpeculativeConfig, stack: AsyncExitStack
) -> list[Contender]:
    """Open the models, which `stack` closes; `config` applies to all, with each one's strategy.

    A contender that cannot be loaded has a `failure`. A model in this process is loaded once. Each
    contender has its own client of a server, so that none uses what another has found out. Raises
    ConfigError if a string names no model, and any error that keeps the target from being opened.
    """
    opener = _ModelOpener(stack)
    opened: list[Contender] = []
    for spec in specs:
        try:
            target = opener.open_target(spec.target)
            draft = None if spec.draft is None else opener.open_draft(spec.draft)
        except ConfigError:
            raise
        except LlmSpecError as error:
            if spec.kind == "plain":
                raise
            opened.append(Contender(spec, failure=format_error_without_secrets(error)))
        else:
            opened.append(Contender(spec, target, draft, replace(config, strategy=spec.strategy)))
    return opened


class _ModelOpener:
    """Opens each model when it is first needed."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._local: dict[str, LlmProvider] = {}
        self._drafts: dict[str, DraftProvider] = {}

    def open_target(self, spec: str) -> LlmProvider:
        if spec in self._local:
            return self._local[spec]
        provider = self._open_and_close_later(open_provider, spec)
        if provider.capabilities.token_model is not None:
            self._local[spec] = provider
        return provider

    def open_draft(self, spec: str) -> DraftProvider:
        if spec not in self._drafts:
            self._drafts[spec] = self._open_and_close_later(open_draft, spec)
        return self._drafts[spec]

    def _open_and_close_later(self, open_model: Callable[[str], _T], spec: str) -> _T:
        model = open_model(spec)
        self._stack.push_async_callback(model.aclose)
        return model
