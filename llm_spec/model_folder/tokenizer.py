"""The tokenizer and chat template of a model folder in Hugging Face's layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llm_spec.chat import ChatRequest
from llm_spec.errors import InvalidRequestError, ModelLoadError
from llm_spec.message_format.formats import MessageFormat, ReasoningMarks, list_format_marks
from llm_spec.model_folder.chat_template import ChatTemplate
from llm_spec.model_folder.files import find_file, read_json, read_text_file
from llm_spec.model_folder.token_bytes import TokenByteTable

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["FolderTokenizer"]


class FolderTokenizer:
    """`tokenizer.json` with its chat template.

    As everywhere with such templates, a control token that a message spells out is a control token.
    """

    def __init__(self, folder: Path) -> None:
        path = find_file(folder, "tokenizer.json")
        text = read_text_file(path)
        self._folder = folder
        self._prompts, self._answers = _load_rust_tokenizer(text, path), _load_rust_tokenizer(text, path)
        self._answers.encode_special_tokens = True  # what a model or a draft spells out is text
        config = read_json(folder / "tokenizer_config.json", optional=True)
        self._special = {
            name: _get_special_token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")
        }
        self.eos_token_ids = self._find_eos_ids(folder)
        self.fingerprint = _compute_tokenizer_fingerprint(text)
        self.max_token_chars = max(map(len, self._prompts.get_vocab(with_added_tokens=True)), default=1)
        found: Any = read_json(folder / "config.json", optional=True).get("max_position_embeddings")
        self._max_tokens = found if isinstance(found, int) else None
        self._chat_template = ChatTemplate.load(folder, config)
        self.mark_tokens = self._find_mark_tokens()
        self._token_bytes: TokenByteTable | None = None  # made at first use

    @property
    def vocab_size(self) -> int:
        """Ids in use, control tokens counted."""
        return self._prompts.get_vocab_size(with_added_tokens=True)

    @property
    def message_format(self) -> MessageFormat | None:
        return None if self._chat_template is None else self._chat_template.message_format

    @property
    def reasoning(self) -> ReasoningMarks | None:
        return None if self._chat_template is None else self._chat_template.reasoning

    def encode(self, text: str) -> list[int]:
        return _encode_text_without_gil(self._answers, text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._prompts.decode(token_ids, skip_special_tokens=True)

    def encode_chat(self, request: ChatRequest) -> list[int]:
        if request.raw:
            prompt_ids = self._encode_prompt_up_to_limit(request.messages[0].text, add_special_tokens=True)
            return prompt_ids + self.encode(request.prefix)
        if self._chat_template is None:
            raise InvalidRequestError(f"the model in {self._folder} has no chat template and cannot take messages")
        prompt = self._chat_template.render(request, self._special)
        return self._encode_prompt_up_to_limit(prompt) + self.encode(request.prefix)

    def token_bytes(self, token_id: int) -> bytes:
        if self._token_bytes is None:
            self._token_bytes = TokenByteTable(self._prompts)
        return self._token_bytes.get_bytes(token_id)

    def to_tokenizer_json(self) -> str:
        whole: dict[str, Any] = json.loads(self._prompts.to_str())
        return json.dumps(whole | {"truncation": None, "padding": None})  # they are for batches of texts

    def _encode_prompt_up_to_limit(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """A prompt's ids; those of one that is too long are only counted, as a list of them holds up other threads."""
        encoding = _encode_text_without_gil(self._prompts, text, add_special_tokens=add_special_tokens)
        if self._max_tokens is not None and len(encoding) > self._max_tokens:
            limit = f"the model in {self._folder} takes {self._max_tokens} at most"
            raise InvalidRequestError(f"the prompt has {len(encoding)} tokens; {limit} (its context length)")
        return encoding.ids

    def _find_mark_tokens(self) -> Mapping[int, str]:
        added = self._prompts.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        marks = [*list_format_marks(self.message_format), *list_format_marks(self.reasoning)]
        return {token_id: text for token_id, text in special.items() if any(text in mark for mark in marks)}

    def _find_eos_ids(self, folder: Path) -> frozenset[int]:
        for name in ("generation_config.json", "config.json"):
            found = read_json(folder / name, optional=True).get("eos_token_id")
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
        by_text = self._prompts.token_to_id(self._special["eos_token"])
        return frozenset() if by_text is None else frozenset([by_text])


def _load_rust_tokenizer(text: str, path: Path) -> RustTokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(f"{path} is not a tokenizer file: {error}") from error


def _encode_text_without_gil(tokenizer: RustTokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """A text's tokens; of the package's calls only those for several texts let other threads run meanwhile."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _get_special_token_text(token: Any) -> str:
    """A special token of tokenizer_config.json: a text, or an object with its text."""
    return str(cast("dict[str, Any]", token)["content"]) if isinstance(token, dict) else str(token or "")


def _compute_tokenizer_fingerprint(text: str) -> str:
    """Equal for files that give the same ids: what only affects truncation and padding is left out."""
    parts: dict[str, Any] = json.loads(text)
    relevant = {name: parts.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
