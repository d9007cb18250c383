"""Do other people's benchmark clients, and a clock outside, measure what `llm-spec serve` says of itself?

    python benchmarks/client_figures.py [--answers 8] [--tokens 100] [--agreement 0.8] [--clients outside,vllm]
                                        [--strategies plain,probe] [--json FILE]

The server stands before `double_server.py` (25 ms a token, first tokens and one-token calls 45 ms) with a draft of 3 ms
a token, each in a process of its own. One client after another sends chats, streamed, one at a time:

outside   this program: a socket, the clock, and the tokens that it counts in the text
vllm      `vllm bench serve` of the vLLM that tools/peers/install.sh has installed (`--vllm`)
guidellm  `guidellm run` of the one that `tools/integrations/run.sh --install guidellm` has installed (`--guidellm`)

Beside each of a client's figures stands that of the server's Prometheus metrics over the same answers. A client that is
not installed is left out. Exits with 1 where a figure is more than 3 % off. A client sees a first token some
milliseconds later than the server (its connection, its event loop, the load of the machine), so there up to 15 ms do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from double_model import encode
from remote_speed_processes import start_server

TOLERANCE: Final = 0.03
FIRST_TOKEN_TOLERANCE_MS: Final = 15.0
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llm_spec"
TOKENIZER: Final = Path(__file__).parent.parent / "tests" / "peers" / "models" / "target"  # vLLM counts prompts with it
TARGET: Final = {"token_ms": 25.0, "call_ms": 45.0, "first_token_ms": 45.0}
DRAFT: Final = {"token_ms": 3.0, "first_token_ms": 5.0}
DRAFTED: Final = "spec_decode_num_draft_tokens_total"
ACCEPTED: Final = "spec_decode_num_accepted_tokens_total"
CLIENT_TIMEOUT_S: Final = 300.0
_SERVES_AT: Final = re.compile(r"serves at (http://\S+)")
_SAMPLE: Final = re.compile(r"^llm_spec_(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Means over some answers: times in ms, and tokens a second of a client that always waits for one."""

    num_answers: int
    first_token_ms: float
    inter_token_ms: float  # from the first token to the last, for each but the first
    request_ms: float
    output_tokens: float  # of an answer
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a client is to do. `url` has no /v1."""

    url: str
    model: str
    prompts: Sequence[str]
    tokens: int
    folder: Path


# ------------------------------------------------------------------------------------------ the server


@contextmanager
def serve_models(target_url: str, draft_url: str, strategies: Sequence[str], folder: Path) -> Generator[str]:
    """`llm-spec serve` with a model for each strategy, called as it; its address."""
    models = [
        f'[models.{name}]\ntarget = "vllm:double@{target_url}"\nstrategy = "{name}"\n'
        + ("" if name == "plain" else f'draft = "vllm:double@{draft_url}"\n')
        for name in strategies
    ]
    config = folder / "llm-spec.toml"
    config.write_text("\n".join(models), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("llm-spec")), "serve", "--config", str(config), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own
        try:
            yield _read_address(process)
        finally:
            process.terminate()
            process.communicate()


def _read_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        found = _SERVES_AT.search(line)
        if found:
            return found[1]
    raise SystemExit("llm-spec serve ended before it served")


def read_counters(setup: Setup) -> dict[str, float]:
    """The sums and counts of a model in the server's metrics."""
    time.sleep(0.1)  # answers are counted a little later
    with urllib.request.urlopen(f"{setup.url}/metrics", timeout=10) as answer:  # noqa: S310 - our own
        samples = _SAMPLE.findall(answer.read().decode())
    label = f'="{setup.model}"'
    names = ("first_text_seconds_sum", "answer_seconds_sum", "answer_seconds_count", DRAFTED, ACCEPTED)
    return {
        name: float(value)
        for name, labels, value in samples
        if label in labels and (name in names or (name == "tokens_total" and 'kind="answer"' in labels))
    }


def make_server_figures(grown: dict[str, float]) -> Figures:
    """What the server says of some answers, by how much its metrics have grown."""
    number, tokens = grown["answer_seconds_count"], grown["tokens_total"]
    first_s, answer_s = grown["first_text_seconds_sum"], grown["answer_seconds_sum"]
    return Figures(
        num_answers=int(number),
        first_token_ms=1e3 * first_s / number,
        inter_token_ms=1e3 * (answer_s - first_s) / (tokens - number),
        request_ms=1e3 * answer_s / number,
        output_tokens=tokens / number,
        tokens_per_s=tokens / answer_s,
    )


