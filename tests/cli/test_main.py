"""llm-spec: the text alone in a pipe, colours on a terminal, one JSON object, one line for each error."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from llama_onnx import build_onnx, create_random_weights
from support.hub import HubDouble
from support.serving import HANGS_S
from support.tiny_models import TINY, write_tiny_model

from llm_spec import ChatRequest, open_provider
from llm_spec.cli.main import main
from llm_spec.cli.screen import Spinner, escape_control_characters
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

PROMPT = "def test_spawnl(self):"
ALWAYS = ("--draft", "builtin:draft", "--lookahead", "4")  # drafts whatever it costs, on whatever machine
LLM_SPEC = str(Path(sys.executable).parent / "llm-spec")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_piped_output_is_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What a pipe gets is the answer, byte for byte, with and without speculation."""
    code, text, err = run(capsys, "run", PROMPT, "--max-tokens", "24")
    assert (code, err) == (0, "")
    assert text.startswith("    self.addCleanup")
    assert run(capsys, "run", PROMPT, "--max-tokens", "24", "--no-speculation")[1] == text


@pytest.mark.parametrize("draft", ["builtin:draft", "random", "lookup", "lookup+builtin:draft", "suffix+builtin:draft"])
@pytest.mark.parametrize("lookahead", ["3", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_one_seed_one_text(capsys: pytest.CaptureFixture[str], draft: str, lookahead: str) -> None:
    """A sampled answer does not depend on who drafts, or how much."""
    options = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "5", "--max-tokens", "24")
    speculative = run(capsys, "run", PROMPT, "--draft", draft, "--lookahead", lookahead, *options)
    assert speculative == run(capsys, "run", PROMPT, "--no-speculation", *options)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json writes one object with everything that was measured."""
    code, out, _ = run(capsys, "run", PROMPT, "--json", *ALWAYS, "--max-tokens", "24")
    report = json.loads(out)
    assert code == 0
    assert report["strategy"] == "tokens"
    assert report["guarantee"] == "exact"
    assert report["finish_reason"] == "length"
    assert report["stopped_by"] == "max_tokens"
    assert report["usage"]["target"]["output_tokens"] == 24
    assert report["draft_tokens"] - report["accepted_tokens"] == report["usage"]["wasted"]
    assert report["acceptance_rate"] == pytest.approx(report["accepted_tokens"] / report["draft_tokens"])
    assert sum(r["num_emitted_tokens"] for r in report["rounds"]) == 24
    assert {"num_spec_steps", "mean_acceptance_length", "acceptance_histogram"} <= report["metrics"].keys()
    assert (report["speedup"] is None) == (report["speedup_basis"] is None)
    assert {"total_s", "first_text_s", "draft_s", "verify_s"} <= report["timings"].keys()


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """--compare measures a plain run beside it and says whether the text is the same."""
    report = json.loads(run(capsys, "run", PROMPT, "--json", "--compare", "--max-tokens", "24")[1])
    assert report["same_text_as_plain"] is True
    assert report["clock_speedup"] == pytest.approx(report["plain_clock_s"] / report["timings"]["total_s"])


def test_compare_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets the answer alone; the comparison, and that the answer was cut off, are on standard error."""
    _, text, err = run(capsys, "run", PROMPT, *ALWAYS, "--max-tokens", "8", "--compare")
    assert text == run(capsys, "run", PROMPT, "--max-tokens", "8")[1]
    assert re.search(r"x (as fast as the target alone \()?by the clock", err)
    assert "\nthe answer was cut off by --max-tokens\n" in err
    assert err.endswith("; the same text\n")


def test_system_message_files_and_stop_strings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They become a system message, the rest of the user's message, and where the answer ends."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"# {name}\n", encoding="utf-8")
    files = ["--file", str(tmp_path / "a"), "--file", str(tmp_path / "b")]
    plain = ("--no-speculation", "--json", "--max-tokens", "24")
    code, out, _ = run(capsys, "run", PROMPT, *files, "--system", "brief", "--stop", "?", "--stop", "(", *plain)
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": f"{PROMPT}\n\n# a\n\n\n# b\n"}]
    result = json.loads(out)
    target = open_provider("builtin:target").capabilities.token_model
    assert target is not None
    prompt_ids = target.tokenizer.encode_chat(ChatRequest.create(messages))
    assert code == 0
    assert result["usage"]["target"]["input_tokens"] == len(prompt_ids)
    assert result["stopped_by"] == "stop_string"
    assert "(" not in result["content"]
    alone = run(capsys, "run", *files, "--max-tokens", "8")
    assert alone == run(capsys, "run", "# a\n\n\n# b\n", "--max-tokens", "8")


def test_no_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    """--no-speculation reports a plain run, without a speedup that nothing measured."""
    report = json.loads(run(capsys, "run", PROMPT, "--json", "--no-speculation", "--max-tokens", "8")[1])
    assert (report["strategy"], report["draft"], report["speedup"]) == ("plain", None, None)
    assert report["plain_reason"] == "configured"
    assert report["plain_text"]


def test_prompt_from_standard_input(capsys: pytest.CaptureFixture[str]) -> None:
    """`-` reads the prompt from standard input."""
    _, given, _ = run(capsys, "run", PROMPT, "--max-tokens", "8")
    piped = subprocess.run(
        [LLM_SPEC, "run", "-", "--max-tokens", "8"], input=PROMPT.encode(), capture_output=True, check=True
    )
    assert piped.stdout.decode() == given != ""


def test_providers(capsys: pytest.CaptureFixture[str]) -> None:
    """`providers` lists what is installed and what each can do."""
    code, out, _ = run(capsys, "providers")
    assert code == 0
    assert re.search(r"^builtin .*pair", out, re.MULTILINE)
    assert "ready" in out


def terminal(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """What a terminal shows; a dumb one, without what moves."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execve(LLM_SPEC, [LLM_SPEC, *arguments], dict(os.environ) | {"TERM": "dumb"} | (environment or {}))
    shown = b""
    while True:
        try:
            block = os.read(descriptor, 65536)
        except OSError:
            break
        if not block:
            break
        shown += block
    os.waitpid(pid, 0)
    os.close(descriptor)
    return shown.decode().replace("\r\n", "\n")


def test_terminal() -> None:
    """A terminal gets a legend, the answer with its origins in colours, and a summary."""
    shown = terminal("run", PROMPT, "--max-tokens", "24", "--compare")
    assert "\033[32mdrafted and accepted\033[0m" in shown.splitlines()[0]
    assert "the same text" in shown.splitlines()[-1]
    assert "drafted tokens accepted" in shown
    answer = re.sub(r"\033\[\d+m", "", shown)
    assert "    self.addCleanup(os_helper.unlink" in answer


def test_no_color() -> None:
    """NO_COLOR is respected."""
    assert "\033[" not in terminal("run", PROMPT, "--max-tokens", "8", environment={"NO_COLOR": "1"})


def test_control_characters_do_not_reach_the_terminal() -> None:
    """What a model writes is data: it cannot move the cursor or ring the bell."""
    assert escape_control_characters("a\033[2Jb\a\n\tc é 漢") == "a\ufffd[2Jb\ufffd\n\tc é 漢"


DOWN = "vllm:any@http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "hi", "--target", DOWN, "--draft", "lookup"],
        ["run", "hi", "--target", DOWN, "--compare"],
        ["run", "hi", "--target", DOWN, "--no-speculation", "--json"],
        ["bench", "--target", DOWN, "--prompt", "hi", "--max-tokens", "8"],
        ["plan", "--target", DOWN, "--draft", "lookup", "--measure", "hi"],
        ["serve", "--check", "--config", "{config}"],
    ],
    ids=" ".join,
)
def test_a_server_that_is_down_is_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the server; no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    config = tmp_path / "llm-spec.toml"
    config.write_text(f'[models.a]\ntarget = "{DOWN.format(port=port)}"\ndraft = "lookup"\n', encoding="utf-8")
    code, _, err = run(capsys, *(argument.format(port=port, config=config) for argument in arguments))
    assert code == 2
    assert err.startswith("llm-spec: error: ")
    assert err.count("\n") == 1
    assert f"http://127.0.0.1:{port}/v1" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rum", "hi"], "did you mean 'run'?"),
        (["serv"], "did you mean 'serve'?"),
        (["run", "hi", "--draff", "lookup"], "did you mean '--draft'?"),
        (["run", "hi", "--max-token=8", "--max_tokens", "8"], "did you mean '--max-tokens'?"),
        (["run", "hi", "--strategy", "tokns"], "did you mean 'tokens'?"),
        (["bench", "--strategy", "raice"], "did you mean 'race'?"),
        (["run", "hi", "--strategy", "xyzzy"], "choose from"),
    ],
)
def test_what_was_meant_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of commands, options and strategies."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "variable"), [("mistral", "MISTRAL_API_KEY"), ("deepseek", "DEEPSEEK_API_KEY")])
def test_the_variable_of_a_missing_key_is_named(
    name: str, variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is sent; a server of one's own needs none."""
    monkeypatch.delenv(variable, raising=False)
    code, _, err = run(capsys, "run", "hi", "--target", f"{name}:any")
    assert (code, err) == (2, f"llm-spec: error: {name} needs a key; set {variable} or give api_key\n")
    assert open_provider(f"{name}:any@http://127.0.0.1:1/v1").name == f"{name}:any"


@pytest.mark.parametrize("where", ["here", "at a server"])
async def test_interrupt(where: str) -> None:
    """Ctrl-C ends it without a traceback, and without waiting for the rest of the answer."""
    async with ScriptedModelServer("one two three", latency=ServerLatency(token_s=1e6)) as server:
        target = "builtin:target" if where == "here" else f"generic:any@{server.url}"
        process = subprocess.Popen(  # noqa: ASYNC220 - does not wait
            [LLM_SPEC, "run", "class Test:", "--target", target, "--max-tokens", "4000", "--no-speculation"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pipesize=4096,  # less than the answer: on no machine does it end before the signal comes
        )
        try:
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.read, 1)  # it is answering
            process.send_signal(signal.SIGINT)
            _, err = await asyncio.to_thread(process.communicate, timeout=HANGS_S)
        finally:
            process.kill()
        assert process.returncode == 130
        assert b"Traceback" not in err


INTERRUPTED_IMPORT = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)

import llm_spec_cli
sys.meta_path.insert(0, Interrupting())
sys.argv = ["llm-spec", "providers"]
sys.exit(llm_spec_cli.main())
"""


def test_interrupt_while_starting() -> None:
    """Ctrl-C while the package is being imported is one line."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "llm-spec: interrupted\n")


def test_interrupt_while_loading(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a model is being loaded is one line."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llm_spec.cli.run.open_provider", interrupted)
    assert run(capsys, "run", PROMPT) == (130, "", "llm-spec: interrupted\n")


class Terminal(io.StringIO):
    """Tells when enough was written."""

    def __init__(self) -> None:
        super().__init__()
        self.has_two_frames = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\r") >= 2:
            self.has_two_frames.set()
        return written


def test_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal is shown what is waited for, until it is there; a pipe is shown nothing."""
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Spinner("loading x", out) as spinner:
        assert out.has_two_frames.wait(HANGS_S)
        spinner.stop()
        shown = out.getvalue()
    assert shown == out.getvalue()
    assert shown.startswith("\r| loading x ...\r/ loading x ...")
    assert shown.endswith("\r" + " " * len("/ loading x ...") + "\r")
    pipe = io.StringIO()
    with Spinner("loading x", pipe):
        pass
    assert pipe.getvalue() == ""


def test_the_package_is_the_command() -> None:
    """`python -m llm_spec`, also where it fails."""
    for arguments in (["--version"], ["run", "--nothing"]):
        ways = [[LLM_SPEC, *arguments], [sys.executable, "-m", "llm_spec", *arguments]]
        by_name, by_package = (subprocess.run(way, capture_output=True, check=False) for way in ways)
        assert by_name.stdout + by_name.stderr
        assert (by_package.returncode, by_package.stdout, by_package.stderr) == (
            by_name.returncode,
            by_name.stdout,
            by_name.stderr,
        )


def test_spinner_says_what_is_waited_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter line leaves nothing of a longer one, and a line that stays is above the one that moves."""
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Spinner("fetching a long name", out) as spinner:
        assert out.has_two_frames.wait(HANGS_S)
        spinner.print_line("4-bit weights")
        out.has_two_frames.clear()
        spinner.change_line("loading")
        while "loading" not in out.getvalue():
            assert out.has_two_frames.wait(HANGS_S)
    rows = [row.rpartition("\r")[2] for row in out.getvalue().split("\n")]
    assert rows[0] == "4-bit weights"
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().endswith("\r" + " " * len("| loading ...") + "\r")
    pipe = io.StringIO()
    with Spinner("loading x", pipe) as spinner:
        spinner.change_line("loading y")
        spinner.print_line("4-bit weights")
    assert pipe.getvalue() == "4-bit weights\n"


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    """What a user types who has never fetched it; the answer stays alone where a pipe gets it."""
    write_tiny_model(tmp_path / "model", "concat", "q4", 0)
    files: dict[str, bytes | Path] = {path.name: path for path in (tmp_path / "model").iterdir()}
    files["onnx/model_q4.onnx"] = files.pop("model.onnx")
    arguments = ["run", "--target", "onnx:org/tiny", "--draft", "lookup", "--max-tokens", "8", PROMPT]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "cache")}
    with HubDouble({"org/tiny": files}) as hub:
        command = [LLM_SPEC, *arguments]
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=HANGS_S,
            env=environment | {"HF_ENDPOINT": hub.url},
        )
    assert ended.stderr == "org/tiny: model_q4.onnx, 0 MB\n"
    assert ended.stdout
    again = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=HANGS_S, env=environment | {"HF_HUB_OFFLINE": "1"}
    )
    assert (again.stdout, again.stderr) == (ended.stdout, ended.stderr)


