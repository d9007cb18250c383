"""Records what whole requests do, so that a refactoring can be shown to change nothing.

    python tools/record_behaviour.py record FILE [--cases 500]
    python tools/record_behaviour.py compare FILE [OTHER] [--ignore-messages] [--renamed OLD=NEW ...]

FILE is gzipped JSON lines: one for what was recorded, then one for each case. `--cases` is the number of requests for
each strategy; a fifth of it goes to each provider that speaks HTTP, and to the models that come with the package.
`compare` records the same cases again (or reads OTHER), prints the first differences, case by case, and exits with 1
where there is one. It replaces `--renamed` words inside of strings of FILE, and leaves text for people out with
`--ignore-messages`: reasons and the messages of errors, which stand apart from the errors' kinds.

Kinds of cases, by the beginning of their names:

- `virtual`: requests that `tests/promises` draws, one strategy as often as another, by virtual clock: events and their
  times, results, errors, every call of the target, what it was billed, statistics, budgets.
- `wire`: the providers against scripted servers on 127.0.0.1, by virtual clock: every HTTP request with its headers and
  body, events and results.
- `pair`: the models that come with the package, local.

Keys are the recorder's own words. After a renaming, change what reads the objects: `behaviour/plain.py` by kind of
object, and the calls of the library in `behaviour/virtual.py`, `wire.py` and `pair.py`; the file stays as it is.

Not recorded, because it is not the same twice:

- how long local models really take, and when their events arrive in between: in its place stands a clock that only
  their forward passes move on, and the loop waits for their threads. So a local answer is never left midway.
- random bytes of the operating system (seeds, nonces): they are the same for a case each time.
- in which order the kernel hands over requests that were sent at one instant over several connections: the servers wait
  for each a moment that follows from what it says.
- of HTTP headers `Host`, which has a free port, `User-Agent` and those in which SDKs tell versions and the machine.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
_FOLDERS: Final = (ROOT, ROOT / "providers", ROOT / "tests", ROOT / "tools")
_PORT: Final = re.compile(r"(127\.0\.0\.1):\d+")
_MOST_SHOWN: Final = 20
_MOST_OF_A_CASE: Final = 4
Json = dict[str, Any]


def record(cases: Iterable[str], num_processes: int | None = None) -> dict[str, Json]:
    """What comes of the cases of these names, by name, as it is after JSON."""
    num_processes = num_processes or os.cpu_count() or 1
    names = sorted(cases)
    if num_processes == 1:
        lines = map(_record_line, names)
        return {name: json.loads(line) for name, line in lines}
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        lines = pool.imap_unordered(_record_line, names, chunksize=8)
        return {name: json.loads(line) for name, line in sorted(lines)}


def draw_names(num_requests: int) -> list[str]:
    """The names of cases that have so many requests for each strategy, and a fifth for each provider."""
    from behaviour.pair import draw_pairs
    from behaviour.virtual import draw_seeds
    from behaviour.wire import draw_wires

    names = [f"virtual {name} {seed}" for name, seeds in draw_seeds(num_requests).items() for seed in seeds]
    names += [f"wire {name} {number}" for name, number in draw_wires(max(1, num_requests // 5))]
    return names + [f"pair {name} {number}" for name, number in draw_pairs(max(1, num_requests // 5))]


def _record_line(name: str) -> tuple[str, str]:
    from behaviour.pair import record_pair
    from behaviour.virtual import record_virtual
    from behaviour.wire import record_wire

    logging.getLogger("llm_spec").addHandler(logging.NullHandler())  # nobody reads what is logged
    kind, what, number = name.split(" ")
    match kind:
        case "virtual":
            recorded = record_virtual(int(number))
        case "wire":
            recorded = record_wire(what, int(number))
        case _:
            recorded = record_pair(what, int(number))
    return name, _PORT.sub(r"\1:0", json.dumps(recorded))


# ------------------------------------------------------------------------------------------ files


def write_file(path: Path, cases: Mapping[str, Json]) -> None:
    head = {"commit": _commit(), "python": sys.version.split()[0], "num cases": len(cases)}
    lines = [json.dumps(head), *(json.dumps({"case": name} | cases[name]) for name in sorted(cases))]
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), 6, mtime=0))


def read_file(path: Path) -> tuple[Json, dict[str, Json]]:
    head, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    cases = (json.loads(line) for line in lines)
    return json.loads(head), {case.pop("case"): case for case in cases}


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)  # noqa: S607, PLW1510 - any git will do, and none
    return done.stdout.strip() or "unknown"


# ------------------------------------------------------------------------------------------ comparing


def compare(
    before: Mapping[str, Json],
    after: Mapping[str, Json],
    *,
    renamed: Mapping[str, str] | None = None,
    ignore_messages: bool = False,
) -> dict[str, list[str]]:
    """What differs, by case."""
    if renamed:
        pattern = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in renamed))
        before = {name: _renamed(case, pattern, renamed) for name, case in before.items()}
    found: dict[str, list[str]] = {}
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            found[name] = ["the case is not in " + ("the first" if name not in before else "the second")]
        elif differences := list(_differences(before[name], after[name], "", ignore_messages)):
            found[name] = differences
    return found


def _renamed(value: Any, pattern: re.Pattern[str], words: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: words[match[0]], value)
    if isinstance(value, list):
        return [_renamed(item, pattern, words) for item in value]
    if isinstance(value, dict):
        return {key: _renamed(item, pattern, words) for key, item in value.items()}
    return value


def _differences(before: Any, after: Any, path: str, ignore_messages: bool) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if ignore_messages and key == "words":
                continue
            there = f"{path} / {key}" if path else key
            if key not in before or key not in after:
                yield f"{there}: only in the {'first' if key in before else 'second'}: {_short((before | after)[key])}"
            else:
                yield from _differences(before[key], after[key], there, ignore_messages)
    elif isinstance(before, list) and isinstance(after, list):
        for index, (old, new) in enumerate(itertools.zip_longest(before, after, fillvalue=_NOTHING)):
            yield from _differences(old, new, f"{path}[{index}]", ignore_messages)
    elif before != after or type(before) is not type(after):
        yield f"{path}: {_short(before)} -> {_short(after)}"


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING: Final = _Nothing()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:110]} … {text[-40:]}"


def report(found: Mapping[str, Sequence[str]], num_cases: int) -> None:
    for name, differences in itertools.islice(found.items(), _MOST_SHOWN):
        print(name)
        for difference in differences[:_MOST_OF_A_CASE]:
            print(f"    {difference}")
        if len(differences) > _MOST_OF_A_CASE:
            print(f"    and {len(differences) - _MOST_OF_A_CASE} more")
    print(f"{len(found)} of {num_cases} cases differ")


# ------------------------------------------------------------------------------------------ what is covered


def count(cases: Mapping[str, Json]) -> dict[str, dict[str, int]]:
    """By kind of case: how many cases and requests, and in how many of these what happened."""
    from behaviour.cover import things_of

    counts: dict[str, dict[str, int]] = {}
    for name, case in cases.items():
        kind = counts.setdefault(name.rpartition(" ")[0], {"cases": 0})
        kind["cases"] += 1
        for thing in things_of(case):
            kind[thing] = kind.get(thing, 0) + 1
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--cases", type=int, default=500, help="requests for each strategy")
    comparing = commands.add_parser("compare")
    counting = commands.add_parser("count", help="what a file covers")
    for command in (recording, comparing, counting):
        command.add_argument("file", type=Path)
        command.add_argument("--processes", type=int)
    comparing.add_argument("other", type=Path, nargs="?", help="a file in place of a new recording")
    comparing.add_argument("--ignore-messages", action="store_true")
    comparing.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    given = parser.parse_args(arguments)
    if given.command == "record":
        write_file(given.file, record(draw_names(given.cases), given.processes))
        return 0
    head, before = read_file(given.file)
    if given.command == "count":
        for kind, counts in count(before).items():
            print(f"{kind}: {', '.join(f'{thing} {num}' for thing, num in counts.items())}")
        return 0
    after = record(before, given.processes) if given.other is None else read_file(given.other)[1]
    renamed = dict(item.split("=", 1) for item in given.renamed)
    found = compare(before, after, renamed=renamed, ignore_messages=given.ignore_messages)
    print(f"recorded at {head['commit']}, now {_commit()}")
    report(found, len(before))
    return 1 if found else 0


sys.path[:0] = [str(folder) for folder in _FOLDERS if str(folder) not in sys.path]

if __name__ == "__main__":
    sys.exit(main())
