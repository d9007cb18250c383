"""`llm-spec bench`: from arguments to a table and files, and one line for what is wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from pathlib import Path

import pytest

from llm_spec import ChatRequest
from llm_spec.cli.bench.contenders import list_contenders
from llm_spec.cli.main import main
from llm_spec.cli.screen import ProgressBar
from llm_spec.testing import ScriptedProvider

PROMPT = "def test_spawnl(self):"


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["bench", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_builtin_pair(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As a newcomer calls it: a table, and each file says the same of the same answers."""
    paths = [tmp_path / f"report.{ending}" for ending in ("json", "csv", "html")]
    pair = ["--target", "builtin:target", "--draft", "builtin:draft", "--strategy", "auto", "--strategy", "regenerate"]
    size = ["--num-prompts", "3", "--max-tokens", "12"]
    code, out, err = bench(capsys, *pair, *size, *(text for path in paths for text in ("--output", str(path))))
    assert (code, err) == (0, "".join(f"written: {path}\n" for path in paths))
    content = json.loads(paths[0].read_text(encoding="utf-8"))
    names = ["plain", "plain again", "auto with builtin:draft", "regenerate with builtin:draft"]
    assert [contender["name"] for contender in content["contenders"]] == names
    assert all(any(line.startswith(name) for line in out.splitlines()) for name in names)
    assert len(content["answers"]) == 3 * 4
    assert {contender["texts"]["num_same"] for contender in content["contenders"]} == {3}
    auto = content["contenders"][2]
    assert auto["speculation"]["request_share"] == 1.0
    assert auto["tokens"]["accepted"] == sum(auto["speculation"]["accepted_at"]) > 0
    assert auto["tokens"]["drafted"] == sum(auto["speculation"]["drafted_at"])
    assert auto["verdict"] == "too few to tell"
    rows = list(csv.DictReader(io.StringIO(paths[1].read_text(encoding="utf-8"))))
    assert [row["text"] for row in rows] == [answer["text"] for answer in content["answers"]]
    html = paths[2].read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "auto with builtin:draft" in html


def test_sampled_texts_of_a_model_in_this_process_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """One seed, one text, with and without a draft."""
    sampling = ("--temperature", "0.8", "--seed", "3", "--max-tokens", "12")
    code, out, _ = bench(capsys, "--prompt", PROMPT, "--draft", "builtin:draft", *sampling)
    assert code == 0
    assert out.count("1 of 1") == 2
    assert "temperature 0.8" in out


def test_data_other_models_and_prices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Prompts of a file and of the command line; a contender of another name; money of both sides."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"turns": ["Say one.", "Say two."], "category": "a"}\n{"prompt": "Three."}\n', encoding="utf-8")
    report = tmp_path / "report.json"
    arguments = ["--target", "rules:big", "--contender", "other=rules:small", "--data", str(data), "--prompt", "Four."]
    prices = ["--price", "rules:big@http://any/v1=1000:2000", "--price", "rules:small=0:1000"]
    code, out, _ = bench(capsys, *arguments, *prices, "--output", str(report))
    content = json.loads(report.read_text(encoding="utf-8"))
    assert code == 0
    assert "data.jsonl" in out
    assert [len(prompt["turns"]) for prompt in content["prompts"]] == [1, 2, 1]
    plain, _, other = content["contenders"]
    assert plain["tokens"]["cost"] == pytest.approx(
        (plain["tokens"]["input"] * 1000 + plain["tokens"]["output"] * 2000) / 1e6
    )
    assert other["tokens"]["cost"] == pytest.approx(other["tokens"]["output"] * 1000 / 1e6)
    assert other["num_answers"] == 4


