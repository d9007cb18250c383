"""The tokenizer and chat template of a GGUF file, through llama.cpp's own functions."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from llm_spec import ChatRequest, InvalidRequestError
from llm_spec.contract.errors import make_context_length_error
from llm_spec.contract.formats import MessageFormat, ReasoningMarks, list_format_marks
from llm_spec.kit.model_folder.chat_template import ChatTemplate
from llm_spec.kit.model_folder.control_tokens import ControlTokenFinder
from llm_spec_gguf.library import LlamaModel, llama

__all__ = ["GgufTokenizer"]

# At least one of them forms no common token with the beginning of a text.
_APART: Final = ("\n", "a", "=")


class GgufTokenizer:
    """A vocabulary, and the templates in the file's metadata.

    As usual with such templates, a control token that is spelled out in a message becomes a control
    token. In the prefix of an answer it stays text, as in the answer itself.
    """

    def __init__(self, model: LlamaModel, path: Path, context_length: int) -> None:
        self._model = model
        self._path = path
        self._context_length = context_length
        self.vocab_size = model.vocab_size
        token_ids = range(self.vocab_size)
        self._bytes = [_read_piece(model, token_id, special=True) for token_id in token_ids]
        self._shown = [_read_piece(model, token_id, special=False) for token_id in token_ids]
        self.eos_token_ids = frozenset(i for i in token_ids if llama.llama_vocab_is_eog(model.vocab, i))
        for token_id in self.eos_token_ids:
            self._shown[token_id] = b""
        self.max_token_chars = max((len(piece.decode(errors="replace")) for piece in self._bytes), default=1)
        self.fingerprint = _compute_fingerprint(model, self._bytes, self._shown)
        self._special = {
            "bos_token": self._get_special_token_text(llama.llama_vocab_bos(model.vocab)),
            "eos_token": self._get_special_token_text(llama.llama_vocab_eos(model.vocab)),
            "pad_token": self._get_special_token_text(llama.llama_vocab_pad(model.vocab)),
        }
        self._begins_with_space = self._tokenize("a") != [] and self.decode(self._tokenize("a")).startswith(" ")
        self._control_tokens = ControlTokenFinder(
            piece.decode(errors="replace")
            for piece, shown in zip(self._bytes, self._shown, strict=True)
            if piece and not shown
        )
        self._chat_template = _load_chat_template(model, path)
        marks = [*list_format_marks(self.message_format), *list_format_marks(self.reasoning)]
        self.mark_tokens: Mapping[int, str] = {
            token_id: text
            for token_id in token_ids
            if not self._shown[token_id]
            and (text := self._bytes[token_id].decode(errors="replace"))
            and any(text in mark for mark in marks)
        }

    @property
    def message_format(self) -> MessageFormat | None:
        return None if self._chat_template is None else self._chat_template.message_format

    @property
    def reasoning(self) -> ReasoningMarks | None:
        return None if self._chat_template is None else self._chat_template.reasoning

    def encode(self, text: str) -> list[int]:
        if not self._begins_with_space:
            return self._tokenize(text)
        if text.startswith(" ") and text != " ":
            return self._tokenize(text[1:])
        for mark in _APART:
            before, token_ids = self._tokenize(mark), self._tokenize(mark + text)
            if token_ids[: len(before)] == before:
                return token_ids[len(before) :]
        return self._tokenize(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join([self._shown[token_id] for token_id in token_ids]).decode(errors="replace")

    def encode_chat(self, request: ChatRequest) -> list[int]:
        if request.raw:
            prompt = request.messages[0].text
        elif self._chat_template is None:
            raise InvalidRequestError(f"the model in {self._path} has no chat template and cannot take messages")
        else:
            prompt = self._chat_template.render(request, self._special)
        num_joined = self._control_tokens.count_characters_before(prompt, request.prefix)
        prompt_ids = self._encode_prompt(prompt + request.prefix[:num_joined], add_special=request.raw)
        return prompt_ids + self.encode(request.prefix[num_joined:])

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def list_tokens(self) -> list[bytes]:
        return self._bytes

    def list_control_token_ids(self) -> list[int]:
        return [token_id for token_id, shown in enumerate(self._shown) if not shown]

    def _encode_prompt(self, text: str, *, add_special: bool = False) -> list[int]:
        token_ids = self._tokenize(text, add_special=add_special, parse_special=True)
        if len(token_ids) > self._context_length:
            raise make_context_length_error(
                f"the prompt has {len(token_ids)} tokens; the model in {self._path} takes {self._context_length} at "
                "most (its context length)"
            )
        return token_ids

    def _tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        data = text.encode(errors="replace")  # half a surrogate pair is not text
        room = len(data) + 8
        while True:
            ids = np.empty(room, np.int32)
            pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = llama.llama_tokenize(self._model.vocab, data, len(data), pointer, room, add_special, parse_special)
            if count >= 0:
                return [int(token_id) for token_id in ids[:count]]
            room = -count

    def _get_special_token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


def _load_chat_template(model: LlamaModel, path: Path) -> ChatTemplate | None:
    default = model.read_metadata("tokenizer.chat_template")
    if not default:
        return None
    return ChatTemplate(path, default, model.read_metadata("tokenizer.chat_template.tool_use") or default)


def _read_piece(model: LlamaModel, token_id: int, *, special: bool) -> bytes:
    """Return a token's bytes in a text; for a control token, its name or b""."""
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = llama.llama_token_to_piece(model.vocab, token_id, buffer, size, 0, special)
        if count >= 0:
            return buffer.raw[:count]
        size = -count


def _compute_fingerprint(model: LlamaModel, token_bytes: Sequence[bytes], shown: Sequence[bytes]) -> str:
    """Return a digest that is equal if the same ids mean the same text."""
    digest = hashlib.sha256(b"gguf %d" % llama.llama_vocab_type(model.vocab))
    for whole, visible in zip(token_bytes, shown, strict=True):
        digest.update(b"%d %d " % (len(whole), len(visible)) + whole + visible)
    return digest.hexdigest()
