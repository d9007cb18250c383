"""The tokenizer and chat template of a model folder in Hugging Face's layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from llm_spec.contract.errors import InvalidRequestError, ModelLoadError, make_context_length_error
from llm_spec.contract.formats import MessageFormat, ReasoningMarks, list_format_marks
from llm_spec.contract.request import ChatRequest
from llm_spec.kit.model_folder.chat_template import ChatTemplate
from llm_spec.kit.model_folder.control_tokens import ControlTokenFinder
from llm_spec.kit.model_folder.files import find_file, read_json, read_text_file
from llm_spec.kit.model_folder.token_bytes import TokenByteTable

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["FolderTokenizer"]

# Variables that transformers gives to a chat template.
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_APART: Final = ("\n", "a", "=")  # at least one of them does not merge with the beginning of a text
_WORD: Final = "a"


class FolderTokenizer:
    """`tokenizer.json` with its chat template.

    A control token that a message spells out is a control token, as usual with such templates. One
    that the prefix of an answer spells out is text, as in the answer itself.
    """

    def __init__(self, folder: Path) -> None:
        path = find_file(folder, "tokenizer.json")
        text = read_text_file(path)
        self._folder = folder
        self._prompts, self._answers = _load_rust_tokenizer(text, path), _load_rust_tokenizer(text, path)
        # a control token that an answer spells out is text
        self._answers.encode_special_tokens = True
        config = read_json(folder / "tokenizer_config.json", optional=True)
        older = {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json", optional=True)
        tokens = config | older
        self._special = {
            name: _get_special_token_text(tokens[name]) for name in _SPECIAL_TOKENS if tokens.get(name) is not None
        }
        self.eos_token_ids = self._find_eos_ids(folder)
        self.fingerprint = _compute_tokenizer_fingerprint(text)
        self.max_token_chars = max(map(len, self._prompts.get_vocab(with_added_tokens=True)), default=1)
        found: Any = read_json(folder / "config.json", optional=True).get("max_position_embeddings")
        self._max_tokens = found if isinstance(found, int) else None
        self._chat_template = ChatTemplate.load(folder, config)
        self.mark_tokens = self._find_mark_tokens()
        self._control_tokens = self._make_control_token_finder()
        self._space_rule = _SpaceRule(self._answers)
        self._token_bytes: TokenByteTable | None = None  # made at first use

    @property
    def vocab_size(self) -> int:
        """Number of ids that an answer may have, including control tokens."""
        return self._answers.get_vocab_size(with_added_tokens=True)

    @property
    def message_format(self) -> MessageFormat | None:
        return None if self._chat_template is None else self._chat_template.message_format

    @property
    def reasoning(self) -> ReasoningMarks | None:
        return None if self._chat_template is None else self._chat_template.reasoning

    def encode(self, text: str) -> list[int]:
        return self._space_rule.encode(self._answers, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._space_rule.decode(self._prompts, token_ids)

    def encode_chat(self, request: ChatRequest) -> list[int]:
        if request.raw:
            prompt = request.messages[0].text
        elif self._chat_template is None:
            raise InvalidRequestError(f"the model in {self._folder} has no chat template and cannot take messages")
        else:
            prompt = self._chat_template.render(request, self._special)
        num_joined = self._control_tokens.count_characters_before(prompt, request.prefix)
        text, rest = prompt + request.prefix[:num_joined], request.prefix[num_joined:]
        return self._encode_prompt_up_to_limit(text, add_special_tokens=request.raw) + (
            self.encode(rest) if rest else []
        )

    def leave_out_ids_without_rows(self, num_rows: int) -> None:
        """Forget the ids from `num_rows` on, except in prompts: the weights have no rows for them.

        No answer contains these added tokens, so a text that spells them is text. Raises
        ModelLoadError if ordinary tokens have no rows, because then tokenizer and weights belong to
        different models.
        """
        beyond = {text for text, token_id in self._prompts.get_vocab().items() if token_id >= num_rows}
        added = {token.content for token in self._prompts.get_added_tokens_decoder().values()}
        if beyond - added:
            num_ids = 1 + max(self._prompts.get_vocab().values())
            raise ModelLoadError(
                f"tokenizer.json in {self._folder} has {num_ids} ids, but the weights have rows for {num_rows}; the "
                "two belong to different models"
            )
        if beyond:
            self._answers = _load_rust_tokenizer(_remove_added_tokens(self._prompts, beyond), self._folder)
            self._answers.encode_special_tokens = True
            self._control_tokens = self._make_control_token_finder(beyond)
            self.eos_token_ids = frozenset(token_id for token_id in self.eos_token_ids if token_id < num_rows)
            self.mark_tokens = {i: text for i, text in self.mark_tokens.items() if i < num_rows}

    def token_bytes(self, token_id: int) -> bytes:
        if self._token_bytes is None:
            self._token_bytes = TokenByteTable(self._prompts)
        return self._token_bytes.get_bytes(token_id)

    def to_tokenizer_json(self) -> str:
        return self._answers.to_str()

    def _encode_prompt_up_to_limit(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a prompt; raises a context-length error for one that is too long.

        The tokens of such a prompt are only counted, because making a list of them would block
        other threads.
        """
        encoding = _encode_text_without_gil(self._prompts, text, add_special_tokens=add_special_tokens)
        if self._max_tokens is not None and len(encoding) > self._max_tokens:
            limit = f"the model in {self._folder} takes {self._max_tokens} at most"
            raise make_context_length_error(f"the prompt has {len(encoding)} tokens; {limit} (its context length)")
        return encoding.ids

    def _make_control_token_finder(self, others: Collection[str] = ()) -> ControlTokenFinder:
        added = self._prompts.get_added_tokens_decoder().values()
        return ControlTokenFinder(token.content for token in added if token.special or token.content in others)

    def _find_mark_tokens(self) -> Mapping[int, str]:
        added = self._prompts.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        marks = [*list_format_marks(self.message_format), *list_format_marks(self.reasoning)]
        return {token_id: text for token_id, text in special.items() if any(text in mark for mark in marks)}

    def _find_eos_ids(self, folder: Path) -> frozenset[int]:
        """Return the end tokens that any of the files names.

        Often only one of the files has the token that ends a chat turn.
        """
        by_text = self._prompts.token_to_id(self._special.get("eos_token", ""))
        found: set[int] = set() if by_text is None else {by_text}
        for name in ("generation_config.json", "config.json"):
            named: Any = read_json(folder / name, optional=True).get("eos_token_id")
            found |= {named} if isinstance(named, int) else set(named or ())
        return frozenset(found)