def test_a_contender_that_cannot_be_loaded_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are measured."""
    code, out, _ = bench(
        capsys, "--target", "rules:x", "--contender", "broken=onnx:/no/such/folder", "--prompt", "Hello"
    )
    assert code == 0
    assert "broken: left out, " in out
    assert "/no/such/folder" in out
    assert "plain again" in out


@pytest.mark.parametrize(
    ("drafts", "names"),
    [
        (["lookup", "lookup"], ["lookup"]),
        (["vllm:a/b@http://u:secret@h:1/v1", "lookup+torch:/x/y/z"], ["vllm:b", "lookup+torch:z"]),
        (["vllm:a@http://u:p@h/v1", "vllm:a@http://g/v1"], ["vllm:a@http://***@h/v1", "vllm:a@http://g/v1"]),
    ],
)
def test_names_are_short_and_clear(drafts: list[str], names: list[str]) -> None:
    """Without addresses where these tell nothing apart, and never with what is secret in them."""
    listed = list_contenders("rules:x", drafts, ["auto"], {})
    assert [spec.name for spec in listed[2:]] == [f"auto with {name}" for name in names]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "nobody:x"], ["'nobody'"]),
        (["--target", "onnx:/no/such/folder"], ["/no/such/folder"]),
        (["--draft", "nobody:x"], ["'nobody'"]),
        (["--contender", "vllm:x"], ["'vllm:x'", "NAME=SPEC"]),
        (["--contender", "a=rules:x", "--contender", "a=rules:y"], ["'a'", "twice"]),
        (["--contender", "plain=rules:x"], ["'plain'", "different names"]),
        (["--price", "rules:x"], ["'rules:x'", "SPEC=IN:OUT"]),
        (["--price", "rules:x=1"], ["IN:OUT"]),
        (["--data", "/no/such/file.jsonl"], ["/no/such/file.jsonl", "cannot be read"]),
        (["--prompt", " "], ["empty"]),
        (["--output", "report.txt"], ["report.txt", ".html"]),
        (["--repeat", "0"], ["repeat is 0"]),
        (["--concurrency", "0"], ["concurrency is 0"]),
        (["--num-prompts", "0"], ["num-prompts is 0"]),
        (["--streams", "0"], ["max_concurrent_streams is 0"]),
        (["--max-turns", "0"], ["max-turns is 0"]),
        (["--seed", "-1"], ["seed is -1"]),
        (["--max-tokens", "0"], ["max_tokens is 0"]),
        (["--temperature", "-1"], ["temperature is -1"]),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    """Each is one line that names the argument and the value, before anything is measured; exit code 2."""
    target = [] if "--target" in arguments else ["--target", "rules:x"]
    code, out, err = bench(capsys, *target, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("llm-spec: error: ")
    assert [word for word in words if word not in err] == []


def test_a_target_that_answers_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: ChatRequest) -> str:
        raise ValueError("out of order")

    monkeypatch.setattr("llm_spec.cli.bench.contenders.open_provider", lambda _: ScriptedProvider(fail))
    code, out, err = bench(capsys, "--prompt", "a")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "out of order" in err


def test_ctrl_c_reports_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table and the files of the answers so far, one line, exit code 130; the models are closed."""
    num_requests = 0

    def interrupt_at_twenty(_: ChatRequest) -> str:
        nonlocal num_requests
        num_requests += 1
        if num_requests == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return "one two three"

    opened: list[ScriptedProvider] = []

    def open_scripted(_: str) -> ScriptedProvider:
        opened.append(ScriptedProvider(interrupt_at_twenty))
        return opened[-1]

    monkeypatch.setattr("llm_spec.cli.bench.contenders.open_provider", open_scripted)
    report = tmp_path / "report.json"
    prompts = [text for number in range(30) for text in ("--prompt", f"question {number}")]
    code, out, err = bench(capsys, "--contender", "other=any:x", *prompts, "--output", str(report))
    assert code == 130
    assert err.splitlines()[-1] == "llm-spec: interrupted"
    assert "Traceback" not in err
    assert "Not finished" in out
    content = json.loads(report.read_text(encoding="utf-8"))
    assert not content["is_complete"]
    assert 0 < len(content["answers"]) < 20
    assert [provider.num_acloses for provider in opened] == [1, 1, 1]


def test_ctrl_c_before_the_first_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: ChatRequest) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "one"

    monkeypatch.setattr("llm_spec.cli.bench.contenders.open_provider", lambda _: ScriptedProvider(interrupt))
    assert bench(capsys, "--prompt", "a") == (130, "", "llm-spec: interrupted\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that is rewritten, cannot steer the terminal, and is gone at the end; a pipe is shown nothing."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    out, pipe = Terminal(), io.StringIO()
    for stream in (out, pipe):
        with ProgressBar(stream) as bar:
            bar.show_progress(0, 4, "plain")
            bar.show_progress(3, 4, f"a name\x1b[2J {'x' * 80}")
    shown = out.getvalue().split("\r")[1:]
    assert shown[0] == f"[{'.' * 24}] 0 of 4: plain"
    assert shown[1].startswith(f"[{'#' * 18}{'.' * 6}] 3 of 4, ")
    assert len(shown[1]) == 69
    assert (shown[2].strip(), shown[3]) == ("", "")
    assert "\x1b" not in out.getvalue()
    assert pipe.getvalue() == ""
