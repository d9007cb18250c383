"""Answers of chat servers with one value exchanged, through every API of the server, against an oracle.

    python benchmarks/upstream_fuzz.py                          # 100,000 answers
    python benchmarks/upstream_fuzz.py --answers 500 --seed 3
    python benchmarks/upstream_fuzz.py --route anthropic        # through the APIs whose names have this word
    python benchmarks/upstream_fuzz.py --seed 3 --only 41       # one of them, with all that was sent and read

A double of a server (a process of its own) sends whole answers and streams of chunks. `upstream_answers.py` has them,
and what is exchanged in them: each field is left out, null, of another type, negative, huge or NaN.
`upstream_oracle.py` says what must come of it: the answer, an error, and the tokens that the budget loses. It shares no
code with the package. At least 30 % of the exchanges must be harmless, and answered in full. It ends with status 1 if
any reply is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import functools
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import aiohttp
from upstream_answers import ROUTES, Case, make_case, make_control
from upstream_double import run_double
from upstream_messages_oracle import expect_messages
from upstream_oracle import Expectation, Range, RequestSize, expect
from upstream_replies import MalformedReplyError, Reply, find_difference, read_reply

Json: TypeAlias = dict[str, Any]

HANGS_S: Final = 60.0
BUDGET: Final = 10**11
MIN_HARMLESS_SHARE: Final = 0.3
MAX_OPEN_SHARE: Final = 0.05
NUM_SPARE_KEYS: Final = 50
NUM_BETWEEN_METRICS: Final = 10
NUM_METRICS_TRIES: Final = 8
METRICS_S: Final = 0.1
MAX_SOUGHT: Final = 3  # wrong replies; of later wrong sums it is not found out to which answer they belong
MAX_CHARGE: Final = 10**6  # of an answer that is not as it is due
PATHS: Final = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}

# ------------------------------------------------------------------------------------------ requests

_SCHEMA: Final[Json] = {"type": "object", "properties": {"city": {"type": "string"}}}
_FUNCTION: Final[Json] = {"name": "get_weather", "description": "The weather.", "parameters": _SCHEMA}


def make_body(case: Case, word: str, model: str) -> bytes:
    """The request; those of a route are all of one length, so that estimates of their prompts are the same."""
    prompt, route = f"seed {case.seed:06} {word} {case.number:09}.", case.route
    body: Json = {"model": model, "stream": route.is_streamed, **route.fields}
    if route.api == "responses":
        body |= {"input": prompt, "tools": [{"type": "function", **_FUNCTION}]}
    elif route.api == "completions":
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    if route.api == "chat":
        body["tools"] = [{"type": "function", "function": _FUNCTION}]
    elif route.api == "messages":
        tool = {"name": "get_weather", "description": "The weather.", "input_schema": _SCHEMA}
        body |= {"max_tokens": 2 * BUDGET, "tools": [tool]}
    elif route.api == "completions":
        body["max_tokens"] = 2 * BUDGET
    if route.is_streamed and route.api in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


def expect_reply(case: Case, body: bytes) -> Expectation:
    """What must come of a case."""
    return _expect(case, case.answer, len(body))


@functools.cache
def expect_untouched(base: str, is_streamed: bool, has_done: bool, route: str) -> Expectation:
    """What comes of an answer in which nothing is exchanged."""
    of_route = next(each for each in ROUTES if each.name == route)
    of_base = next(each for each in of_route.bases if each.name == base)
    plain = Case(
        seed=0,
        number=0,
        route=of_route,
        base=of_base,
        is_streamed=is_streamed,
        has_done=has_done,
        is_untouched=True,
    )
    return _expect(plain, plain.answer, 500)


def _expect(case: Case, answer: Any, num_bytes: int) -> Expectation:
    size = RequestSize(text=len("seed 000000 case 000000000."), request=2 * num_bytes)
    if case.base.dialect == "messages":
        return expect_messages(
            answer, names=case.event_names, is_streamed=case.is_streamed, status=case.base.status, size=size
        )
    return expect(
        answer,
        is_streamed=case.is_streamed,
        has_done=case.has_done,
        status=case.base.status,
        num_choices=case.route.num_choices,
        size=size,
    )


def is_harmless(case: Case, expected: Expectation) -> bool:
    """Whether the whole answer must still come."""
    plain = expect_untouched(case.base.name, case.is_streamed, case.has_done, case.route.name)
    if case.is_untouched or expected.verdict != "answer" or plain.verdict != "answer":
        return False
    return _list_said(expected) == _list_said(plain)


def _list_said(expected: Expectation) -> list[tuple[str, list[tuple[str, tuple[str, ...]]]]]:
    """The text and the calls of each choice."""
    return [(choice.texts[0], [(call.name, call.arguments) for call in choice.calls]) for choice in expected.choices]


# ------------------------------------------------------------------------------------------ what became of them


@dataclass
class Difference:
    """A reply that is wrong."""

    case: Case
    what: str

    @property
    def group(self) -> str:
        """The same for those that have most likely one cause."""
        steps = [step for step in self.case.path if isinstance(step, str)]
        place = "nothing" if self.case.is_untouched else ".".join(steps) or "the whole"
        return f"{re.sub(r'[0-9]+', '0', re.split('[:{(]', self.what)[0])[:60]}; {place}"


@dataclass
class FuzzOutcome:
    """What became of all answers."""

    num_answers: int = 0
    num_harmless: int = 0
    num_touched: int = 0
    num_charges: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter[str])
    differences: list[Difference] = field(default_factory=list[Difference])

    def add(self, case: Case, expected: Expectation, got: str) -> None:
        """One more answer."""
        self.num_answers += 1
        self.num_touched += not case.is_untouched
        self.num_harmless += is_harmless(case, expected)
        self.outcomes[f"{expected.verdict} was due, {got} came"] += 1

    def count_verdict(self, verdict: str) -> int:
        """How many answers the oracle had this to say of."""
        return sum(number for name, number in self.outcomes.items() if name.startswith(verdict))

    def print(self, took_s: float, num_shown: int, *, is_sample: bool) -> bool:
        """The figures and the differences; True if nothing is wrong. `is_sample`: of all that is tried."""
        print(f"{self.num_answers} answers in {took_s:.0f} s, the charge of {self.num_charges} of them was read")
        for name, number in sorted(self.outcomes.items()):
            print(f"  {number:>7}  {name}")
        harmless = self.num_harmless / max(1, self.num_touched)
        undecided = self.count_verdict("either") / self.num_answers, self.count_verdict("open") / self.num_answers
        print(f"harmless exchanges: {harmless:.1%}; either is right: {undecided[0]:.1%}; open: {undecided[1]:.1%}")
        is_fair = not is_sample or (harmless >= MIN_HARMLESS_SHARE and undecided[1] <= MAX_OPEN_SHARE)
        if not is_fair:
            print(f"WRONG: less than {MIN_HARMLESS_SHARE:.0%} are harmless, or more than {MAX_OPEN_SHARE:.0%} open")
        groups: dict[str, list[Difference]] = collections.defaultdict(list)
        for difference in self.differences:
            groups[difference.group].append(difference)
        for name, members in sorted(groups.items(), key=lambda each: -len(each[1]))[:num_shown]:
            print(f"WRONG: {len(members)} times {name}\n    {members[0].case}\n    {members[0].what[:400]}")
        print(f"{len(self.differences)} replies are wrong, in {len(groups)} groups")
        return is_fair and not self.differences


# ------------------------------------------------------------------------------------------ the client


class Fuzzer:
    """Sends the requests of one run; a slot sends one at a time, and has a key for each route."""

    def __init__(self, session: aiohttp.ClientSession, url: str, num_slots: int) -> None:
        self._session = session
        self._url = url
        self._spare_keys = [f"spare-key-{i:04}" for i in range(NUM_SPARE_KEYS)]
        self._keys = {
            (slot, route): make_key_name(slot, route) for slot in range(num_slots) for route in range(len(ROUTES))
        }
        self._sent: dict[str, list[tuple[str, Case, Range]]] = collections.defaultdict(list)  # by key
        self._since_metrics: dict[str, list[tuple[Case, Range]]] = collections.defaultdict(list)  # by model
        self._tokens: dict[str, float] = {}  # by model
        self._num_controls = 0
        self.outcome = FuzzOutcome()
        self.last_reply = ""

    async def run(self, slot: int, numbers: Iterator[int], seed: int) -> None:
        """The requests of one slot."""
        for number in numbers:
            if not self._spare_keys:
                return  # what comes now says nothing
            await self.send(slot, make_case(seed, number))

    async def send(self, slot: int, case: Case) -> None:
        """One request, and the reply to it."""
        place = (slot, ROUTES.index(case.route))
        body = make_body(case, "case", case.route.model)
        expected = expect_reply(case, body)
        model = self._name_model(slot, case, expected)
        body = make_body(case, "case", model)
        key = self._keys[place]
        reply = await self._post(case, key, body)
        wrong = reply if isinstance(reply, str) else find_difference(case.route.api, reply, expected)
        got = "nothing readable" if isinstance(reply, str) else "an error" if reply.error else "an answer"
        self.outcome.add(case, expected, got)
        is_as_due = wrong is None and (got == "an answer") is (expected.verdict == "answer")
        charge = expected.charge if is_as_due else Range(0, MAX_CHARGE)
        if case.route.has_budget:
            self._sent[key].append((f"case {case.number}", case, charge))
        else:
            # metrics have what the target tells; a budget has an estimate of the rest
            is_told = charge.low == charge.high
            self._since_metrics[model].append((case, charge if is_told else Range(0, charge.high)))
        if wrong is not None:
            self.outcome.differences.append(Difference(case, wrong))
            await self._check_key(place, case)
        if len(self._since_metrics[model]) >= NUM_BETWEEN_METRICS:
            await self.check_metrics(slot, model)

    @staticmethod
    def _name_model(slot: int, case: Case, expected: Expectation) -> str:
        """Whole answers have models of their slot's own, those with one right charge apart from the others."""
        if case.route.has_budget:
            return case.route.model
        return name_metrics_model(slot, expected.charge.low == expected.charge.high)

    async def _post(self, case: Case, key: str, body: bytes) -> Reply | str:
        url = self._url + PATHS[case.route.api]
        headers = {"x-api-key": key, "Content-Type": "application/json", "anthropic-version": "2023-06-01"}
        try:
            async with self._session.post(url, data=body, headers=headers) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"no reply: {type(error).__name__}: {error}"
        if not case.is_control:
            self.last_reply = f"{response.status} {data.decode(errors='replace')}"
        try:
            return read_reply(case.route.api, response.status, response.content_type, data)
        except MalformedReplyError as error:
            return f"a reply that no client can read: {error}: {data[-300:]!r}"

    async def _send_control(self, slot: int, route: int, key: str) -> bool:
        """A plain request: what is left of the budget is told with it."""
        self._num_controls += 1
        case = make_control(self._num_controls * len(ROUTES) + route)
        expected = expect_untouched(case.base.name, case.is_streamed, True, case.route.name)
        model = self._name_model(slot, case, expected)
        reply = await self._post(case, key, make_body(case, "base", model))
        if case.route.has_budget:
            self._sent[key].append((f"base {case.number}", case, expected.charge))
        else:
            self._since_metrics[model].append((case, expected.charge))
        return not isinstance(reply, str) and reply.error is None

    async def _check_key(self, place: tuple[int, int], case: Case) -> None:
        """After a wrong reply the key must still be good; else another takes its place."""
        if await self._send_control(*place, self._keys[place]):
            return
        self.outcome.differences.append(Difference(case, "the key is dead since then"))
        if case.route.has_budget and self._spare_keys:
            self._keys[place] = self._spare_keys.pop()
            if not self._spare_keys:
                self.outcome.differences.append(Difference(case, f"{NUM_SPARE_KEYS} keys are dead; the run ends here"))

    async def _read_tokens(self, slot: int, model: str) -> float:
        """What a slot's own model has read and written."""
        headers = {"x-api-key": make_metrics_key(slot)}
        async with self._session.get(f"{self._url}/metrics", headers=headers) as response:
            text = await response.text()
        found = re.findall(rf'^llm_spec_tokens_total{{kind="(?:input|output)",model="{model}"}} (\S+)$', text, re.M)
        return sum(map(float, found))

    async def check_metrics(self, slot: int, model: str) -> None:
        """The charges of some whole answers together; if they are wrong, each of them once more."""
        cases, self._since_metrics[model] = self._since_metrics[model], []
        before = self._tokens.get(model, 0.0)
        due = sum((charge for _, charge in cases), Range(0, 0))
        self.outcome.num_charges += len(cases)
        for _ in range(NUM_METRICS_TRIES):
            self._tokens[model] = await self._read_tokens(slot, model)
            if self._tokens[model] - before in due:
                return
            await asyncio.sleep(METRICS_S)
        if len(cases) == 1 or len(self.outcome.differences) > MAX_SOUGHT:
            what = f"{self._tokens[model] - before:.0f} tokens are charged in place of {due.low} to {due.high}"
            what += f" for this and {len(cases) - 1} more" if len(cases) > 1 else ""
            self.outcome.differences.append(Difference(cases[0][0], what))
            return
        for case, charge in cases:
            key = self._keys[slot, ROUTES.index(case.route)]
            await self._post(case, key, make_body(case, "base" if case.is_control else "case", model))
            self._since_metrics[model] = [(case, charge)]
            await self.check_metrics(slot, model)

    async def finish(self, num_slots: int) -> None:
        """A last control for each key, and the charges of whole answers that are not read yet."""
        for slot in range(num_slots):
            for is_exact in (True, False):
                await self.check_metrics(slot, name_metrics_model(slot, is_exact))
        for (slot, route), key in self._keys.items():
            if self._sent.get(key):
                await self._send_control(slot, route, key)

    def check_charges(self, asked: dict[str, Sequence[Any]]) -> None:
        """What is left of a key's budget comes as `max_tokens` with the next request of the key."""
        for sent in self._sent.values():
            known = [each for each in sent if each[0] in asked]
            for (name, case, due), (next_name, _, _) in itertools.pairwise(known):
                before, after = asked[name][1], asked[next_name][1]
                number = case.route.num_choices
                if not isinstance(before, int) or not isinstance(after, int):
                    self.outcome.differences.append(Difference(case, "the target is asked without max_tokens"))
                    continue
                self.outcome.num_charges += 1
                charge = (before - after) * number
                if not due.low - number < charge < due.high + number:
                    what = f"{charge} tokens are charged in place of {due.low} to {due.high}"
                    self.outcome.differences.append(Difference(case, what))


