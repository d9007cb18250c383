"""The checker of token models passes what keeps the contract, and names the promise that a faulty model breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_spec.testing import ByteTokenizer, CharTokenizer, ConformanceError, TableModel, check_token_model_conformance

if TYPE_CHECKING:
    from llm_spec import ChatRequest
    from llm_spec.contract.token_model import TokenSession

FloatArray = NDArray[np.floating[Any]]


class Session:
    """Passes everything on to a session of the table model; the faulty ones change one thing."""

    def __init__(self, inner: TokenSession) -> None:
        self.inner = inner
        self.num_closed = 0

    @property
    def length(self) -> int:
        return self.inner.length

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        return self.inner.forward(token_ids, num_rows=num_rows)

    def truncate(self, length: int) -> None:
        self.inner.truncate(length)

    def close(self) -> None:
        self.num_closed += 1
        self.inner.close()


class Model(TableModel):
    """A table model with sessions of another make."""

    def __init__(self, session: Callable[[TokenSession], TokenSession] = Session, *, same_text: bool = True) -> None:
        super().__init__()
        self.session = session
        self.same_text = same_text

    def open(self, *, exact: bool = True) -> TokenSession:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride] - any session will do
        return self.session(super().open(exact=exact))


class Wide(Session):
    """Logits depend a little on the width."""

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        return super().forward(token_ids, num_rows=num_rows) + np.float32(1e-6 * len(token_ids))


class LooksAhead(Session):
    """Logits depend on the tokens behind, at one width."""

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        logits = super().forward(token_ids, num_rows=num_rows)
        if len(token_ids) == 2:
            logits[0, 0] += token_ids[1]
        return logits


class Remembers(Session):
    """Truncating leaves something behind."""

    def __init__(self, inner: TokenSession) -> None:
        super().__init__(inner)
        self.num_truncated = 0

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.num_truncated += 1

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        return super().forward(token_ids, num_rows=num_rows) + np.float32(self.num_truncated // 2)


class KeepsAll(Session):
    def truncate(self, length: int) -> None:
        pass


class FirstRows(Session):
    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        if len(token_ids) > 16:
            return super().forward(token_ids, num_rows=num_rows)
        return super().forward(token_ids, num_rows=len(token_ids))[:num_rows]


class AllRows(Session):
    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        return super().forward(token_ids, num_rows=len(token_ids) if len(token_ids) <= 16 else num_rows)


class Doubles(Session):
    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        return super().forward(token_ids, num_rows=num_rows).astype(np.float64)


class Nan(Session):
    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        return super().forward(token_ids, num_rows=num_rows) * np.float32("nan")


class ClosesOnce(Session):
    def close(self) -> None:
        super().close()
        if self.num_closed > 1:
            raise RuntimeError("is closed")


class Begun(Session):
    def __init__(self, inner: TokenSession) -> None:
        super().__init__(inner)
        inner.forward([1], num_rows=1)


def shared_logits() -> Callable[[TokenSession], TokenSession]:
    """Sessions whose logits remember which token any of them read last."""
    last = [0]

    class Shared(Session):
        def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
            began = self.length == 0 or len(token_ids) > 1
            logits = super().forward(token_ids, num_rows=num_rows) + np.float32(0 if began else last[0])
            last[0] = token_ids[-1]
            return logits

    return Shared


class Strips(ByteTokenizer):
    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).strip()


class ReadsControl(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return [self.eos_token_id] if text.startswith("<|endoftext|>") else super().encode(text)


class ShowsEos(ByteTokenizer):
    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids) + "</s>" * (self.eos_token_id in token_ids)


class AddsBeginning(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return [258, *super().encode(text)]


class ForgetsThePrefix(ByteTokenizer):
    def encode_chat(self, request: ChatRequest) -> list[int]:
        return self.encode(request.messages[0].text)


class SaysNothing(ByteTokenizer):
    def encode_chat(self, request: ChatRequest) -> list[int]:
        return self.encode(request.prefix)


class Unmarked(ByteTokenizer):
    fingerprint = ""


@pytest.mark.parametrize(
    "make",
    [
        TableModel,
        Model,
        partial(Model, Wide, same_text=False),
        partial(TableModel, "some text", vocab_size=300, order=2),
        partial(TableModel, max_width=1),
        partial(TableModel, max_width=8, context_length=9),
        partial(TableModel, nan_at={4000}),
    ],
    ids=["table", "wrapped", "not same text", "text", "narrow", "short", "faults far away"],
)
def test_a_model_that_keeps_the_contract_passes(make: Callable[[], TableModel]) -> None:
    """Nothing but promises is required; a model that does not claim `same_text` may depend on the width."""
    model = make()
    check_token_model_conformance(model)
    assert model.num_open == 0


def test_texts_may_be_restricted() -> None:
    """A tokenizer of few characters is checked with texts of its own."""
    check_token_model_conformance(TableModel(tokenizer=CharTokenizer("abc")), texts=["", "abccba"])


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (partial(Model, Wide), "same_text is set, but logits differ by .* at width 2"),
        (partial(Model, LooksAhead), "same_text is set, but logits differ"),
        (partial(Model, Remembers, same_text=False), r"after truncate\(1\) the same tokens must give the same logits"),
        (partial(Model, KeepsAll), "length must be 1; it is 17"),
        (partial(Model, FirstRows), "num_rows=1 must give the last 1 rows"),
        (partial(Model, AllRows), "logits must be of shape"),
        (partial(Model, Doubles), "logits must be float32; they are float64"),
        (partial(Model, Nan), "logits must not be NaN"),
        (partial(Model, ClosesOnce), "closing twice must be harmless"),
        (partial(Model, Begun), "a new session must be empty"),
        (lambda: Model(shared_logits(), same_text=False), "two sessions must not disturb each other"),
        (partial(TableModel, name=""), "name must not be empty"),
        (partial(TableModel, max_width=0), "max_width must be at least 1"),
        (partial(TableModel, context_length=1), "context_length must be above 1"),
        (lambda: TableModel(tokenizer=Unmarked()), "fingerprint must not be empty"),
        (lambda: TableModel(tokenizer=Strips()), "must give it back"),
        (lambda: TableModel(tokenizer=ReadsControl()), "must not add or read an EOS"),
        (lambda: TableModel(tokenizer=ShowsEos()), "decode must leave EOS 256 out"),
        (lambda: TableModel(tokenizer=AddsBeginning()), "must be below vocab_size 258"),
        (lambda: TableModel(tokenizer=ForgetsThePrefix()), "must put the request's prefix into the prompt"),
        (lambda: TableModel(tokenizer=SaysNothing()), "encode_chat must give at least one id"),
    ],
)
def test_a_broken_promise_is_named(make: Callable[[], TableModel], promise: str) -> None:
    """Each fault fails by its own promise, in one line, and no session stays open."""
    model = make()
    with pytest.raises(ConformanceError, match=promise) as caught:
        check_token_model_conformance(model)
    assert "\n" not in str(caught.value)
