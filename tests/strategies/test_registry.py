"""The registry of strategies: who may add one, what reads it, and that nobody else knows them by name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final, get_args

import pytest

from llm_spec import ConfigError, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, UnsupportedError
from llm_spec.cli.main import main
from llm_spec.decoder.config import BuiltinStrategyName
from llm_spec.server.config import ModelConfig
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, TextGuarantee
from llm_spec.strategies.registry import (
    AUTO,
    StrategyEntry,
    find_strategy,
    get_strategies_by_name,
    list_strategy_choices,
    register_strategy,
)
from llm_spec.testing import ScriptedProvider

ROOT: Final = Path(__file__).parent.parent.parent
NAMES: Final = tuple(get_strategies_by_name())


def prepare(context: StrategyContext) -> ReadyStrategy | Refusal:
    """The target's own stream, for requests without a length."""
    if context.request.max_tokens is not None:
        return Refusal("the request sets max_tokens")
    return ReadyStrategy(TextGuarantee("exact", same_text=True), partial(context.target.stream, context.request))


MINE: Final = StrategyEntry(name="mine", prepare=prepare, summary="for tests")
WRONG: Final = "not an entry"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr("llm_spec.strategies.registry._registered", dict(get_strategies_by_name()))


def install(monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    """Let packages register these, name by name; `name_2` is another package's `name`."""
    points = tuple(
        EntryPoint(name.removesuffix("_2"), place, "llm_spec.strategies") for name, place in sorted(places.items())
    )
    monkeypatch.setattr("llm_spec.strategies.registry._scan_strategy_entry_points", lambda: points)


# --------------------------------------------------------------------------------------------- adding one


@pytest.mark.parametrize("how", ["entry point", "program"])
async def test_a_strategy_of_ones_own_is_used_by_its_name(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The config takes its name; it answers, or its refusal is the error; the server and the command line offer it."""
    if how == "program":
        register_strategy(MINE)
    else:
        install(monkeypatch, mine=f"{__name__}:MINE")
    config = SpeculativeConfig(strategy="mine", baseline_every=0)
    decoder = SpeculativeDecoder(target=ScriptedProvider("an answer"), draft=ReferenceDraft("no"), config=config)
    result = await decoder.decode("tell")
    assert (result.content, result.strategy, result.guarantee, result.same_text) == ("an answer", "mine", "exact", True)
    with pytest.raises(UnsupportedError, match="strategy 'mine' cannot be used: the request sets max_tokens"):
        await decoder.decode("tell", max_tokens=4)
    assert list_strategy_choices() == (AUTO, *NAMES, "mine")
    assert "mine" in ModelConfig(target="t").allowed_strategies


@pytest.mark.parametrize(("is_auto", "expected"), [(True, "mine"), (False, "plain")])
async def test_auto_takes_those_that_say_so(is_auto: bool, expected: str) -> None:
    """Once the target's own speed is known."""
    register_strategy(replace(MINE, auto=is_auto))
    decoder = SpeculativeDecoder(target=ScriptedProvider("an answer of a few words"), draft=ReferenceDraft("no"))
    used = [(await decoder.decode("tell")).strategy for _ in range(3)]
    assert used[0] == "plain"
    assert used[-1] == expected


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ({"mine": "no_such_module:MINE"}, "strategy 'mine' cannot be loaded from no_such_module:MINE: ModuleNotFound"),
        ({"mine": f"{__name__}:WRONG"}, f"entry point mine = {__name__}:WRONG is not a StrategyEntry of that name"),
        ({"other": f"{__name__}:MINE"}, f"entry point other = {__name__}:MINE is not a StrategyEntry of that name"),
        ({"mine": f"{__name__}:MINE", "mine_2": "b:MINE"}, f"'mine' is registered by b:MINE and {__name__}:MINE"),
    ],
)
def test_a_wrong_entry_point_is_an_error_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, places: dict[str, str], reason: str
) -> None:
    """By its name, or by `auto`, which asks for all; other strategies do not mind."""
    install(monkeypatch, **places)
    (name, *_) = places
    SpeculativeConfig(strategy="race")
    config = SpeculativeConfig()
    for ask in (
        partial(find_strategy, name),
        partial(SpeculativeConfig, strategy=name),
        partial(SpeculativeDecoder, target=ScriptedProvider("x"), draft=ReferenceDraft("x"), config=config),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)


