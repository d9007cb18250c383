"""The code blocks of Markdown pages, and what is wrong with one without running it.

A comment on the line above a fence says what a reader cannot see: `<!-- not run: reason -->`, or
`<!-- continues -->` for a program that goes on where the page's block before it ended.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import re
import shlex
import tempfile
import textwrap
import tomllib
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llm_spec.cli.arguments import build_argument_parser
from llm_spec.contract.errors import ConfigError
from llm_spec.server.config import load_config

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

__all__ = [
    "ROOT",
    "Block",
    "find_fault",
    "find_inline_faults",
    "find_llm_spec_arguments",
    "parse_llm_spec_command",
    "read_blocks",
    "split_commands",
]

ROOT: Final = Path(__file__).parents[2]
_FENCE: Final = re.compile(
    r"(?:^[ ]*<!-- (?P<note>continues|not run: .+?) -->\n)?"
    r"^(?P<indent>[ ]*)(?P<fence>```+|~~~+)(?P<language>[\w-]*).*\n(?P<text>(?:.*\n)*?)^[ ]*(?P=fence)[ ]*$",
    re.MULTILINE,
)
_SERVER_TABLES: Final = {"server", "providers", "models", "keys"}
_QUOTED_OR_COMMENT: Final = re.compile(
    r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?:(?<=\s)|^)#[^\n]*""", re.MULTILINE | re.DOTALL
)
_SEPARATOR: Final = re.compile(r"[;&|\n]+")


@dataclass(frozen=True)
class Block:
    """One fence of a page. `program`: its text, after those that it continues."""

    page: str
    line: int
    language: str
    text: str
    program: str = ""
    is_run: bool = True

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: str, markdown: str) -> list[Block]:
    """The blocks of a page; one that others continue is run with the last of them."""
    blocks: list[Block] = []
    for match in _FENCE.finditer(markdown):
        text = textwrap.dedent(match["text"])
        note = match["note"] or ""
        program = text
        if note == "continues":
            before = next(block for block in reversed(blocks) if block.language == match["language"])
            program = f"{before.program}\n{text}"
            blocks[blocks.index(before)] = _leave_out(before)
        line = markdown.count("\n", 0, match.start("indent")) + 1
        blocks.append(Block(page, line, match["language"], text, program, not note.startswith("not run")))
    return blocks


def _leave_out(block: Block) -> Block:
    return Block(block.page, block.line, block.language, block.text, block.program, is_run=False)


