"""Token models without files: a logits table, byte and character tokenizers, a provider."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.token_model import Tokenizer, TokenModel
from llm_spec.drafting.ngrams import NgramIndex
from llm_spec.kit.local_provider import TokenModelProvider
from llm_spec.local.forks import reset_in_forked_child

if TYPE_CHECKING:
    from llm_spec.contract.request import ChatRequest

__all__ = ["ByteTokenizer", "CharTokenizer", "LocalProvider", "TableModel"]

FloatArray = NDArray[np.floating[Any]]

# Added to the logit of the next token of a model's own text; the noise is standard normal
_NEXT_TOKEN_LOGIT: Final = 12.0


class ByteTokenizer:
    """One id per UTF-8 byte, then EOS and the mark of the answer's beginning.

    Characters beyond ASCII are several tokens.
    """

    fingerprint = "bytes"
    num_ids = 258
    eos_token_id = 256
    answer_token_id = 257
    eos_token_ids = frozenset({eos_token_id})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < self.eos_token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < self.eos_token_id else b""

    def encode_chat(self, request: ChatRequest) -> list[int]:
        return [*self.encode(_join_message_texts(request)), self.answer_token_id, *self.encode(request.prefix)]


class CharTokenizer:
    """One id per character of `alphabet`, then EOS and the mark of the answer's beginning.

    So vocabularies are small enough to count. Raises InvalidRequestError for other characters.
    """

    def __init__(self, alphabet: str) -> None:
        self.fingerprint = f"characters {alphabet}"
        self.num_ids = len(alphabet) + 2
        self.eos_token_id = len(alphabet)
        self.answer_token_id = len(alphabet) + 1
        self.eos_token_ids = frozenset({self.eos_token_id})
        self._alphabet = alphabet
        self._ids = {character: i for i, character in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise InvalidRequestError(f"character {error} is not in the alphabet {self._alphabet!r}") from None

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._alphabet[i] for i in token_ids if i < self.eos_token_id)

    def encode_chat(self, request: ChatRequest) -> list[int]:
        return [*self.encode(_join_message_texts(request)), self.answer_token_id, *self.encode(request.prefix)]


class TableModel:
    """A token model whose logits depend only on the last `order` tokens and `seed`.

    With a `text`, it is nearly sure of the text's next token after the longest match with the
    context. When greedy, it answers with that text, if `order` tokens identify each place in it.
    Without a text its logits are noise. A `vocab_size` above the tokenizer's `num_ids` adds ids
    without meaning, as real models have.

    Faults, which may be changed between calls: `nan_at` are positions in the context after which
    the logits are NaN. `fail_at` maps positions to errors that `forward` raises when it reads them.
    Each `forward` sleeps `forward_s` seconds, by `sleep`. `num_open` sessions are open now,
    `num_closed` have been closed; `widths` are those of all `forward` calls.
    """

    same_text = True

    def __init__(
        self,
        text: str = "",
        *,
        name: str = "table:model",
        tokenizer: ByteTokenizer | CharTokenizer | None = None,
        vocab_size: int | None = None,
        context_length: int = 4096,
        max_width: int = 16,
        order: int = 8,
        seed: int = 0,
        nan_at: Collection[int] = (),
        fail_at: Mapping[int, Exception] | None = None,
        forward_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        table = tokenizer or ByteTokenizer()
        self.name = name
        self.tokenizer: Tokenizer = table
        self.vocab_size = table.num_ids if vocab_size is None else vocab_size
        if self.vocab_size < table.num_ids:
            raise ValueError(f"vocab_size is {vocab_size}; the tokenizer has {table.num_ids} ids")
        self.context_length = context_length
        self.max_width = max_width
        self.nan_at = nan_at
        self.fail_at = fail_at or {}
        self.forward_s = forward_s
        self.sleep = sleep
        self.num_open = self.num_closed = 0
        self.widths: list[int] = []
        self._order = order
        self._seed = seed
        self._rows: dict[tuple[int, ...], FloatArray] = {}
        self._lock = threading.Lock()
        reset_in_forked_child(self)
        self._text = NgramIndex[int](order)
        if text:
            self._text.extend([table.answer_token_id, *table.encode(text), table.eos_token_id])

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def open(self, *, exact: bool = True) -> _TableSession:  # noqa: ARG002 - rows never depend on the width
        with self._lock:
            self.num_open += 1
        return _TableSession(self)

    def count_closed_session(self) -> None:
        """Count a session as closed; sessions call it."""
        with self._lock:
            self.num_open -= 1
            self.num_closed += 1

    def logits(self, context_ids: Sequence[int]) -> FloatArray:
        """Compute the logits of the token after `context_ids`, [vocab_size], float32."""
        key = tuple(context_ids[-self._order :])
        if key not in self._rows:
            row = np.random.default_rng([self._seed, *key]).standard_normal(self.vocab_size, dtype=np.float32)
            found = self._text.find_continuation(key)
            if found is not None:
                row[self._text.items[found[0]]] += _NEXT_TOKEN_LOGIT
            self._rows[key] = row
        return self._rows[key]


class _TableSession:
    """A session; the context's ids stand for a key-value cache."""

    def __init__(self, model: TableModel) -> None:
        self._model = model
        self._ids: list[int] = []
        self._last_logits: FloatArray | None = None
        self._closed = False

    @property
    def length(self) -> int:
        return len(self._ids)

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        model, start = self._model, len(self._ids)
        self._check_forward_arguments(token_ids, num_rows)
        model.widths.append(len(token_ids))
        if model.forward_s > 0:  # even sleep(0) takes a tenth of a millisecond
            model.sleep(model.forward_s)
        for position in range(start, start + len(token_ids)):
            if position in model.fail_at:
                raise model.fail_at[position]
        if self._last_logits is not None:
            # logits are valid until the next call: code that keeps them must notice
            self._last_logits.fill(np.nan)
        self._ids += token_ids
        self._last_logits = np.stack(
            [self._compute_logits_row(end) for end in range(len(self._ids) - num_rows, len(self._ids))]
        )
        return self._last_logits

    def truncate(self, length: int) -> None:
        if not 0 <= length <= len(self._ids):
            raise ValueError(f"length is {length}; the cache holds {len(self._ids)} tokens")
        del self._ids[length:]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._model.count_closed_session()

    def _compute_logits_row(self, position: int) -> FloatArray:
        if position in self._model.nan_at:
            return np.full(self._model.vocab_size, np.nan, dtype=np.float32)
        return self._model.logits(self._ids[: position + 1])

    def _check_forward_arguments(self, token_ids: Sequence[int], num_rows: int) -> None:
        model, width = self._model, len(token_ids)
        if self._closed:
            raise RuntimeError("this session is closed")
        if not 1 <= num_rows <= (width if width <= model.max_width else 1):
            raise ValueError(f"num_rows is {num_rows} for {width} tokens (max_width {model.max_width})")
        if len(self._ids) + width > model.context_length:
            raise ValueError(f"{len(self._ids) + width} tokens exceed the context length {model.context_length}")
        if not all(0 <= i < model.vocab_size for i in token_ids):
            raise ValueError(f"token_ids {list(token_ids)} are not all below {model.vocab_size}")


class LocalProvider(TokenModelProvider[TokenModel]):
    """An `LlmProvider` around any token model.

    The model belongs to the code that made it: `aclose` releases nothing.
    """


def _join_message_texts(request: ChatRequest) -> str:
    return "".join(message.text for message in request.messages)
