"""Measures the source: lines, functions by length, attributes per class, imports between packages and in circles.

    python tools/measure_code.py [ROOT]        # ROOT: another checkout, to compare with

Imports count if they run when a module is loaded, not those inside functions. Those for type checkers alone count as
circles of their own.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LENGTHS: Final = (10, 20, 40, 60)
NUM_LARGEST: Final = 10
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, its tree, its number of lines."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int


def read_modules(root: Path) -> list[Module]:
    """All modules of `llm_spec` and of the packages in `providers`."""
    modules: list[Module] = []
    for base, folder in ((root, "llm_spec"), (root / "providers", "llm_spec_*")):
        for path in sorted(file for found in base.glob(folder) for file in found.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
            modules.append(Module(name, path, ast.parse(text), len(text.splitlines())))
    return modules


def measure_functions(modules: Sequence[Module]) -> list[tuple[int, str]]:
    """Lines and name of each function, methods and inner functions included; the longest first."""
    found = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{module.name}:{node.name}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function)
    ]
    return sorted(found, reverse=True)


def measure_attributes(modules: Sequence[Module]) -> list[tuple[int, str]]:
    """How many attributes each class has: its annotated fields, and what its methods assign to `self`."""
    found = [
        (len(find_attributes(node)), f"{module.name}:{node.name}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    return sorted(found, reverse=True)


def find_attributes(class_: ast.ClassDef) -> set[str]:
    """The names of a class's own attributes."""
    fields = {n.target.id for n in class_.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return fields | {
        node.attr
        for node in ast.walk(class_)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def find_imports(
    modules: Sequence[Module], *, for_types: bool = False, in_functions: bool = False
) -> dict[str, set[str]]:
    """The modules of this project that each module imports when it is loaded.

    `for_types`: also for type checkers alone. `in_functions`: also when its functions are called.
    """
    names = {module.name for module in modules}
    imports: dict[str, set[str]] = {}
    for module in modules:
        found: set[str] = set()
        for node in _walk_statements(module.tree.body, for_types, in_functions):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & names
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names
                found |= inner or ({node.module} & names)
        imports[module.name] = found - {module.name}
    return imports


def _walk_statements(body: Sequence[ast.stmt], for_types: bool, in_functions: bool) -> Iterator[ast.stmt]:
    """The statements that run on import; `in_functions`: those of functions as well."""
    for node in body:
        yield node
        inner: list[ast.AST] = []
        if isinstance(node, ast.If):
            if for_types or "TYPE_CHECKING" not in ast.unparse(node.test):
                inner = [*node.body, *node.orelse]
        elif in_functions or not isinstance(node, Function):
            inner = list(ast.iter_child_nodes(node))
        statements = [
            s for part in inner for s in (part.body if isinstance(part, ast.ExceptHandler | ast.match_case) else [part])
        ]
        yield from _walk_statements([s for s in statements if isinstance(s, ast.stmt)], for_types, in_functions)


def get_package(module: str) -> str:
    """The first two parts of a name in `llm_spec` (`llm_spec.local` of `llm_spec.local.noise`), else the first."""
    return ".".join(module.split(".")[: 2 if module.startswith("llm_spec.") else 1])


def find_package_arrows(imports: Mapping[str, set[str]], packages: set[str]) -> Counter[tuple[str, str]]:
    """How many modules of a package import each other one; a module right inside `llm_spec` counts as `llm_spec`."""

    def place(module: str) -> str:
        package = get_package(module)
        return package if package in packages else "llm_spec"

    return Counter(
        (place(module), other)
        for module, found in imports.items()
        for other in {place(name) for name in found} - {place(module)}
    )


def find_circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start in imports:
        seen: set[str] = set()
        waiting = list(imports[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting.extend(imports.get(name, ()))
        reach[start] = seen
    groups = {tuple(sorted(n for n in reach[name] if name in reach[n])) for name in reach if name in reach[name]}
    return [list(group) for group in sorted(groups)]


def find_untested(root: Path, modules: Sequence[Module]) -> list[str]:
    """Modules with no test file `test_NAME.py` anywhere; `__init__` modules are left out."""
    tests = {path.stem.removeprefix("test_") for path in (root / "tests").rglob("test_*.py")}
    own = [module for module in modules if module.path.stem != "__init__"]
    return [module.name for module in own if module.path.stem.strip("_") not in tests]


def count_lines(files: Iterator[Path]) -> tuple[int, int]:
    """How many files, and how many lines in all."""
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    return len(lengths), sum(lengths)


def count_code_lines(module: Module) -> int:
    """Lines that hold code."""
    docstrings = {
        line
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = module.path.read_text(encoding="utf-8").splitlines()
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in docstrings
        for number, line in enumerate(lines, 1)
    )


def print_measurements(root: Path) -> None:
    modules = read_modules(root)
    num_tests, num_test_lines = count_lines((root / "tests").rglob("*.py"))
    print(f"source: {len(modules)} files, {sum(module.num_lines for module in modules)} lines")
    print(f"        {sum(map(count_code_lines, modules))} lines without empty ones, comments and docstrings")
    print(f"tests:  {num_tests} files, {num_test_lines} lines")
    print(f"files above 400 lines: {sum(module.num_lines > 400 for module in modules)}")

    functions = measure_functions(modules)
    counts = Counter(sum(length > most for most in LENGTHS) for length, _ in functions)
    names = [*(f"up to {most}" for most in LENGTHS), f"above {LENGTHS[-1]}"]
    shares = ", ".join(f"{name} lines: {counts[index]}" for index, name in enumerate(names))
    print(f"\n{len(functions)} functions; {shares}")
    for length, name in functions[:NUM_LARGEST]:
        print(f"  {length:>4}  {name}")

    print("\nattributes per class")
    for num_attributes, name in measure_attributes(modules)[:NUM_LARGEST]:
        print(f"  {num_attributes:>4}  {name}")

    imports = find_imports(modules)
    packages = {get_package(m.name) for m in modules if m.path.stem == "__init__"} | {"llm_spec"}
    arrows = find_package_arrows(imports, packages)
    print(f"\nimport arrows: {sum(map(len, imports.values()))} between modules, {len(arrows)} between packages")
    for (source, target), num_modules in sorted(arrows.items()):
        print(f"  {source} -> {target}  ({num_modules})")
    for name, circles in (
        ("circles on import", find_circles(imports)),
        ("circles with imports for types", find_circles(find_imports(modules, for_types=True))),
    ):
        print(f"{name}: {len(circles)}")
        for circle in circles:
            print(f"  {', '.join(circle)}")

    untested = find_untested(root, modules)
    own = [module for module in modules if module.path.stem != "__init__"]
    print(f"\nmodules with a test file of their name: {1 - len(untested) / len(own):.0%} of {len(own)}")
    print(f"  without: {', '.join(untested)}")


if __name__ == "__main__":
    print_measurements(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent.parent)