def make_key_name(slot: int, route: int) -> str:
    """A key that is used for one request at a time."""
    return f"key-{slot:03}-{route:03}" if ROUTES[route].has_budget else make_metrics_key(slot)


def make_metrics_key(slot: int) -> str:
    """A key that sees the metrics of its own model alone."""
    return f"key-of-slot-{slot:03}"


def name_metrics_model(slot: int, is_exact: bool) -> str:
    """A model whose metrics are those of one slot; `is_exact`: there is one right charge for each of its answers."""
    return f"vllm-{slot}-{'exact' if is_exact else 'estimated'}"


# ------------------------------------------------------------------------------------------ the server


def write_config(upstream: str, num_slots: int) -> str:
    """Models without retries and circuit breakers, and keys."""
    lines: list[str] = ["[server]", "max_requests = 100000"]

    def add(section: str, fields: Json) -> None:
        lines.append(f"[{section}]")
        lines.extend(f"{name} = {json.dumps(value)}" for name, value in fields.items())

    of_slots = [name_metrics_model(slot, exact) for slot in range(num_slots) for exact in (True, False)]
    once = {"max_attempts": 1, "max_failures": 0}
    for kind in ("generic", "vllm", "openai", "anthropic"):
        add(f"providers.p-{kind}", {"type": kind, "base_url": f"{upstream}/v1", "api_key": "none-is-needed"})
    for kind in ("generic", "vllm", "openai", "anthropic", *of_slots):
        add(f"models.{kind}", {"target": f"p-{kind.partition('-')[0]}:m"} | once)
    budgeted = [
        make_key_name(slot, route)
        for slot in range(num_slots)
        for route in range(len(ROUTES))
        if ROUTES[route].has_budget
    ]
    for key in (*budgeted, *(f"spare-key-{i:04}" for i in range(NUM_SPARE_KEYS))):
        add(f"keys.{key}", {"key": key, "max_tokens": BUDGET})
    for slot in range(num_slots):
        add(
            f"keys.{make_metrics_key(slot)}",
            {"key": make_metrics_key(slot), "models": [name for name in of_slots if name.startswith(f"vllm-{slot}-")]},
        )
    return "\n".join(lines)


