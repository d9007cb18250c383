"""Providers are built on what is public: other people's can do whatever ours can."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from llm_spec import provider_kit

PROVIDERS = Path(__file__).parents[1] / "providers"
PUBLIC = re.compile(r"llm_spec|llm_spec\.provider_kit|llm_spec\.contract(\.\w+)?")
OWN_PACKAGES = re.compile(r"llm_spec_\w+(\..*)?")


def provider_files() -> list[Path]:
    return [path for path in PROVIDERS.rglob("*.py") if path.parent.name != "llm_spec_cli"]  # the command, no provider


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                found.add(module)
            case _:
                pass
    return {name for name in found if name.startswith("llm_spec") and not OWN_PACKAGES.fullmatch(name)}


@pytest.mark.parametrize("path", provider_files(), ids=lambda path: str(path.relative_to(PROVIDERS)))
def test_providers_import_public_names_only(path: Path) -> None:
    """A provider imports from `llm_spec`, `llm_spec.contract` and `llm_spec.provider_kit` alone."""
    assert {name for name in imported_modules(path) if not PUBLIC.fullmatch(name)} == set()


def test_the_providers_are_found() -> None:
    """The test above reads files, and some of them import from this library."""
    used: set[str] = set().union(*map(imported_modules, provider_files()))
    assert {"llm_spec", "llm_spec.provider_kit", "llm_spec.contract.endpoint"} <= used


@pytest.mark.parametrize("name", provider_kit.__all__)
def test_every_name_of_the_kit_is_documented(name: str) -> None:
    """The docstring of `provider_kit` has every name that it exports."""
    assert f"`{name}`" in (provider_kit.__doc__ or "")