def test_reader_that_goes_away() -> None:
    """`| head -c 1` ends it without a complaint."""
    command = f"{LLM_SPEC} run '{PROMPT}' --max-tokens 64 | head -c 1"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b" ", b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "nobody:x"], ["'nobody'", "builtin"]),
        (["--target", "builtin:big"], ["'big'", "builtin:target"]),
        (["--target", "onnx:/no/such/folder"], ["/no/such/folder", "does not exist"]),
        (["--target", "lookup"], ["'lookup'", "draft"]),
        (["--target", "::"], ["'::'", "provider:model"]),
        (["--draft", "onnx:"], ["onnx:/path/to/model"]),
        (["--draft", "random:x"], ["'x'"]),
        (["--lookahead", "0"], ["lookahead is 0", "32"]),
        (["--lookahead", "33"], ["lookahead is 33", "32"]),
        (["--lookahead", "-1"], ["lookahead is -1", "32"]),
        (["--lookahead", "many"], ["lookahead is 'many'"]),
        (["--max-tokens", "-5"], ["max_tokens is -5"]),
        (["--max-tokens", "0"], ["max_tokens is 0"]),
        (["--temperature", "-0.5"], ["temperature is -0.5"]),
        (["--temperature", "nan"], ["temperature is nan"]),
        (["--top-p", "0"], ["top_p is 0.0"]),
        (["--top-p", "1.5"], ["top_p is 1.5"]),
        (["--seed", "-1"], ["seed is -1"]),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    """Each is one line that names the field and the value, and exit code 2."""
    code, out, err = run(capsys, "run", PROMPT, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("llm-spec: error: ")
    assert all(word in err for word in words), err


def tiny_model(folder: Path, *, fault: float = 1.0) -> str:
    write_tiny_model(folder, "shared", "fp32", seed=0)
    weights = create_random_weights(TINY, seed=0)
    weights["model.norm.weight"] *= np.float32(fault)
    onnx.save(build_onnx(TINY, weights), folder / "model.onnx")
    return f"onnx:{folder}"


def test_a_target_that_computes_nan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A broken target is one line that names it; exit code 2."""
    target = tiny_model(tmp_path / "broken", fault=float("nan"))
    code, out, err = run(capsys, "run", PROMPT, "--target", target, "--draft", "lookup")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert target in err
    assert "NaN" in err


def test_a_draft_that_computes_nan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A broken draft changes nothing but a line on standard error."""
    draft = tiny_model(tmp_path / "broken", fault=float("nan"))
    code, out, err = run(capsys, "run", PROMPT, "--draft", draft, "--max-tokens", "12")
    assert (code, out) == run(capsys, "run", PROMPT, "--no-speculation", "--max-tokens", "12")[:2]
    assert code == 0
    assert err.count("\n") == 1
    assert "NaN" in err


def test_a_draft_of_another_vocabulary(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Refused by name when `tokens` is asked for; plain decoding otherwise."""
    draft = tiny_model(tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (token for token, token_id in vocabulary.items() if token_id in (4000, 4001))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    code, _, err = run(capsys, "run", PROMPT, "--draft", draft, "--strategy", "tokens")
    assert (code, err.count("\n")) == (2, 1)
    assert "different tokenizers" in err
    report = json.loads(run(capsys, "run", PROMPT, "--draft", draft, "--max-tokens", "4", "--json")[1])
    assert report["strategy"] == "plain"


def test_empty_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty prompt is refused before anything is loaded."""
    for prompt in ([" "], []):
        code, _, err = run(capsys, "run", *prompt)
        assert code == 2
        assert "prompt is empty" in err


def test_missing_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without onnxruntime the error holds the command that installs it."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    code, _, err = run(capsys, "run", PROMPT)
    assert code == 2
    assert "pip install 'llm-spec[onnx]'" in err
    assert err.count("\n") == 1


def test_prices_and_a_bound_in_money(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary's cost is by the prices given; the answer ends where it would cost more."""
    prices = ["--target-price", "0:1000", "--draft-price", "0:0", "--max-cost", "0.007", "--json"]
    assert main(["run", "def area(radius):", "--max-tokens", "40", *prices]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["stopped_by"], result["cost"]["draft"]) == ("budget", 0.0)
    assert main(["run", "def area(radius):", "--max-cost", "1"]) == 2
    assert "price is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--target-price", "cheap"], "IN:OUT"),
        (["--target-price", "1:2:3:4"], "IN:OUT"),
        (["--max-cost", "-1"], "max_request_cost"),
        (["--prediction", "no/such/file"], "no/such/file"),
        (["--file", "no/such/text"], "no/such/text"),
    ],
)
def test_bad_money_and_predictions(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    assert main(["run", "def area(radius):", *arguments]) == 2
    errors = capsys.readouterr().err
    assert named in errors
    assert errors.count("\n") == 1