def test_no_package_takes_the_name_of_another_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by an entry point nor in a program; the same entry may be registered twice."""
    register_strategy(MINE)
    register_strategy(MINE)
    with pytest.raises(ConfigError, match="'mine' is registered already"):
        register_strategy(replace(MINE, summary="another"))
    with pytest.raises(ConfigError, match="'race' is registered already"):
        register_strategy(replace(MINE, name="race"))
    install(monkeypatch, race=f"{__name__}:MINE")
    assert find_strategy("race").name == "race"
    with pytest.raises(ConfigError, match=f"'race' is registered already, and again by {__name__}:MINE"):
        get_strategies_by_name()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": AUTO}, "'auto'"),
        ({"name": "Two Words"}, "'Two Words'"),
        ({"guarantee": "perfect"}, "'perfect'"),
        ({"guarantee": "judged", "auto": True}, "'mine' is judged"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    """When it is made."""
    with pytest.raises(ConfigError, match=reason):
        replace(MINE, **changes)


def test_a_function_that_is_not_there_is_named() -> None:
    """The entry's own module is imported late, too."""
    register_strategy(replace(MINE, prepare="no_such_module:prepare"))
    with pytest.raises(ConfigError, match="strategy 'mine' cannot be loaded from no_such_module:prepare"):
        find_strategy("mine").load_prepare_function()


# ------------------------------------------------------------------------------------------ who reads it


def test_editors_offer_what_there_is() -> None:
    """The literal type is the registry's names."""
    assert {AUTO, *NAMES} == set(get_args(BuiltinStrategyName))


def test_every_strategy_has_its_row_in_the_docs() -> None:
    """Of the README's table, or of one in docs/."""
    pages = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert [name for name in NAMES if not re.search(rf"^\| `{name}` \|", pages, re.MULTILINE)] == []


def test_the_command_line_offers_them(capsys: pytest.CaptureFixture[str]) -> None:
    """`llm-spec run --strategy`."""
    with pytest.raises(SystemExit):
        main(["run", "--strategy", "magic"])
    named = re.findall(r"[a-z_]+", capsys.readouterr().err.rpartition("choose from")[2])
    assert named == list(list_strategy_choices())


# Words that are also names of strategies; none of these places means a strategy.
OTHER_MEANINGS: Final = {
    ("events.py", "plain"): "an origin of text",
    ("detokenizing.py", "plain"): "an origin of text",
    ("openai_chat.py", "plain"): "an origin of text",
    ("loop.py", "plain"): "an origin of text",
    ("record.py", "plain"): "an origin of text",
    ("screen.py", "plain"): "an origin of text",
    ("chat_completions.py", "plain"): "an origin of text",
    ("emit.py", "plain"): "an origin of text",
    ("logprobs.py", "tokens"): "a field of completions",
    ("openai_logprobs.py", "tokens"): "a field of completions",
    ("contenders.py", "plain"): "a kind of contender",
    ("figures.py", "plain"): "a kind of contender",
    ("report_tables.py", "plain"): "a kind of contender",
    ("fields.py", "plain"): "what a field of a request means at a server",
    ("app.py", "tokens"): "a field of a server",
    ("replies.py", "tokens"): "a field of a server",
    ("rules.py", "tokens"): "a field of a server",
    ("vllm.py", "tokens"): "a field of a server",
    ("llamacpp.py", "tokens"): "a field of a server",
    ("result.py", "tokens"): "a row of a notebook's table",
    ("clients.py", "tokens"): "a field of a key's budget",
}


def test_nobody_else_knows_strategies_by_name() -> None:
    """Outside of `strategies/` and the config's type there is no such name in a string: others read the entries."""
    found: Counter[tuple[str, str]] = Counter()
    for path in [*(ROOT / "llm_spec").rglob("*.py"), *(ROOT / "providers").rglob("*.py")]:
        if "strategies" in path.parts or path == ROOT / "llm_spec" / "decoder" / "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and node.value in NAMES:
                found[path.name, str(node.value)] += 1
    assert found.keys() - OTHER_MEANINGS.keys() == set()
