"""The public surface is a tested list, and importing it is cheap."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.resources
import inspect
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import llm_spec

PUBLIC: list[str] = vars(llm_spec)["__all__"]  # type checkers read the imports instead
HEAVY = ["openai", "anthropic", "torch", "onnxruntime", "aiohttp", "tokenizers", "jinja2", "transformers", "pytest"]
HEAVY += ["llguidance", "structlog", "importlib.metadata"]  # ours to use, but not on import


def modules() -> list[str]:
    found = ["llm_spec", *(m.name for m in pkgutil.walk_packages(llm_spec.__path__, "llm_spec."))]
    return [name for name in found if not name.startswith("llm_spec.integrations.")]  # each needs its framework


@pytest.mark.parametrize("name", modules())
def test_every_all_is_sorted_and_true(name: str) -> None:
    """`__all__` is in ruff's order (constants, classes, functions), without repeats, and names what is there."""
    module: ModuleType = importlib.import_module(name)
    exported: list[str] = getattr(module, "__all__", [])
    assert exported == sorted(exported, key=isort_order)
    assert len(set(exported)) == len(exported)
    assert [member for member in exported if not hasattr(module, member)] == []


def isort_order(name: str) -> tuple[int, str]:
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("__")])
def test_every_public_class_and_function_has_a_docstring(name: str) -> None:
    """A user who asks for help on a public name gets some that was written for it."""
    member: object = getattr(llm_spec, name)
    if not (inspect.isclass(member) or inspect.isfunction(member)):
        return  # a union of types has no docstring
    text = inspect.getdoc(member) or ""
    assert len(text.split()) >= 3
    assert not text.startswith(f"{name}("), "a dataclass's generated docstring"


def test_the_public_names_are_these() -> None:
    """What users build on changes only on purpose."""
    expected = """
        AnswerDetail AnswerStarted BreakerPolicy Budget BudgetError CascadeDraft ChatMessage ChatRequest ChatResponse
        CircuitOpenError ClosedError ConcurrencyLimit ConfigError Cost CostAware DecoderStats DraftError DraftProvider
        Ewma Fallback Finish Fixed GuaranteeWeakened InvalidRequestError JudgeConfig LlmProvider LlmSpecError
        ModelOutputError Price PromptLookup ProviderDraft ReasoningDelta ReasoningDetail ReferenceDraft
        Retry RetryPolicy Round Sampling SpeculativeConfig SpeculativeDecoder SpeculativeFinish SpeculativeResult
        SpeculativeStats StreamEvent SuffixDraft SyncDecoder TargetError TextDelta Threshold Timeouts Timings
        TokenLogprob ToolCall ToolCallDelta TransientError UnsupportedError Usage __version__ open_draft open_provider
    """
    assert sorted(PUBLIC) == sorted(expected.split())


@pytest.mark.parametrize("name", ["llm_spec", "llm_spec.server"])
def test_what_is_imported_late_is_what_type_checkers_read(name: str) -> None:
    """The two lists of a lazy package name the same members of the same modules, and all of `__all__`."""
    module = importlib.import_module(name)
    read: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                read.setdefault(str(statement.module), set()).update(alias.name for alias in statement.names)
    late: dict[str, str] = vars(module)["_NAMES_BY_MODULE"]
    assert {place: set(names.split()) for place, names in late.items()} == read
    assert set().union(*read.values()) == {*module.__all__} - {"__version__"}


def test_a_package_that_imports_late_is_used_like_any_other() -> None:
    """Everything by a star, `dir` before anything was used, one error for what is not there."""
    lines = run_python("""if True:
        import llm_spec
        print(set(llm_spec.__all__) - set(dir(llm_spec)))
        from llm_spec import *
        print(SpeculativeDecoder is llm_spec.SpeculativeDecoder, open_provider.__name__)
        try:
            llm_spec.Nothing
        except AttributeError as error:
            print(error)
        """)
    assert lines.splitlines() == ["set()", "True open_provider", "module 'llm_spec' has no attribute 'Nothing'"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (
            "llm_spec.server.launcher, llm_spec.cli.serve, llm_spec.cli.main",
            "numpy aiohttp asyncio prometheus_client structlog ssl",
        ),
        (
            "llm_spec.server.supervisor",
            "logging dataclasses subprocess multiprocessing argparse llm_spec.server.config",
        ),
        ("llm_spec.decoder.decoder", "numpy"),
        ("llm_spec_http.provider, llm_spec.server.worker", "numpy structlog"),
    ],
)
def test_what_stays_in_memory_is_little(module: str, absent: str) -> None:
    """Who watches over a server's workers loads nothing of theirs; who asks a server alone needs no numpy."""
    loaded = run_python(f"import {module}, sys; print(*sys.modules)").split()
    assert [name for name in absent.split() if name in loaded] == []


@pytest.mark.parametrize("statement", ["from llm_spec import *", "import llm_spec.testing", "import llm_spec.cli.run"])
def test_importing_loads_no_sdk_and_no_model_runtime(statement: str) -> None:
    """Neither the package nor what it ships beside it loads any provider's packages."""
    code = f"import numpy, sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    loaded = run_python(code).split()
    assert [name for name in HEAVY if name in loaded] == []
    assert not any(name.startswith("llm_spec_") for name in loaded)


def test_listing_providers_loads_no_model_runtime() -> None:
    """What is installed can be listed without loading it."""
    loaded = run_python(
        "import sys, llm_spec.decoder.entry_points as registry; registry.registered_providers(); print(*sys.modules)"
    ).split()
    assert [name for name in HEAVY if name in loaded and name != "importlib.metadata"] == []


def test_the_package_says_that_it_is_typed() -> None:
    """A consumer's type checker reads our types."""
    assert [name for name in ("py.typed",) if not (importlib.resources.files("llm_spec") / name).is_file()] == []


def test_the_version_is_that_of_the_distribution() -> None:
    """`__version__` and the installed metadata agree."""
    assert importlib.metadata.version("llm-spec") == llm_spec.__version__


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