# ------------------------------------------------------------------------------------------ the clients


def run_outside(setup: Setup) -> Figures:
    """Chats by this program's own clock."""
    times = [_time_chat(setup, prompt) for prompt in setup.prompts]
    firsts, lasts, tokens = (sum(column) for column in zip(*times, strict=True))
    number = len(times)
    return Figures(
        num_answers=number,
        first_token_ms=1e3 * firsts / number,
        inter_token_ms=1e3 * (lasts - firsts) / (tokens - number),
        request_ms=1e3 * lasts / number,
        output_tokens=tokens / number,
        tokens_per_s=tokens / lasts,
    )


def _time_chat(setup: Setup, prompt: str) -> tuple[float, float, int]:
    """Seconds to the first and to the last piece of an answer, and its tokens."""
    body = {
        "model": setup.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": setup.tokens,
        "stream": True,
    }
    connection = HTTPConnection(urlsplit(setup.url).netloc, timeout=CLIENT_TIMEOUT_S)
    started, first, last, text = time.perf_counter(), 0.0, 0.0, ""
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk, elapsed = json.loads(line.removeprefix(b"data: ")), time.perf_counter() - started
        piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        if piece:
            first, last, text = first or elapsed, elapsed, text + piece
    connection.close()
    return first, last, len(encode(text))


def run_vllm(setup: Setup, program: Path) -> Figures:
    """`vllm bench serve`."""
    chats = [{"conversations": [{"value": prompt}, {"value": "An answer."}]} for prompt in setup.prompts]
    (setup.folder / "sharegpt.json").write_text(json.dumps(chats), encoding="utf-8")
    options: dict[str, object] = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "base-url": setup.url,
        "model": setup.model,
        "tokenizer": TOKENIZER,
        "dataset-name": "sharegpt",
        "dataset-path": setup.folder / "sharegpt.json",
        "sharegpt-output-len": setup.tokens,
        "num-prompts": len(setup.prompts),
        "max-concurrency": 1,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "result-dir": setup.folder,
        "result-filename": "vllm.json",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    run_client([str(program), "bench", "serve", *flags, "--save-result", "--disable-shuffle"], setup.folder)
    report = json.loads((setup.folder / "vllm.json").read_text(encoding="utf-8"))
    return Figures(
        num_answers=report["completed"],
        first_token_ms=report["mean_ttft_ms"],
        inter_token_ms=report["mean_tpot_ms"],
        request_ms=report["mean_e2el_ms"],
        output_tokens=report["total_output_tokens"] / report["completed"],
        tokens_per_s=report["output_throughput"],
    )


def run_guidellm(setup: Setup, program: Path) -> Figures:
    """`guidellm run`."""
    (setup.folder / "prompts.txt").write_text("\n".join(setup.prompts), encoding="utf-8")
    backend = {"kind": "openai_http", "target": setup.url, "model": setup.model, "max_tokens": setup.tokens}
    options = {
        "backend": json.dumps({**backend, "extras": {"body": {"temperature": 0.0}}}),
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={len(setup.prompts)}",
        "data": "kind=text_file,path=prompts.txt",
        "output": "kind=json,path=guidellm.json",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    run_client([str(program), "run", *flags, "--disable-console"], setup.folder)
    report = json.loads((setup.folder / "guidellm.json").read_text(encoding="utf-8"))
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]

    def mean(name: str) -> float:
        return metrics[name]["successful"]["mean"]

    return Figures(
        num_answers=len(benchmark["requests"]["successful"]),
        first_token_ms=mean("time_to_first_token_ms"),
        inter_token_ms=mean("inter_token_latency_ms"),
        request_ms=1e3 * mean("request_latency"),
        output_tokens=mean("output_token_count"),
        tokens_per_s=mean("output_tokens_per_second"),
    )