def start_server(folder: Path, plugin: Path | None) -> tuple[subprocess.Popen[bytes], str]:
    """`llm-spec serve`, and its address; `plugin` is a Python file that its processes run first."""
    program = "import sys; from llm_spec.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--config", str(folder / "server.toml")]
    environment, log = dict(os.environ), folder / "log"
    if plugin is not None:
        shutil.copy(plugin, folder / "sitecustomize.py")
        environment["PYTHONPATH"] = os.pathsep.join((str(folder), *filter(None, [environment.get("PYTHONPATH")])))
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)  # noqa: S603
    until_s = time.monotonic() + HANGS_S
    while time.monotonic() < until_s and process.poll() is None:
        found = re.search(r"serves at (\S+)", log.read_text())
        if found is not None:
            return process, found[1]
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the server did not start: {log.read_text()}")


async def fuzz(options: argparse.Namespace, url: str, upstream: str) -> FuzzOutcome:
    """Send all requests, and read the charges."""
    asked: dict[str, Sequence[Any]] = {}
    timeout = aiohttp.ClientTimeout(total=HANGS_S)
    of_routes = (number for number in itertools.count() if options.route in ROUTES[number % len(ROUTES)].name)
    numbers = itertools.islice(of_routes, options.answers) if options.only is None else iter([options.only])
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        fuzzer = Fuzzer(session, url, options.slots)
        await asyncio.gather(*(fuzzer.run(slot, numbers, options.seed) for slot in range(options.slots)))
        if options.only is not None:
            show_case(options, fuzzer)
        await fuzzer.finish(options.slots)
        async with session.get(f"{upstream}/asked") as response:
            asked |= await response.json()
    fuzzer.check_charges(asked)
    check_forms(fuzzer.outcome, asked)
    return fuzzer.outcome


