"""The entry by which a package registers a provider or a draft.

Packages register entries in the entry-point group `llm_spec.providers`.
"""

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
    """Tells how to make a provider or a draft.

    A package registers it in the entry-point group `llm_spec.providers`.

    `load`: makes it from `model` and `base_url`. If the string has no such part, `model` is "" and
    `base_url` is None.
    `load_with_key`: the same with an API key, or None if a key has no use.
    `requires`: names of the modules that the command `install` installs.
    `names_files`: the models are files, folders or repositories, whose names may have an `@`. In
    the name of any other model an `@` begins the address.
    `is_free`: a draft that calls no model.
    `features`: returns the features that a target of this model has for strategies, or None if
    unknown. `llm-spec plan` uses it, since it calls no server.
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