def run_client(command: Sequence[str], folder: Path) -> None:
    """Run a client to its end; its output is shown where it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(  # noqa: S603 - what the user named
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def choose_clients(arguments: argparse.Namespace) -> dict[str, Callable[[Setup], Figures]]:
    """The chosen clients that are installed."""
    clients: dict[str, Callable[[Setup], Figures]] = {}
    for name in arguments.clients.split(","):
        if name == "outside":
            clients[name] = run_outside
            continue
        program, run = {"vllm": (arguments.vllm, run_vllm), "guidellm": (arguments.guidellm, run_guidellm)}[name]
        if program.exists():
            clients[name] = lambda setup, run=run, program=program: run(setup, program)
        else:
            print(f"{name} is left out: there is no {program}")
    return clients


# ------------------------------------------------------------------------------------------ the program


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A client's figures and the server's of the same answers."""

    strategy: str
    client: str
    theirs: Figures
    ours: Figures
    num_drafted: int
    num_accepted: int

    @property
    def differences(self) -> dict[str, float]:
        """How far each of ours is off theirs."""
        ours = asdict(self.ours)
        return {name: ours[name] / value - 1 for name, value in asdict(self.theirs).items()}

    @property
    def different_names(self) -> set[str]:
        """The figures that do not agree."""
        names = {name for name, difference in self.differences.items() if abs(difference) > TOLERANCE}
        if abs(self.ours.first_token_ms - self.theirs.first_token_ms) <= FIRST_TOKEN_TOLERANCE_MS:
            names.discard("first_token_ms")
        return names

    def format(self) -> str:
        lines = [f"{self.strategy}, {self.client}: {self.num_accepted} of {self.num_drafted} drafted tokens accepted"]
        ours = asdict(self.ours)
        for name, value in asdict(self.theirs).items():
            off = self.differences[name]
            verdict = "  DIFFERS" if name in self.different_names else ""
            lines.append(f"  {name:16} {value:10.2f} {ours[name]:10.2f} {off:+8.2%}{verdict}")
        return "\n".join(lines)


def compare(strategy: str, client: str, run: Callable[[Setup], Figures], setup: Setup) -> Comparison:
    """Let a client measure, and read what the server says of that."""
    before = read_counters(setup)
    theirs = run(setup)
    grown = {name: value - before.get(name, 0.0) for name, value in read_counters(setup).items()}
    return Comparison(
        strategy=strategy,
        client=client,
        theirs=theirs,
        ours=make_server_figures(grown),
        num_drafted=int(grown.get(DRAFTED, 0)),
        num_accepted=int(grown.get(ACCEPTED, 0)),
    )


def make_prompts(number: int, salt: int) -> list[str]:
    return [f"Question {salt + n}: what happens next, and why?" for n in range(number)]


def measure(arguments: argparse.Namespace) -> Generator[Comparison]:
    """All clients with all strategies, by turns."""
    strategies = arguments.strategies.split(",")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target_url = stack.enter_context(start_server(answer_tokens=arguments.tokens, **TARGET))
        draft_url = stack.enter_context(
            start_server(answer_tokens=arguments.tokens, agreement=arguments.agreement, **DRAFT)
        )
        url = stack.enter_context(serve_models(target_url, draft_url, strategies, folder))
        clients = choose_clients(arguments)
        for turn, (client, strategy) in enumerate(product(clients, strategies)):
            prompts = make_prompts(arguments.answers, 1000 * turn)
            setup = Setup(url=url, model=strategy, prompts=prompts, tokens=arguments.tokens, folder=folder)
            yield compare(strategy, client, clients[client], setup)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=8, help="of a client with a strategy")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--agreement", type=float, default=0.8, help="how often the draft is right")
    parser.add_argument("--clients", default="outside,vllm,guidellm", help="with commas")
    parser.add_argument("--strategies", default="plain,probe", help="with commas")
    parser.add_argument("--vllm", type=Path, default=CACHE / "peers" / "vllm" / "bin" / "vllm")
    parser.add_argument("--guidellm", type=Path, default=CACHE / "integrations" / "guidellm" / "bin" / "guidellm")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    print(f"load {os.getloadavg()[0]:.1f}\n{'':18} {'the client':>10} {'the server':>10} {'server off':>8}", flush=True)
    comparisons: list[Comparison] = []
    for comparison in measure(arguments):
        comparisons.append(comparison)
        print(comparison.format(), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(comparison) for comparison in comparisons], indent=1))
    return 1 if any(comparison.different_names for comparison in comparisons) else 0


if __name__ == "__main__":
    sys.exit(main())
