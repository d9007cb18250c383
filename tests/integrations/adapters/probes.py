"""What one row of the table asks of an adapter, and what came of it: for the user, and at the server.

An adapter's file has one `ask`, which does with the framework what its users do, by its own model or by ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias

from pydantic import BaseModel

from .scripted_server import Reply, ScriptedServer

__all__ = [
    "EARLIER",
    "IMAGE",
    "LATER_SYSTEM",
    "PDF",
    "QUESTION",
    "TEXT_FILE",
    "Adapter",
    "FileKind",
    "Json",
    "NotApplicableError",
    "Place",
    "Scenario",
    "Seen",
    "record_run",
]

Json: TypeAlias = dict[str, Any]
FileKind: TypeAlias = Literal["image", "PDF", "text"]
QUESTION: Final = "Weather in Rome?"
EARLIER: Final = ("Hello", "Hi, what can I do?")
LATER_SYSTEM: Final = "From here on, answer in Latin."
IMAGE: Final = b"\x89PNG\r\n\x1a\n" + b"\0" * 16
PDF: Final = b"%PDF-1.4\n%%EOF\n"
TEXT_FILE: Final = b"the text of the file"


class Place(BaseModel):
    """A place."""

    name: str
    size: int = 3  # a strict schema needs it to be required


class NotApplicableError(Exception):
    """The framework has no such thing; the message says what it has, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A question, how it is put, and what the server says."""

    replies: Sequence[Reply]
    dialect: Literal["generic", "openai", "anthropic"] = "generic"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # by the names of chat completions
    uses_tools: bool = False
    tool_choice: str | None = None  # "auto", "none", "required", or the tool's name
    strict_tools: bool = False
    output: Literal["schema", "strict schema", "tool", "schema and tools"] | None = None
    file: FileKind | None = None
    marks_cache: bool = False
    later_system: bool = False
    asks_again: bool = False  # the answer goes back with another question
    timeout_s: float | None = None
    max_retries: int | None = 0


@dataclass
class Seen:
    """What the user has in hand, and the server that was asked."""

    server: ScriptedServer
    text: str = ""
    reasoning: str = ""
    runs: list[Json] = field(default_factory=list[Json])  # of the tool, by its arguments
    refusal: str | None = None
    finish_reason: str | None = None
    usage: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    cost: float | None = None
    response_id: str | None = None
    model_name: str | None = None
    logprobs: Sequence[float] = ()
    figures: Mapping[str, Any] | None = None
    structured: Any = None
    num_pieces: int = 0
    error: BaseException | None = None
    warnings: Sequence[str] = ()

    @property
    def bodies(self) -> list[Json]:
        return self.server.bodies

    @property
    def last_messages(self) -> list[Json]:
        return self.bodies[-1]["messages"]

    @property
    def assistant_message(self) -> Json:
        """The last message of the assistant that was sent."""
        return [message for message in self.last_messages if message["role"] == "assistant"][-1]


class Adapter(Protocol):
    """One adapter, driven by what its framework's users write; `own` means the framework's own model for OpenAI.

    What goes wrong is raised; `seen` keeps what came before.
    """

    name: str
    error_packages: Sequence[str]  # whose error classes users catch
    has_one_error: bool  # whose message says which it is

    def open(self, scenario: Scenario, url: str, *, own: bool) -> Any:
        """A model for one or more questions."""
        ...

    async def close(self, model: Any) -> None: ...

    async def ask(self, model: Any, scenario: Scenario, seen: Seen, *, streamed: bool) -> None: ...

    def ask_blocking(self, model: Any, scenario: Scenario, seen: Seen, *, streamed: bool) -> None: ...

    def use_cache(self) -> AbstractContextManager[None]:
        """The framework keeps answers, and gives them again to the same question."""
        ...


def record_run(seen: Seen, **arguments: Any) -> str:
    """What the tool does."""
    seen.runs.append(arguments)
    return "It rains."
