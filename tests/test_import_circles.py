"""Modules do not import each other in circles, imports for type checkers included."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from measure_code import find_circles, find_imports, read_modules

ROOT: Final = Path(__file__).parent.parent
KNOWN: Final = [
    # for types alone: a config names a strategy, a strategy's entry its context, and a context holds a config
    ["llm_spec.decoder.config", "llm_spec.strategies.base", "llm_spec.strategies.registry"],
]


def test_no_circles_on_import() -> None:
    """No module needs, while it is loaded, one that needs it."""
    imports = find_imports(read_modules(ROOT))
    assert len(imports) > 200
    assert find_circles(imports) == []


def test_no_circles_through_functions() -> None:
    """An import inside a function hides no circle."""
    assert find_circles(find_imports(read_modules(ROOT), in_functions=True)) == []


def test_no_new_circles_of_types() -> None:
    """With the imports under `TYPE_CHECKING` there is no circle but the known ones, inside functions neither."""
    assert find_circles(find_imports(read_modules(ROOT), for_types=True, in_functions=True)) == KNOWN


def test_circles_are_found(tmp_path: Path) -> None:
    """A circle through three modules, one of whose imports is for type checkers alone, is found."""
    package = tmp_path / "llm_spec"
    package.mkdir()
    (package / "a.py").write_text("from llm_spec import b\n")
    (package / "b.py").write_text("from llm_spec.c import anything\n")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import llm_spec.a\n")
    modules = read_modules(tmp_path)
    assert find_circles(find_imports(modules)) == []
    assert find_circles(find_imports(modules, for_types=True)) == [["llm_spec.a", "llm_spec.b", "llm_spec.c"]]


def test_circles_through_functions_are_found(tmp_path: Path) -> None:
    """A circle one of whose imports is inside a method, in an `except`, is found where functions count."""
    package = tmp_path / "llm_spec"
    package.mkdir()
    (package / "a.py").write_text("try:\n    pass\nexcept OSError:\n    from llm_spec import b\n")
    (package / "b.py").write_text("class B:\n    def load(self):\n        with self:\n            import llm_spec.a\n")
    modules = read_modules(tmp_path)
    assert find_circles(find_imports(modules)) == []
    assert find_circles(find_imports(modules, in_functions=True)) == [["llm_spec.a", "llm_spec.b"]]
