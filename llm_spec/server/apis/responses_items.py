"""The items of a response's output, while they are written and once they are done. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from llm_spec.contract.messages import ToolCall
from llm_spec.server.apis.custom_tool_input import CustomInputDecoder
from llm_spec.server.apis.fields import ClientTool, Json

__all__ = [
    "OpenCustomCallItem",
    "OpenFunctionCallItem",
    "OpenMessageItem",
    "OpenOutputItem",
    "OpenReasoningItem",
    "OpenRefusalItem",
    "OutputEvent",
    "parse_image",
]

OutputEvent: TypeAlias = tuple[str, Json]  # its type, and its fields


class OpenOutputItem:
    """An item of the output that is being written."""

    id_prefix = ""

    def __init__(self, answer_id: str, output_index: int) -> None:
        self.item_id = f"{self.id_prefix}_{answer_id}_{output_index}"
        self.output_index = output_index
        self.text = ""

    @property
    def position_fields(self) -> Mapping[str, Any]:
        return {"item_id": self.item_id, "output_index": self.output_index}

    def iter_start_events(self) -> Iterator[OutputEvent]:
        yield "response.output_item.added", {"output_index": self.output_index, "item": self.build_empty_item()}

    def iter_delta_events(self, text: str) -> Iterator[OutputEvent]:
        """Write one more piece."""
        if text:
            self.text += text
            yield self.build_delta_event(text)

    def iter_end_events(self) -> Iterator[OutputEvent]:
        yield "response.output_item.done", {"output_index": self.output_index, "item": self.build_finished_item()}

    def build_empty_item(self) -> Json:
        raise NotImplementedError

    def build_delta_event(self, text: str) -> OutputEvent:
        raise NotImplementedError

    def build_finished_item(self) -> Json:
        raise NotImplementedError


class _OpenContentItem(OpenOutputItem):
    """An item whose text is its only part."""

    @property
    def position_fields(self) -> Mapping[str, Any]:
        return {**super().position_fields, "content_index": 0}

    def build_empty_item(self) -> Json:
        return self._build_item("in_progress", [])

    def _build_item(self, status: str, content: list[Json]) -> Json:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}


class OpenMessageItem(_OpenContentItem):
    """A text; `annotations` are its citations."""

    id_prefix = "msg"

    def __init__(self, answer_id: str, output_index: int) -> None:
        super().__init__(answer_id, output_index)
        self.annotations: list[Json] = []
        self._logprobs: list[Json] = []
        self._new_logprobs: Sequence[Json] = ()

    def iter_start_events(self) -> Iterator[OutputEvent]:
        yield from super().iter_start_events()
        yield "response.content_part.added", {**self.position_fields, "part": _build_text_part("")}

    def iter_text_events(self, text: str, logprobs: Sequence[Json]) -> Iterator[OutputEvent]:
        """Write one more piece; the tokens that begin in it have these log-probabilities."""
        self._logprobs += logprobs
        self._new_logprobs = logprobs
        yield from self.iter_delta_events(text)

    def iter_annotation_events(self, annotation: Json) -> Iterator[OutputEvent]:
        """Add a citation."""
        fields = {"annotation_index": len(self.annotations), "annotation": annotation}
        self.annotations.append(annotation)
        yield "response.output_text.annotation.added", {**self.position_fields, **fields}

    def build_delta_event(self, text: str) -> OutputEvent:
        fields = {"delta": text, "logprobs": list(self._new_logprobs)}
        return "response.output_text.delta", {**self.position_fields, **fields}

    def iter_end_events(self) -> Iterator[OutputEvent]:
        part = _build_text_part(self.text, self.annotations, self._logprobs)
        yield "response.output_text.done", {**self.position_fields, "text": self.text, "logprobs": self._logprobs}
        yield "response.content_part.done", {**self.position_fields, "part": part}
        yield from super().iter_end_events()

    def build_finished_item(self) -> Json:
        return self._build_item("completed", [_build_text_part(self.text, self.annotations, self._logprobs)])


def _build_text_part(text: str, annotations: Sequence[Json] = (), logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": list(annotations), "logprobs": list(logprobs)}


class OpenRefusalItem(_OpenContentItem):
    """A refusal."""

    id_prefix = "msg"

    def iter_start_events(self) -> Iterator[OutputEvent]:
        yield from super().iter_start_events()
        yield "response.content_part.added", {**self.position_fields, "part": {"type": "refusal", "refusal": ""}}

    def build_delta_event(self, text: str) -> OutputEvent:
        return "response.refusal.delta", {**self.position_fields, "delta": text}

    def iter_end_events(self) -> Iterator[OutputEvent]:
        yield "response.refusal.done", {**self.position_fields, "refusal": self.text}
        yield "response.content_part.done", {**self.position_fields, "part": self._build_part()}
        yield from super().iter_end_events()

    def build_finished_item(self) -> Json:
        return self._build_item("completed", [self._build_part()])

    def _build_part(self) -> Json:
        return {"type": "refusal", "refusal": self.text}


class OpenReasoningItem(_OpenContentItem):
    """The reasoning of a model."""

    id_prefix = "rs"

    def build_delta_event(self, text: str) -> OutputEvent:
        return "response.reasoning_text.delta", {**self.position_fields, "delta": text}

    def iter_end_events(self) -> Iterator[OutputEvent]:
        yield "response.reasoning_text.done", {**self.position_fields, "text": self.text}
        yield from super().iter_end_events()

    def build_finished_item(self) -> Json:
        return self._build_item("completed", [{"type": "reasoning_text", "text": self.text}])

    def _build_item(self, status: str, content: list[Json]) -> Json:
        return {"id": self.item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


class OpenFunctionCallItem(OpenOutputItem):
    """A call of a function.

    `call`: has the id that the client gets; without one, an id is made.
    `tool`: the tool as its client names it.
    """

    id_prefix = "fc"

    def __init__(self, answer_id: str, output_index: int, call: ToolCall, tool: ClientTool) -> None:
        super().__init__(answer_id, output_index)
        self.call_id = call.id or f"call_{answer_id}_{output_index}"
        self.tool = tool

    def build_empty_item(self) -> Json:
        return self._build_item("in_progress", arguments="")

    def build_delta_event(self, text: str) -> OutputEvent:
        return "response.function_call_arguments.delta", {**self.position_fields, "delta": text}

    def iter_end_events(self) -> Iterator[OutputEvent]:
        done = {**self.position_fields, "name": self.tool.name, "arguments": self.text}
        yield "response.function_call_arguments.done", done
        yield from super().iter_end_events()

    def build_finished_item(self) -> Json:
        return self._build_item("completed", arguments=self.text)

    def _build_item(self, status: str, **content: str) -> Json:
        namespace = {} if self.tool.namespace is None else {"namespace": self.tool.namespace}
        item = {"id": self.item_id, "type": "function_call", "status": status, "call_id": self.call_id, **namespace}
        return {**item, "name": self.tool.name, **content}


class OpenCustomCallItem(OpenFunctionCallItem):
    """A call of a tool that takes a text.

    `is_encoded`: the model writes the text as JSON, because it was shown a function.
    """

    id_prefix = "ctc"

    def __init__(
        self, answer_id: str, output_index: int, call: ToolCall, tool: ClientTool, *, is_encoded: bool
    ) -> None:
        super().__init__(answer_id, output_index, call, tool)
        self._decoder = CustomInputDecoder() if is_encoded else None

    def iter_delta_events(self, text: str) -> Iterator[OutputEvent]:
        yield from super().iter_delta_events(text if self._decoder is None else self._decoder.decode_piece(text))

    def build_empty_item(self) -> Json:
        return self._build_item("in_progress", input="")

    def build_delta_event(self, text: str) -> OutputEvent:
        return "response.custom_tool_call_input.delta", {**self.position_fields, "delta": text}

    def iter_end_events(self) -> Iterator[OutputEvent]:
        if self._decoder is not None:
            yield from super().iter_delta_events(self._decoder.decode_rest())
        yield "response.custom_tool_call_input.done", {**self.position_fields, "input": self.text}
        yield from OpenOutputItem.iter_end_events(self)

    def build_finished_item(self) -> Json:
        return self._build_item("completed", input=self.text)

    def _build_item(self, status: str, **content: str) -> Json:
        return {**super()._build_item(status, **content), "type": "custom_tool_call"}


def parse_image(image: Mapping[str, Any]) -> str | None:
    """Return the base64 data of an image that a model made, or None if it has none.

    The image has the form of chat completions.
    """
    address: Any = image.get("image_url")
    url: Any = cast("Mapping[str, Any]", address).get("url") if isinstance(address, Mapping) else address
    _, mark, data = url.partition(";base64,") if isinstance(url, str) else ("", "", "")
    return data if mark else None