def show_case(options: argparse.Namespace, fuzzer: Fuzzer) -> None:
    """All of one case."""
    case = make_case(options.seed, options.only)
    expected = expect_reply(case, make_body(case, "case", case.route.model))
    print(case)
    print(case.encode().decode())
    print(f"due: {expected}")
    print(fuzzer.last_reply)


def check_forms(outcome: FuzzOutcome, asked: dict[str, Sequence[Any]]) -> None:
    """The target must be asked as the routes say, else other answers are tried than are meant."""
    for name, (is_streamed, _) in asked.items():
        if name.startswith("base"):
            case = make_control(int(name.split()[1]))
            if case.route.streams_upstream is not is_streamed:
                outcome.differences.append(Difference(case, f"the target is asked with stream = {is_streamed}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of a single case")
    parser.add_argument("--route", default="", help="a part of the names of the routes that are tried")
    parser.add_argument("--slots", type=int, default=12, help="how many requests are sent at a time")
    parser.add_argument("--show", type=int, default=20, help="how many groups of wrong replies are printed")
    parser.add_argument("--plugin", type=Path, help="a Python file that the server runs first, to plant a fault")
    options = parser.parse_args()
    if options.only is not None:
        options.slots = 1
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    double = context.Process(target=run_double, args=(theirs,), daemon=True)
    double.start()
    upstream = f"http://127.0.0.1:{ours.recv()}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "server.toml").write_text(write_config(upstream, options.slots))
        server, url = start_server(Path(folder), options.plugin)
        began_s = time.monotonic()
        try:
            outcome = asyncio.run(fuzz(options, url, upstream))
            took_s = time.monotonic() - began_s
        finally:
            server.terminate()
            server.wait(HANGS_S)
            double.terminate()
        told = Path(folder, "log").read_text(errors="replace")
    is_right = outcome.print(took_s, options.show, is_sample=options.only is None and not options.route)
    if "Traceback" in told:
        print(f"WRONG: the server's log has {told.count('Traceback')} tracebacks, the first:")
        print(told[told.index("Traceback") :][:3000])
        is_right = False
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
