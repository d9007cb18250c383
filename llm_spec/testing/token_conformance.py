"""Checks that token models, their sessions and tokenizers keep the contract.

The contract is `llm_spec.contract.token_model`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.request import ChatRequest
from llm_spec.testing.stream_checks import ConformanceError

if TYPE_CHECKING:
    from llm_spec.contract.token_model import TokenModel, TokenSession

__all__ = ["check_token_model_conformance"]

FloatArray = NDArray[np.floating[Any]]

_TEXTS: Final = (
    "",
    "Hello, world!",
    "  two  spaces,\ta tab\nand a new line\n",
    "naïve café, 日本語 😀",
    "<|endoftext|> </s> <eos>",
)
_PROMPT_LENGTHS: Final = (1, 7, 40)
# Rounding of the same row by half precision and other kernels stays well below it
_LOGIT_TOLERANCE: Final = 0.05


def check_token_model_conformance(model: TokenModel, *, texts: Sequence[str] = _TEXTS) -> None:
    """Check a model and its tokenizer, in the calling thread.

    `texts`: texts that its tokenizer can reproduce unchanged.

    Raises ConformanceError if a promise is broken, and any error of the model.
    """
    _TokenModelChecks(model).check_all(texts)


class _TokenModelChecks:
    def __init__(self, model: TokenModel) -> None:
        self.model = model
        self._rng = random.Random(0)  # noqa: S311 - repeatable, not secret

    def require_promise(self, is_kept: bool, promise: str) -> None:
        if not is_kept:
            raise ConformanceError(f"{self.model.name or 'a model without a name'}: {promise}")

    def check_all(self, texts: Sequence[str]) -> None:
        self.check_vocabulary_and_context_sizes()
        self.check_text_round_trip(texts)
        self.check_chat_encoding(texts)
        self.check_closing_twice()
        self.check_logits_shape()
        self.check_long_forward()
        self.check_independent_sessions()
        for length in _PROMPT_LENGTHS:
            if length + self.model.max_width <= self.model.context_length:
                self.check_truncation(length)
                if self.model.same_text:
                    self.check_rows_are_same_at_any_width(length)

    # --------------------------------------------------------------------------------------- values

    def check_vocabulary_and_context_sizes(self) -> None:
        model = self.model
        self.require_promise(bool(model.name), "name must not be empty")
        self.require_promise(model.vocab_size > 0, f"vocab_size must be positive; it is {model.vocab_size}")
        self.require_promise(model.max_width >= 1, f"max_width must be at least 1; it is {model.max_width}")
        self.require_promise(model.context_length > 1, f"context_length must be above 1; it is {model.context_length}")
        self.require_promise(bool(model.tokenizer.fingerprint), "the tokenizer's fingerprint must not be empty")
        self.require_ids_in_vocabulary(sorted(model.tokenizer.eos_token_ids), "eos_token_ids")

    def check_text_round_trip(self, texts: Sequence[str]) -> None:
        tokenizer = self.model.tokenizer
        for text in texts:
            token_ids = tokenizer.encode(text)
            self.require_ids_in_vocabulary(token_ids, f"the ids of {text!r}")
            self.require_promise(
                not tokenizer.eos_token_ids & {*token_ids}, f"encode({text!r}) must not add or read an EOS"
            )
            back = tokenizer.decode(token_ids)
            self.require_promise(back == text, f"decode(encode({text!r})) must give it back; it gave {back!r}")
        for token_id in tokenizer.eos_token_ids:
            shown = tokenizer.decode([token_id])
            self.require_promise(not shown, f"decode must leave EOS {token_id} out; it gave {shown!r}")

    def check_chat_encoding(self, texts: Sequence[str]) -> None:
        tokenizer = self.model.tokenizer
        text = next((text for text in texts if text), "")
        prompt_ids = tokenizer.encode_chat(ChatRequest.create(text))
        self.require_promise(bool(prompt_ids), "encode_chat must give at least one id")
        self.require_ids_in_vocabulary(prompt_ids, "the ids of a prompt")
        if text:
            continued = tokenizer.encode_chat(ChatRequest.create(text, prefix=text))
            self.require_promise(
                len(continued) > len(prompt_ids), "encode_chat must put the request's prefix into the prompt"
            )

    def require_ids_in_vocabulary(self, token_ids: Sequence[int], what: str) -> None:
        is_kept = all(0 <= token_id < self.model.vocab_size for token_id in token_ids)
        self.require_promise(
            is_kept, f"{what} must be below vocab_size {self.model.vocab_size}; they are {list(token_ids)}"
        )

    # ------------------------------------------------------------------------------------- sessions

    def check_closing_twice(self) -> None:
        session = self.model.open()
        self.require_promise(session.length == 0, f"a new session must be empty; its length is {session.length}")
        self.read_logits_rows(session, self.draw_token_ids(1))
        session.close()
        try:
            session.close()
        except Exception as error:
            raise ConformanceError(f"{self.model.name}: closing twice must be harmless; it raised {error!r}") from error

    def check_logits_shape(self) -> None:
        width = min(self.model.max_width, self.model.context_length)
        token_ids = self.draw_token_ids(width)
        with closing(self.model.open()) as session:
            rows = self.read_logits_rows(session, token_ids)
        for num_rows in sorted({1, (width + 1) // 2, width}):
            with closing(self.model.open()) as session:
                logits = session.forward(token_ids, num_rows=num_rows).copy()
                self.require_logits(logits, num_rows)
                self.require_session_length(session, width)
            last = np.allclose(logits, rows[-num_rows:], rtol=_LOGIT_TOLERANCE, atol=_LOGIT_TOLERANCE)
            self.require_promise(last, f"num_rows={num_rows} must give the last {num_rows} rows")

    def check_long_forward(self) -> None:
        num = self.model.max_width + 1
        if num <= self.model.context_length:
            with closing(self.model.open()) as session:
                self.require_logits(session.forward(self.draw_token_ids(num), num_rows=1), 1)
                self.require_session_length(session, num)

    def check_truncation(self, length: int) -> None:
        tail_ids = self.draw_token_ids(self.model.max_width)
        with closing(self.model.open()) as session:
            session.forward(self.draw_token_ids(length), num_rows=1)
            first = self.read_logits_rows(session, tail_ids)
            self.truncate_and_check_length(session, length)
            self.read_logits_rows(session, self.draw_token_ids(self.model.max_width))
            self.truncate_and_check_length(session, length)
            again = self.read_logits_rows(session, tail_ids)
        same = np.array_equal(first, again)
        self.require_promise(same, f"after truncate({length}) the same tokens must give the same logits")

    def check_rows_are_same_at_any_width(self, length: int) -> None:
        prompt_ids, tail_ids = self.draw_token_ids(length), self.draw_token_ids(self.model.max_width)
        with closing(self.model.open()) as session:
            session.forward(prompt_ids, num_rows=1)
            read_alone = np.concatenate([self.read_logits_rows(session, [token_id]) for token_id in tail_ids])
            for width in range(1, len(tail_ids) + 1):
                self.truncate_and_check_length(session, length)
                rows = self.read_logits_rows(session, tail_ids[:width])
                self.require_same_logits(rows, read_alone[:width], f"at width {width} after {length} tokens")
                self.truncate_and_check_length(session, length)
                rows = self.read_logits_rows(session, [tail_ids[0], *self.draw_token_ids(width - 1)])
                self.require_same_logits(rows[:1], read_alone[:1], f"with other tokens behind it after {length} tokens")

    def check_independent_sessions(self) -> None:
        ids = [self.draw_token_ids(4), self.draw_token_ids(4)]
        read_alone: list[FloatArray] = []
        for own_ids in ids:
            with closing(self.model.open()) as session:
                read_alone += [self.read_logits_rows(session, [token_id]) for token_id in own_ids]
        with closing(self.model.open()) as first:
            with closing(self.model.open()) as second:
                mixed = [
                    (self.read_logits_rows(first, [ours]), self.read_logits_rows(second, [theirs]))
                    for ours, theirs in zip(*ids, strict=True)
                ]
            self.require_session_length(first, 4)
        is_kept = np.array_equal([*(a for a, _ in mixed), *(b for _, b in mixed)], read_alone)
        self.require_promise(is_kept, "two sessions must not disturb each other")

    # ---------------------------------------------------------------------------------------- parts

    def draw_token_ids(self, num: int) -> list[int]:
        return [self._rng.randrange(self.model.vocab_size) for _ in range(num)]

    def read_logits_rows(self, session: TokenSession, token_ids: Sequence[int]) -> FloatArray:
        """Return a copy of the logits after each token: [len(token_ids), vocab_size]."""
        return session.forward(token_ids, num_rows=len(token_ids)).copy()

    def truncate_and_check_length(self, session: TokenSession, length: int) -> None:
        session.truncate(length)
        self.require_session_length(session, length)

    def require_logits(self, logits: FloatArray, num_rows: int) -> None:
        shape = (num_rows, self.model.vocab_size)
        self.require_promise(logits.shape == shape, f"logits must be of shape {shape}; they are {logits.shape}")
        self.require_promise(logits.dtype == np.float32, f"logits must be float32; they are {logits.dtype}")
        self.require_promise(not np.isnan(logits).any(), "logits must not be NaN")

    def require_session_length(self, session: TokenSession, length: int) -> None:
        self.require_promise(session.length == length, f"length must be {length}; it is {session.length}")

    def require_same_logits(self, rows: FloatArray, read_alone: FloatArray, where: str) -> None:
        if not np.array_equal(rows, read_alone):
            most = float(np.abs(rows - read_alone).max())
            raise ConformanceError(f"{self.model.name}: same_text is set, but logits differ by {most:.3g} {where}")
