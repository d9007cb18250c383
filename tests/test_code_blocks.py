"""Every code block of README.md and docs/ runs as it stands, or is right as far as reading it can tell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest
from support.code_blocks import (
    ROOT,
    Block,
    find_fault,
    find_inline_faults,
    find_llm_spec_arguments,
    parse_llm_spec_command,
    read_blocks,
    split_commands,
)

PAGES: Final = [
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
]
BLOCKS: Final = [block for page in PAGES for block in read_blocks(page, (ROOT / page).read_text(encoding="utf-8"))]
EXTRAS: Final = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
)
MAX_S: Final = 300.0  # of a block, so that one that waits for ever is found; most take a few seconds
INCLUDED: Final = {"builtin", "lookup", "suffix"}


def name_block(block: Block) -> str:
    return block.name


@pytest.mark.parametrize("block", BLOCKS, ids=name_block)
def test_what_a_block_names_exists(block: Block) -> None:
    """Names of llm_spec and their parameters, options, extras, files, keys of configs."""
    assert find_fault(block, EXTRAS) is None


@pytest.mark.parametrize("page", PAGES)
def test_options_in_the_text_exist(page: str) -> None:
    """`llm-spec bench --draft lookup` in a sentence."""
    assert find_inline_faults((ROOT / page).read_text(encoding="utf-8")) == []


PROGRAMS: Final = [block for block in BLOCKS if block.language == "python" and block.is_run]


@pytest.mark.parametrize("block", PROGRAMS, ids=name_block)
def test_programs_run(block: Block, tmp_path: Path) -> None:
    """A Python block is a whole program, alone or with those that it continues; it ends well, without a warning."""
    run([sys.executable, "-W", "error", "-c", block.program], tmp_path)


def needs_included_models_only(block: Block) -> bool:
    """Whether a block of commands can be run here: `llm-spec` with the included models, and what installs it."""
    commands = list(split_commands(block.text)) if block.language == "sh" and block.is_run else []
    own = [arguments for words in commands if (arguments := find_llm_spec_arguments(words))]
    others = [words for words in commands if not find_llm_spec_arguments(words)]
    return (
        bool(own) and all(map(runs_included_models, own)) and all(words[:2] == ["pip", "install"] for words in others)
    )


def runs_included_models(arguments: list[str]) -> bool:
    try:
        parsed = parse_llm_spec_command(arguments)
    except ValueError:
        return False  # another test says so
    if parsed is None or parsed.command == "providers":
        return True
    if parsed.command == "plan":
        return parsed.measure is None
    if parsed.command not in {"run", "bench"}:
        return False  # a server listens until it is stopped
    drafts = parsed.draft if isinstance(parsed.draft, list) else [parsed.draft]
    contenders = [contender.partition("=")[2] for contender in getattr(parsed, "contender", [])]
    parts = [part for spec in [parsed.target, *drafts, *contenders] for part in spec.split("+")]
    return {part.partition(":")[0] for part in parts} <= INCLUDED


SCRIPTS: Final = [block for block in BLOCKS if needs_included_models_only(block)]
LLM_SPEC: Final = "import sys, llm_spec_cli; sys.argv[0] = 'llm-spec'; raise SystemExit(llm_spec_cli.main())"


@pytest.mark.parametrize("block", SCRIPTS, ids=name_block)
def test_commands_run(block: Block, tmp_path: Path) -> None:
    """As in the folder of a checkout in which everything is installed."""
    programs, checkout = tmp_path / "programs", tmp_path / "checkout"
    for folder in (programs, checkout):
        folder.mkdir()
    write_program(programs / "llm-spec", f'exec {shlex.quote(sys.executable)} -c {shlex.quote(LLM_SPEC)} "$@"')
    write_program(programs / "pip", "")
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (checkout / entry.name).symlink_to(entry)
    run(["bash", "-euc", f'PATH={shlex.quote(str(programs))}:"$PATH"\n{block.text}'], checkout)


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def run(command: list[str], folder: Path) -> str:
    """What a command printed; it must end well, in a bounded time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "providers"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=MAX_S
    )
    assert ended.returncode == 0, ended.stderr
    assert not {"Traceback", "Warning"} & set(ended.stderr.split()), ended.stderr
    return ended.stdout


def test_the_readme_shows_what_a_result_says(tmp_path: Path) -> None:
    """Its program ends with the line that counts tokens, and it can be read at one sitting."""
    first = next(block for block in PROGRAMS if block.page == "README.md")
    assert "tokens (exact)" in run([sys.executable, "-c", first.program], tmp_path)
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