class _SpaceRule:
    """Encodes and decodes parts of an answer for tokenizers that add a space before every text.

    SentencePiece's tokenizers do, and remove it when they decode. So a part is encoded behind a
    mark and decoded behind a word.
    """

    def __init__(self, tokenizer: RustTokenizer) -> None:
        def encode(text: str) -> list[int]:
            return _encode_text_without_gil(tokenizer, text).ids

        word_ids, words_ids = encode(_WORD), encode(f"{_WORD} {_WORD}")
        marks = {mark: encode(mark) for mark in _APART}
        adds_space = encode(_APART[0] + _WORD) != marks[_APART[0]] + word_ids
        self._marks = marks if adds_space else {}
        keeps_space = tokenizer.decode(words_ids[len(word_ids) :]) == f" {_WORD}"
        self._word_ids = [] if keeps_space else word_ids
        self._word = "" if keeps_space else tokenizer.decode(word_ids)

    def encode(self, tokenizer: RustTokenizer, text: str) -> list[int]:
        for mark, mark_ids in self._marks.items():
            token_ids = _encode_text_without_gil(tokenizer, mark + text).ids
            if token_ids[: len(mark_ids)] == mark_ids:
                return token_ids[len(mark_ids) :]
        return _encode_text_without_gil(tokenizer, text).ids

    def decode(self, tokenizer: RustTokenizer, token_ids: Sequence[int]) -> str:
        if not self._word_ids:
            return tokenizer.decode(token_ids, skip_special_tokens=True)
        return tokenizer.decode([*self._word_ids, *token_ids], skip_special_tokens=True)[len(self._word) :]


def _load_rust_tokenizer(text: str, path: Path) -> RustTokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(f"{path} is not a tokenizer file: {error}") from error
    tokenizer.no_truncation()  # both settings come from training on batches of texts
    tokenizer.no_padding()
    return tokenizer


def _remove_added_tokens(tokenizer: RustTokenizer, texts: Collection[str]) -> str:
    """Return the tokenizer's file without some added tokens, also in its vocabulary."""
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] not in texts]
    vocabulary: Any = parts["model"].get("vocab")
    if isinstance(vocabulary, dict):
        parts["model"]["vocab"] = {
            text: i for text, i in cast("dict[str, int]", vocabulary).items() if text not in texts
        }
    elif isinstance(vocabulary, list):  # Unigram's, by id
        parts["model"]["vocab"] = [entry for entry in cast("list[list[Any]]", vocabulary) if entry[0] not in texts]
    return json.dumps(parts)


def _encode_text_without_gil(tokenizer: RustTokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Encode a text while other threads run.

    Of the package's methods, only those for several texts release the GIL.
    """
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _get_special_token_text(token: Any) -> str:
    """Return a special token of tokenizer_config.json: a text, or an object with its text."""
    return str(cast("dict[str, Any]", token)["content"]) if isinstance(token, dict) else str(token or "")


def _compute_tokenizer_fingerprint(text: str) -> str:
    """Return equal values for files that give the same ids.

    The settings of truncation and padding are left out.
    """
    parts: dict[str, Any] = json.loads(text)
    relevant = {name: parts.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
