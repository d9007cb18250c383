"""The contract of packages that register a provider or a draft in the entry-point group `llm_spec.providers`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import TargetFeature
from llm_spec.contract.provider import LlmProvider

__all__ = ["ProviderEntry"]


@dataclass(frozen=True, kw_only=True)
class ProviderEntry:
    """What a package registers in the entry-point group `llm_spec.providers`: how to make a provider or a draft.

    `load(model, base_url)` makes it; model is "" and base_url None where the string has none. `load_with_key` takes an
    API key besides; None: it has no use for one. `requires` are import names that `install` (a command) brings.
    `names_files`: its models are files, folders or repositories, whose names may have an `@`; of every other model an
    `@` begins the address. `is_free`: a draft that asks no model. `features(model)` names what such a target has that
    strategies need: for `llm-spec plan`, which asks no server. None: not known.
    """

    load: Callable[[str, str | None], LlmProvider | DraftProvider]
    summary: str
    load_with_key: Callable[[str, str | None, str], LlmProvider | DraftProvider] | None = None
    requires: tuple[str, ...] = ()
    install: str = ""
    names_files: bool = False
    is_free: bool = False
    features: Callable[[str], Sequence[TargetFeature]] | None = None

    @property
    def missing_modules(self) -> tuple[str, ...]:
        """The modules of `requires` that are not installed."""
        return tuple(name for name in self.requires if importlib.util.find_spec(name) is None)