# ---------------------------------------------------------------------------------------------- the test itself


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("python", "from llm_spec import Nothing\n", "llm_spec has no Nothing"),
        ("python", "import llm_spec.nothing\n", "there is no module llm_spec.nothing"),
        ("python", "from llm_spec.nothing import x\n", "there is no module llm_spec.nothing"),
        ("python", "from llm_spec.integrations.langchain import Nothing\n", "has no Nothing"),
        ("python", "from llm_spec import SpeculativeConfig\nSpeculativeConfig(sped=1)\n", "has no parameter sped"),
        ("python", "def f(:\n", "SyntaxError"),
        ("sh", "llm-spec run --sped 1\n", "--sped"),
        ("sh", "true && python -m llm_spec bensh\n", "bensh"),
        ("sh", "A=b llm-spec run \\\n  --strategy rase x  # a comment\n", "rase"),
        ("sh", "pip install '.[onnx,nothing]'\n", "there is no extra nothing"),
        ("sh", "pip install -e . -c tests/nothing.txt\n", "there is no file tests/nothing.txt"),
        ("sh", "python examples/nothing.py\n", "there is no file examples/nothing.py"),
        ("sh", "make nothing\n", "the Makefile has no nothing"),
        ("toml", "a = [\n", "TOMLDecodeError"),
        ("toml", '[models.fast]\ntarget = "builtin:target"\nsped = 1\n', "sped"),
        ("toml", '[models.fast]\ntarget = "nobody:target"\n', "nobody"),
        ("json", "{'a': 1}\n", "JSONDecodeError"),
        ("pyton", "", "not a language"),
    ],
)
def test_faults_are_found(language: str, text: str, fault: str) -> None:
    """Each kind of mistake that a page could make."""
    (block,) = read_blocks("page.md", f"<!-- not run: it is wrong -->\n```{language}\n{text}```\n")
    assert fault in (find_fault(block, EXTRAS) or "")


def test_what_is_right_is_not_a_fault() -> None:
    """Placeholders, addresses of servers, `await` outside of a function, another program's config."""
    page = (
        "```python\nfrom llm_spec import SpeculativeConfig as Config\nawait Config(seed=1).x\n```\n"
        "```sh\n# the first\nexport KEY=…; llm-spec run --target vllm:M@http://h:8000/v1 'a; # b' > out.txt  # it's\n"
        "curl -s http://host | llm-spec run - --file x\nllm-spec --help\n```\n"
        '```toml\n[model_providers.spec]\nname = "llm-spec"\n```\n'
        '```toml\n[models.fast]\ntarget = "builtin:target"\n[keys.a]\nkey = "${KEY_A}"\n```\n'
    )
    blocks = read_blocks("page.md", page)
    assert [find_fault(block, EXTRAS) for block in blocks] == [None] * 4
    assert [words[0] for words in split_commands(blocks[1].text)] == [
        "export",
        "llm-spec",
        "curl",
        "llm-spec",
        "llm-spec",
    ]


def test_blocks_are_read_as_their_notes_say() -> None:
    """A program that is continued runs once, with what continues it; a block in a list is a block."""
    page = (
        "```python\na = 1\n```\n\n<!-- continues -->\n```python\nprint(a)\n```\n"
        "- text\n  <!-- not run: no -->\n  ```python\n  b\n  ```\n```text\n```python\n```\n"
    )
    blocks = read_blocks("page.md", page)
    assert [(block.line, block.language, block.is_run) for block in blocks] == [
        (1, "python", False),
        (6, "python", True),
        (11, "python", False),
        (14, "text", True),
    ]
    assert (blocks[1].program, blocks[2].text) == ("a = 1\n\nprint(a)\n", "b\n")


def test_options_that_do_not_exist_are_found_in_the_text() -> None:
    """In backticks, also where the command is not complete."""
    text = "`llm-spec plan --target x`, `llm-spec run --sped`, `llm-spec bensh`, `llm-spec --version`, `llm-spec serve`"
    assert find_inline_faults(text) == ["run --sped", "bensh"]


@pytest.mark.parametrize(
    ("program", "message"), [("raise ValueError('told')", "told"), ("import warnings; warnings.warn('odd')", "odd")]
)
def test_programs_that_fail_are_found(program: str, message: str, tmp_path: Path) -> None:
    """An error and a warning."""
    with pytest.raises(AssertionError, match=message):
        run([sys.executable, "-W", "error", "-c", program], tmp_path)