def find_fault(block: Block, extras: set[str]) -> str | None:
    """What is wrong with a block, as far as reading it can tell; None if nothing."""
    try:
        match block.language:
            case "python":
                _check_python(block.program)
            case "sh":
                for command in split_commands(block.text):
                    _check_command(command, extras)
            case "toml":
                _check_toml(block.text)
            case "json":
                json.loads(block.text)
            case "jsonl":
                for line in block.text.splitlines():
                    json.loads(line)
            case "text" | "html" | "diff" | "yaml" | "markdown" | "":
                pass
            case other:
                return f"{other} is not a language that this test knows"
    except (SyntaxError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# ---------------------------------------------------------------------------------------------- Python


def _check_python(program: str) -> None:
    """It compiles, also with `await` outside of a function, and what it takes from llm_spec is there."""
    compile(program, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    tree = ast.parse(program)
    imported: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("llm_spec"):
            for alias in node.names:
                imported[alias.asname or alias.name] = _find_member(str(node.module), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0].startswith("llm_spec") and not importlib.util.find_spec(alias.name):
                    raise LookupError(f"there is no module {alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            _check_keywords(node, imported.get(node.func.id))


def _find_member(module: str, name: str) -> object:
    """A name of a module; of an adapter, whose framework is not installed here, only whether its source has it."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    if module.startswith("llm_spec.integrations."):
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        if name not in {word.value for word in ast.walk(tree) if isinstance(word, ast.Constant)}:  # of its `__all__`
            raise LookupError(f"{module} has no {name}")
        return None
    try:
        return getattr(import_module(module), name)
    except AttributeError:
        raise LookupError(f"{module} has no {name}") from None


def _check_keywords(call: ast.Call, called: Any) -> None:
    """A class or function of llm_spec has the parameters that a call names."""
    if not callable(called):
        return
    parameters = inspect.signature(called).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = {parameter.name for parameter in parameters}
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in names:
            raise LookupError(f"{ast.unparse(call.func)} has no parameter {keyword.arg}")


# ---------------------------------------------------------------------------------------------- commands


def split_commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, without redirections and variables set before it."""
    # comments go first: a quote in one is none, and the lexer would take their line's end with them
    without_comments = _QUOTED_OR_COMMENT.sub(lambda match: match[1] or "", text.replace("\\\n", " "))
    lexer = shlex.shlex(without_comments, posix=True, punctuation_chars=";&|<>\n")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    is_redirected = False
    for word in [*lexer, "\n"]:
        if _SEPARATOR.fullmatch(word):
            if words:
                yield words
            words = []
        elif set(word) <= {"<", ">"}:
            is_redirected = True
        elif is_redirected:
            is_redirected = False
        elif words or not re.match(r"\w+=", word):
            words.append(word)


def _check_command(words: list[str], extras: set[str]) -> None:
    """Options, extras, targets of make and files that a command names exist."""
    if arguments := find_llm_spec_arguments(words):
        parse_llm_spec_command(arguments)
    elif words[:2] == ["pip", "install"] or words[1:4] == ["-m", "pip", "install"]:
        for word in words:
            found = re.fullmatch(r"(?:\.|llm-spec)\[([\w,-]+)\]", word)
            unknown = set(found[1].split(",")) - extras if found else set[str]()
            if unknown:
                raise LookupError(f"{word}: there is no extra {', '.join(sorted(unknown))}")
        _check_files(words, after={"-c", "-r"})
    elif words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        if unknown := set(words[1:]) - targets:
            raise LookupError(f"the Makefile has no {', '.join(sorted(unknown))}")
    elif words[0] in {"python", "python3"}:
        _check_files(words, after={words[0]})


def _check_files(words: list[str], after: set[str]) -> None:
    for option, word in pairwise(words):
        if option in after and not word.startswith("-") and not (ROOT / word).exists():
            raise LookupError(f"there is no file {word}")


def find_llm_spec_arguments(words: list[str]) -> list[str]:
    if words[0] == "llm-spec":
        return words[1:]
    return words[3:] if words[1:3] == ["-m", "llm_spec"] else []


def parse_llm_spec_command(arguments: list[str]) -> argparse.Namespace | None:
    """Parse arguments as the command line does; None if they only ask for help. Raises ValueError with its error."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            return build_argument_parser().parse_args(arguments)
    except SystemExit as ended:
        if ended.code:
            raise ValueError(printed.getvalue().strip().rpartition("\n")[2]) from None
        return None


def find_inline_faults(markdown: str) -> list[str]:
    """The commands in backticks whose command or options `llm-spec` does not have; they may be incomplete."""
    parser = build_argument_parser()
    commands: dict[str, Any] = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    options = {name: commands[name]._option_string_actions.keys() for name in commands}
    faults: list[str] = []
    for code in re.findall(r"`llm-spec ([^`]+)`", _FENCE.sub("", markdown)):
        name, *words = code.split()
        is_known = name in options or not name.isalpha()
        if not is_known or {word.partition("=")[0] for word in words if re.match(r"--\w", word)} - {
            *options.get(name, words)
        }:
            faults.append(code)
    return faults


# ---------------------------------------------------------------------------------------------- configs


def _check_toml(text: str) -> None:
    """Valid TOML, and if it is a config of `llm-spec serve`, one that the server accepts."""
    table = tomllib.loads(text)
    if not table.keys() & _SERVER_TABLES:
        return
    variables = {name: f"value-of-{name}" for name in re.findall(r"\$\{(\w+)\}", text)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llm-spec.toml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path, variables)
        except ConfigError as error:
            raise ValueError(str(error)) from None
