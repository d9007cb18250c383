"""Finds out which conversations a chat template accepts, and arranges messages for it. No I/O.

A template comes from others and does not describe itself. Many drop a second system text silently,
or refuse two user messages in a row. So each template is tried once, on short conversations whose
texts are markers. The traits found then hold for every request: all turns of a conversation are
rendered alike, so kept caches stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from llm_spec.contract.messages import ChatMessage, ToolCall
from llm_spec.contract.system_texts import join_neighbouring_user_messages, mark_system_text, place_system_texts

__all__ = ["RenderMessages", "TemplateTraits", "arrange_messages", "find_template_traits"]

# Returns the prompt of some messages, or None if the template refuses them.
RenderMessages = Callable[[Sequence[ChatMessage]], str | None]
_TRIAL_CALL: Final = ToolCall("call00001", "trial", "{}")
_SEPARATOR: Final = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """The conversations that a template accepts.

    - `first_system`: a system text at the beginning.
    - `later_system`: more system texts, as turns of their own.
    - `neighbouring_users`: two user messages in a row.
    - `user_after_results`: a user message directly after the results of tools.
    - `text_beside_reasoning`: a message that calls tools and has both text and reasoning.
    """

    first_system: bool = True
    later_system: bool = False
    neighbouring_users: bool = True
    user_after_results: bool = True
    text_beside_reasoning: bool = True


def find_template_traits(render: RenderMessages, *, uses_tools: bool) -> TemplateTraits | None:
    """Try a template; returns None if it refuses the simplest conversation."""
    trial = _TemplateTrial(render)
    if not trial.renders("user"):
        return None
    shows_results = uses_tools and trial.takes("user calls results")
    first_system = trial.takes("system user assistant user") and trial.takes_as_own_turn("", "system", "user")
    if shows_results and not trial.takes("system user calls results"):
        first_system = False  # it would be lost in the middle of a turn
    start = "system " if first_system else ""
    later = [("user assistant", "user"), ("user assistant user", ""), ("user assistant", "system user")]
    if shows_results:
        later.append(("user calls results", ""))
    return TemplateTraits(
        first_system=first_system,
        later_system=all(
            trial.takes_as_own_turn(begin + before, "system", after) for before, after in later for begin in {start, ""}
        ),
        neighbouring_users=trial.takes(f"{start}user user") and trial.takes(f"{start}user assistant user user"),
        user_after_results=not shows_results or trial.takes(f"{start}user calls results user"),
        text_beside_reasoning=trial.renders("user reasoned-calls results") or not trial.renders("user calls results"),
    )


def arrange_messages(messages: Sequence[ChatMessage], traits: TemplateTraits) -> tuple[ChatMessage, ...]:
    """Arrange messages so that the template renders all of them, each text once.

    Messages of a simple conversation stay as they are.
    """
    arranged: list[ChatMessage] = []
    for index, message in enumerate(place_system_texts(messages, later_role="system")):
        if message.role != "system" or (traits.later_system if index else traits.first_system):
            arranged.append(message)
        elif message.text:
            marked, last = mark_system_text(message.text), arranged[-1] if arranged else None
            if last is not None and last.role == "tool" and not traits.user_after_results:
                arranged[-1] = replace(last, content=last.text + _SEPARATOR + marked, native=None)
            else:
                arranged.append(ChatMessage("user", marked))
    if not traits.text_beside_reasoning:
        arranged = list(map(_join_text_to_reasoning, arranged))
    return tuple(arranged) if traits.neighbouring_users else join_neighbouring_user_messages(arranged)


def _join_text_to_reasoning(message: ChatMessage) -> ChatMessage:
    """Move the text of a message that calls tools behind its reasoning."""
    if not (message.tool_calls and message.reasoning and message.text):
        return message
    return replace(message, content=None, reasoning=message.reasoning + _SEPARATOR + message.text, native=None)


class _TemplateTrial:
    """Tries conversations of markers, each written as the kinds of its messages."""

    def __init__(self, render: RenderMessages) -> None:
        self._render = render

    def takes(self, kinds: str) -> bool:
        """Return True if each text is in the prompt once, and in order.

        A first system text may be anywhere.
        """
        messages = _make_messages(kinds)
        prompt = self._render(messages)
        texts = [message.text for message in messages if message.text]
        if prompt is None or any(prompt.count(text) != 1 for text in texts):
            return False
        places = [prompt.index(text) for text in texts[messages[0].role == "system" :]]
        return places == sorted(places)

    def renders(self, kinds: str) -> bool:
        """Return True if the template does not refuse the messages."""
        return self._render(_make_messages(kinds)) is not None

    def takes_as_own_turn(self, before: str, kind: str, after: str) -> bool:
        """Return True if a message of this kind is rendered unlike one of the user or the model."""
        whole, *others = (f"{before} {other} {after}" for other in (kind, "user", "assistant"))
        prompt = self._render(_make_messages(whole))
        return self.takes(whole) and prompt not in [self._render(_make_messages(kinds)) for kinds in others]


def _make_messages(kinds: str) -> list[ChatMessage]:
    return [_make_message(kind, f"marker{index:02}x") for index, kind in enumerate(kinds.split())]


def _make_message(kind: str, text: str) -> ChatMessage:
    match kind:
        case "calls":
            return ChatMessage("assistant", None, tool_calls=(_TRIAL_CALL,))
        case "reasoned-calls":
            return ChatMessage("assistant", text, tool_calls=(_TRIAL_CALL,), reasoning="reasoned")
        case "results":
            return ChatMessage("tool", text, tool_call_id=_TRIAL_CALL.id)
        case "system" | "assistant":
            return ChatMessage(kind, text)
        case _:
            return ChatMessage("user", text)
