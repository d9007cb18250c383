"""The strategies, in the order in which `auto` prefers them. All that others know of a strategy is its entry.

How to add a strategy:

1. One file with `prepare_or_refuse(context)`. It gives `ReadyStrategy` (what holds for the text, and how to run), or
   `Refusal` with the reason in one sentence.
   `strategies/regenerate.py` is a short one, `examples/own_strategy.py` a toy.
2. One line: a `StrategyEntry` in `_BUILTIN` below. Another package names its entry in the entry-point group
   `llm_spec.strategies` instead; a program calls `register_strategy(entry)`.
3. One test, of what the strategy guarantees for its text.

The config, `auto`, the server, `llm-spec run` and `llm-spec plan` read the rest from the entry.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast, get_args

from llm_spec.contract.checks import suggest_name
from llm_spec.contract.endpoint import Feature, TargetFeature
from llm_spec.contract.errors import ConfigError, format_error_line
from llm_spec.contract.events import Guarantee

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext

__all__ = [
    "AUTO",
    "PLAIN",
    "REGENERATE",
    "TOKENS",
    "Prepare",
    "Simulation",
    "StrategyEntry",
    "find_strategy",
    "get_strategies_by_name",
    "list_strategy_choices",
    "load_configured_strategies",
    "register_strategy",
]

Prepare: TypeAlias = "Callable[[StrategyContext], ReadyStrategy | Refusal]"
Simulation: TypeAlias = Literal["steps", "streams", "batches", "chat", "sentences"]

AUTO: Final = "auto"
_ENTRY_POINT_GROUP: Final = "llm_spec.strategies"
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class StrategyEntry:
    """A strategy as everybody else sees it.

    prepare: the function, or where it is ("module:function"); a module is imported at its first use.
    summary: one line for people. guarantee: the strongest that it can give.
    auto: whether `auto` may choose it; it then has to be exact.
    target: with which targets it works: models in this process (`local`: it times plain steps on its way), behind a
        `server`, or `any`.
    needs: what the target has to have, the best first; one of them is enough. The first gives the strongest guarantee.
    takes_seed: whether a sampling request keeps its seed; without it such a request is answered plainly.
    reports_drafts: whether its rounds tell of all that was drafted.
    only_measures: it compares the draft with the target's own answer, and never makes that faster.
    is_read_from_scores: the text that its rounds confirm is read off scores; the target does not write it.
    reads_messages: its answers may be more than text, calls of tools and reasoning, where the server has a message
        parser; what constrained decoding holds to a form it leaves to one call.
    simulation: how `llm-spec plan` models the target: local `steps` by arithmetic, several `streams`, `batches` of
        prefixes, one `chat` request, or a chat that is shown `sentences`. None: it is not planned.
    """

    name: str
    prepare: Prepare | str
    summary: str
    guarantee: Guarantee = "exact"
    auto: bool = False
    target: Literal["any", "local", "server"] = "any"
    needs: tuple[TargetFeature, ...] = ()
    takes_seed: bool = True
    reports_drafts: bool = True
    only_measures: bool = False
    is_read_from_scores: bool = False
    reads_messages: bool = False
    simulation: Simulation | None = None

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None or self.name == AUTO:
            raise ConfigError(f"name of a strategy is {self.name!r}; it must be a lowercase word other than {AUTO!r}")
        if self.guarantee not in get_args(Guarantee):
            raise ConfigError(
                f"guarantee of strategy {self.name!r} is {self.guarantee!r};"
                f" it must be one of {', '.join(get_args(Guarantee))}"
            )
        if self.auto and self.guarantee != "exact":
            raise ConfigError(f"strategy {self.name!r} is {self.guarantee}; {AUTO!r} may choose exact ones alone")

    @property
    def is_local(self) -> bool:
        """Whether it works with models in this process alone."""
        return self.target == "local"

    @property
    def discoverable_features(self) -> tuple[Feature, ...]:
        """Those of `needs` that a server has to be asked for."""
        return tuple(cast("Feature", need) for need in self.needs if need in get_args(Feature))

    def load_prepare_function(self) -> Prepare:
        """Its function; raises ConfigError where that cannot be imported."""
        if isinstance(self.prepare, str):
            return cast("Prepare", _import_strategy(self.name, self.prepare))
        return self.prepare


PLAIN: Final = StrategyEntry(
    name="plain",
    prepare="llm_spec.strategies.plain:prepare_or_refuse",
    summary="the target alone, without speculation",
)
TOKENS: Final = StrategyEntry(
    name="tokens",
    prepare="llm_spec.strategies.tokens:prepare_or_refuse",
    summary="the draft proposes the next tokens and the target checks all of them in one step",
    auto=True,
    target="local",
    needs=("token_model",),
    simulation="steps",
)
REGENERATE: Final = StrategyEntry(
    name="regenerate",
    prepare="llm_spec.strategies.regenerate:prepare_or_refuse",
    summary="the target answers alone, and the draft is only compared, to measure it",
    only_measures=True,
)
_BUILTIN: Final = (
    PLAIN,
    TOKENS,
    StrategyEntry(
        name="race",
        prepare="llm_spec.strategies.race.race:prepare_or_refuse",
        summary="more requests to the target start at later points of the drafted answer",
        auto=True,
        target="server",
        needs=("token_endpoint", "continue_prefix"),
        reads_messages=True,
        simulation="streams",
    ),
    StrategyEntry(
        name="probe",
        prepare="llm_spec.strategies.rows.probe:prepare_or_refuse",
        summary="one request to the target checks several tokens of the draft",
        auto=True,
        target="server",
        needs=("token_endpoint",),
        takes_seed=False,
        simulation="batches",
    ),
    StrategyEntry(
        name="score",
        prepare="llm_spec.strategies.rows.score:prepare_or_refuse",
        summary="one request to the target scores the draft's tokens, and its own tokens are read from the scores",
        target="server",
        needs=("token_scorer",),
        is_read_from_scores=True,
    ),
    StrategyEntry(
        name="predict",
        prepare="llm_spec.strategies.predict:prepare_or_refuse",
        summary="the request carries the draft's answer as a predicted output",
        auto=True,
        target="server",
        needs=("prediction",),
        reports_drafts=False,
        simulation="chat",
    ),
    StrategyEntry(
        name="judge",
        prepare="llm_spec.strategies.judge:prepare_or_refuse",
        summary="the target reads the draft's answer and keeps what is right; the text may not be its own",
        guarantee="judged",
        simulation="sentences",
    ),
    REGENERATE,
)
_registered: Final[dict[str, StrategyEntry]] = {entry.name: entry for entry in _BUILTIN}


def register_strategy(entry: StrategyEntry) -> None:
    """Add a strategy to this process; raises ConfigError for a name that another one has."""
    if _registered.get(entry.name, entry) != entry:
        raise ConfigError(f"strategy {entry.name!r} is registered already; give the new one another name")
    _registered[entry.name] = entry


def find_strategy(name: str) -> StrategyEntry:
    """The strategy of that name; raises ConfigError where there is none, or its package registers it wrongly."""
    for entry in _registered.values():  # without a look at packages, which is slow; none can take such a name
        if entry.name == name:
            return entry
    points = [point for point in _scan_strategy_entry_points() if point.name == name]
    if not points:
        choices = list_strategy_choices()
        meant = suggest_name(name, choices)
        raise ConfigError(f"strategy is {name!r}; it must be one of {', '.join(choices)}{meant}")
    return _load_strategy_entry(points)


def get_strategies_by_name() -> Mapping[str, StrategyEntry]:
    """All strategies by name, in order; imports the packages that add some, and raises as `find_strategy`."""
    added = {point.name: find_strategy(point.name) for point in _scan_strategy_entry_points()}
    for name in sorted(_registered.keys() & added.keys()):
        places = [point.value for point in _scan_strategy_entry_points() if point.name == name]
        raise ConfigError(f"strategy {name!r} is registered already, and again by {places[0]}; uninstall that package")
    return _registered | added


def load_configured_strategies(name: str, *, is_local: bool) -> None:
    """Import what a config's strategy needs, so that no request waits for it; those of other packages for `auto` alone.

    Raises ConfigError where a package registers a strategy wrongly, or one cannot be imported.
    """
    if name == AUTO:
        strategies = [strategy for strategy in get_strategies_by_name().values() if strategy.auto]
    else:
        strategies = [strategy for strategy in _registered.values() if strategy.name == name]
    for strategy in strategies:
        if strategy.is_local == is_local:
            strategy.load_prepare_function()


def list_strategy_choices() -> tuple[str, ...]:
    """What a config may name: `auto` and all strategies. Imports no package that adds one."""
    return tuple(dict.fromkeys((AUTO, *_registered, *(point.name for point in _scan_strategy_entry_points()))))


@cache
def _scan_strategy_entry_points() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # slow: only where somebody asks for more than what comes with us

    return tuple(sorted(entry_points(group=_ENTRY_POINT_GROUP), key=lambda point: point.name))


def _load_strategy_entry(points: Sequence[EntryPoint]) -> StrategyEntry:
    """The entry that one package registers under one name."""
    name, places = points[0].name, sorted({point.value for point in points})
    if len(places) > 1:
        raise ConfigError(f"strategy {name!r} is registered by {' and '.join(places)}; uninstall one of the packages")
    entry = _import_strategy(name, places[0])
    if not isinstance(entry, StrategyEntry) or entry.name != name:
        raise ConfigError(f"entry point {name} = {places[0]} is not a StrategyEntry of that name")
    return entry


def _import_strategy(name: str, import_path: str) -> object:
    """What `import_path` names ("module:attribute"); whatever goes wrong in somebody's module becomes a ConfigError."""
    module, _, attribute = import_path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"strategy {name!r} cannot be loaded from {import_path}: {format_error_line(error)}"
        ) from error
