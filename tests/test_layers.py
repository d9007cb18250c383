"""Packages import only what lies below them, and modules do not import each other in circles.

Every import counts: those inside functions, and those for type checkers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from measure_code import Module, find_circles, find_imports, read_modules

ROOT: Final = Path(__file__).parent.parent
# From the ground up. Those of one line know nothing of each other; "" is llm_spec itself, which names what users need.
LAYERS: Final = (
    {"contract"},
    {"measure"},
    {"local"},
    {"drafting", "kit"},
    {"strategies"},
    {"decoder"},
    {""},
    {"testing"},
    {"server", "integrations"},
    {"cli"},
)
FOR_PROVIDERS: Final = {"", "contract", "measure", "local", "kit"}


def get_room(module: str) -> str:
    """The package of `llm_spec` that a module is in."""
    return [*module.split("."), ""][1]


def list_imports_upwards(modules: list[Module]) -> list[str]:
    """Imports from one package of `llm_spec` to another that is not below it."""
    floors = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}
    imports = find_imports(modules, for_types=True, in_functions=True)
    return [
        f"{module} imports {imported}"
        for module, found in sorted(imports.items())
        for imported in sorted(found)
        if module.startswith("llm_spec.") and imported.split(".")[0] == "llm_spec"
        if get_room(module) != get_room(imported) and floors[get_room(module)] <= floors[get_room(imported)]
    ]


def test_packages_import_only_what_lies_below_them() -> None:
    modules = read_modules(ROOT)
    assert len(modules) > 200
    assert list_imports_upwards(modules) == []


def test_the_root_has_packages_alone() -> None:
    """`__main__.py`, which `python -m llm_spec` needs there, is a door to the command and imports nothing else."""
    entries = (ROOT / "llm_spec").iterdir()
    found = {path.name for path in entries if path.is_file() or any(path.rglob("*.py"))}
    assert found == {"__init__.py", "__main__.py", "py.typed"} | set[str]().union(*LAYERS) - {""}
    imports = find_imports(read_modules(ROOT), for_types=True, in_functions=True)
    assert {name.split(".")[0] for name in imports["llm_spec.__main__"]} == {"llm_spec_cli"}


def test_providers_import_what_is_made_for_them() -> None:
    """Other people's providers can do whatever ours can. The command `llm-spec` is no provider."""
    imports = find_imports(read_modules(ROOT), for_types=True, in_functions=True)
    used = {
        (module, imported)
        for module, found in imports.items()
        for imported in found
        if module.startswith("llm_spec_") and not module.startswith("llm_spec_cli") and imported.startswith("llm_spec")
    }
    of_the_library = {(module, imported) for module, imported in used if imported.split(".")[0] == "llm_spec"}
    assert len(of_the_library) > 50
    assert sorted(pair for pair in of_the_library if get_room(pair[1]) not in FOR_PROVIDERS) == []


@pytest.mark.parametrize("for_types", [False, True])
@pytest.mark.parametrize("in_functions", [False, True])
def test_no_circles(for_types: bool, in_functions: bool) -> None:
    """Neither on import, nor through a function, nor for type checkers."""
    assert find_circles(find_imports(read_modules(ROOT), for_types=for_types, in_functions=in_functions)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from llm_spec.decoder.config import anything",
        "def f():\n    import llm_spec.decoder.config",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from llm_spec.decoder import config",
        "try:\n    pass\nexcept OSError:\n    from llm_spec.decoder import config",
    ],
)
def test_an_import_upwards_is_found(line: str, tmp_path: Path) -> None:
    for room in ("drafting", "decoder"):
        (tmp_path / "llm_spec" / room).mkdir(parents=True)
    (tmp_path / "llm_spec" / "decoder" / "config.py").write_text("")
    (tmp_path / "llm_spec" / "drafting" / "a.py").write_text(line)
    assert list_imports_upwards(read_modules(tmp_path)) == ["llm_spec.drafting.a imports llm_spec.decoder.config"]


def test_circles_are_found(tmp_path: Path) -> None:
    """A circle through three modules: in an `except`, in a method, for type checkers."""
    package = tmp_path / "llm_spec"
    package.mkdir()
    (package / "a.py").write_text("try:\n    pass\nexcept OSError:\n    from llm_spec import b\n")
    (package / "b.py").write_text("class B:\n    def load(self):\n        with self:\n            import llm_spec.c\n")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import llm_spec.a\n")
    modules = read_modules(tmp_path)
    assert find_circles(find_imports(modules)) == find_circles(find_imports(modules, for_types=True)) == []
    circle = [["llm_spec.a", "llm_spec.b", "llm_spec.c"]]
    assert find_circles(find_imports(modules, for_types=True, in_functions=True)) == circle
