"""Passes that are joined whenever several wait: when they are, how many, and which faults are found at load."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_spec_torch import TorchModel, pass_queue
from llm_spec_torch.network import SequenceRows, TransformerNetwork
from llm_spec_torch.session import TorchSession

from llm_spec.local.caches import prefill_prompt

IDS = [int(t) for t in np.random.default_rng(6).integers(8, 4096, 900)]
LONG_S = 120.0
LENGTHS = (3, 250, 300, 505)  # of the prompts: attention reads other numbers of keys after each


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> TorchModel:
    model = TorchModel(tiny_folder, device="cpu")
    if model._batching is None:
        pytest.skip("rows of joined passes have other bits on this machine")
    return model


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many tokens each sequence of a joined pass has, pass by pass, and then how many rows they are."""
    lengths: list[list[int]] = []
    right = TransformerNetwork.compute_joined_hidden_states

    def record(self: TransformerNetwork, joined: Sequence[SequenceRows], cache: Any, num_rows: int) -> torch.Tensor:
        lengths.append([*(len(each.token_ids) for each in joined), num_rows])
        return right(self, joined, cache, num_rows)

    monkeypatch.setattr(TransformerNetwork, "compute_joined_hidden_states", record)
    return lengths


def read_at_once(model: TorchModel, sessions: Sequence[TorchSession], parts: Sequence[Sequence[int]]) -> list[Any]:
    """Each session's rows; all have handed in their passes before the first is run."""
    queue = model._batching._queue  # type: ignore[union-attr]
    queue._has_leader = True
    rows: list[Any] = [None] * len(parts)

    def read(index: int) -> None:
        rows[index] = sessions[index].forward(parts[index], num_rows=len(parts[index])).copy()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(parts))]
    for count, thread in enumerate(threads, 1):
        thread.start()
        limit = threading.Event()
        while len(queue._waiting) < count:
            limit.wait(0.001)
    with queue._lock:
        queue._stop_leading()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    return rows


def pad_rows(model: TorchModel, num_tokens: int) -> int:
    """How many rows a joined pass of so many tokens has."""
    return next(count for count in model._find_joined_row_counts() if count >= num_tokens)


def read_after_prompts(model: TorchModel, parts: Sequence[Sequence[int]], *, at_once: bool) -> list[Any]:
    with ExitStack() as stack:
        sessions = [stack.enter_context(closing(model.open())) for _ in parts]
        for session, length in zip(sessions, LENGTHS, strict=False):
            prefill_prompt(session, IDS[:length])
        if at_once:
            return read_at_once(model, sessions, parts)
        return [session.forward(part, num_rows=len(part)).copy() for session, part in zip(sessions, parts, strict=True)]


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (1, 4, 2, 3), (5, 1, 6, 4), (8, 6), (7, 6, 16, 5)])
def test_joined_rows_are_those_of_each_alone(
    model: TorchModel, sequences: list[list[int]], lengths: Sequence[int]
) -> None:
    """Bit for bit, in one pass that is as wide as the next width that agrees."""
    parts = [IDS[700 + 20 * index : 700 + 20 * index + length] for index, length in enumerate(lengths)]
    alone = read_after_prompts(model, parts, at_once=False)
    sequences.clear()
    together = read_after_prompts(model, parts, at_once=True)
    assert sequences[-1] == [*lengths, pad_rows(model, sum(lengths))]
    assert all(np.array_equal(found, right) for found, right in zip(together, alone, strict=True))


def test_joined_rows_are_right_whatever_their_last_bits(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine, also where such passes would not be joined; fewer rows than tokens are the last ones."""
    monkeypatch.setattr("llm_spec_torch.model.find_joined_row_counts", lambda _, shape, **__: [*shape.widths, 64])
    model = TorchModel(tiny_folder, device="cpu")
    parts = [IDS[700:703], IDS[720:724], IDS[740:741]]
    alone = read_after_prompts(TorchModel(tiny_folder, device="cpu", batched=False), parts, at_once=False)
    together = read_after_prompts(model, parts, at_once=True)
    for found, right in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)
    with closing(model.open()) as session:
        prefill_prompt(session, IDS[: LENGTHS[0]])
        np.testing.assert_allclose(session.forward(parts[0], num_rows=1)[0], alone[0][-1], rtol=1e-3, atol=1e-3)


def test_what_is_too_much_for_one_pass_waits_for_the_next(
    model: TorchModel, sequences: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go first, and their rows are the same."""
    monkeypatch.setattr(model._batching._exact, "_row_counts", model.pass_widths)  # type: ignore[union-attr]
    lengths = (7, 6, 6, 3)
    parts = [IDS[700 + 20 * index : 700 + 20 * index + length] for index, length in enumerate(lengths)]
    alone = read_after_prompts(model, parts, at_once=False)
    together = read_after_prompts(model, parts, at_once=True)
    assert [joined[:-1] for joined in sequences[-2:]] == [[7, 6], [6, 3]]
    assert all(np.array_equal(found, right) for found, right in zip(together, alone, strict=True))


def test_a_pass_may_be_filled(model: TorchModel, sequences: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many tokens as it has room for."""
    monkeypatch.setattr(model._batching._exact, "_row_counts", model.pass_widths)  # type: ignore[union-attr]
    first = model.max_width - 4  # the second prompt ends 6 places before a border of attention's steps
    read_after_prompts(model, [IDS[700 : 700 + first], IDS[720:724]], at_once=True)
    assert sequences[-1] == [first, 4, model.max_width]


def test_a_pass_without_tokens_is_refused(model: TorchModel) -> None:
    """And the next one is run."""
    with closing(model.open()) as session:
        with pytest.raises(ValueError, match="token_ids is empty"):
            session.forward([], num_rows=0)
        assert np.isfinite(session.forward(IDS[:3], num_rows=1)).all()


def test_an_error_does_not_keep_the_model(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has been handled, the memory goes with the last reference."""
    model = TorchModel(tiny_folder, device="cpu", max_requests=2)
    cache = weakref.ref(model._pool.cache.layers[0])

    def fail(*_: Any) -> None:
        raise RuntimeError("the kernel failed")

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patched, closing(model.open()) as session:
            patched.setattr(TransformerNetwork, "_run_layers", fail)
            with contextlib.suppress(RuntimeError):
                session.forward(IDS[:3], num_rows=1)
        del session, model
        assert cache() is None
    finally:
        gc.enable()


def test_who_runs_alone_waits_for_nobody(
    model: TorchModel, sequences: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its passes are as wide as without the others, which only read their prompts."""
    monkeypatch.setattr(pass_queue, "_MAX_WAIT_RATIO", 1e8)
    with closing(model.open()) as session, closing(model.open()) as other:
        prefill_prompt(other, IDS[:300])
        sequences.clear()
        for count in (1, 5, 1):
            session.forward(IDS[:count], num_rows=1)
    assert sequences == [[count, model._exact_shape.pad_width(count)] for count in (1, 5, 1)]


@pytest.mark.parametrize("options", [{"batched": False}, {"max_requests": 1}])
def test_passes_are_not_joined_where_that_is_not_wanted(tiny_folder: Path, options: Any) -> None:
    assert TorchModel(tiny_folder, device="cpu", **options)._batching is None


# ------------------------------------------------------------------------------------- planted faults


def scale_states(monkeypatch: pytest.MonkeyPatch, choose: Callable[[torch.Tensor], torch.Tensor | float]) -> None:
    right = TransformerNetwork._run_layers

    def run(self: TransformerNetwork, *rest: Any) -> torch.Tensor:
        states = right(self, *rest)
        return states * choose(states)

    monkeypatch.setattr(TransformerNetwork, "_run_layers", run)


def bits_by_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is taken over all rows of a pass, as some quantized kernels do."""
    scale_states(monkeypatch, lambda states: 1 + 1e-6 * states.abs().max())


def bits_by_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sums in another order where there are more rows."""
    scale_states(monkeypatch, lambda states: 1 + 1e-6 * len(states))


def last_rows_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that treats what is left over of a block in another way."""

    def choose(states: torch.Tensor) -> torch.Tensor:
        factors = torch.ones(len(states), 1)
        factors[4:] = 1 + 1e-6
        return factors

    scale_states(monkeypatch, choose)


def neighbours_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads what the first sequence has cached."""
    right = TransformerNetwork._attend

    def attend(self: TransformerNetwork, queries: torch.Tensor, stored: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(self, queries, stored[:1].expand_as(stored), *rest)

    monkeypatch.setattr(TransformerNetwork, "_attend", attend)


def test_wider_passes_that_do_not_agree_are_left_out(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of as many rows as one session reads stay."""
    counts = model._find_joined_row_counts()
    if counts[-1] <= 32:
        pytest.skip("rows of wider passes have other bits on this machine")
    scale_states(monkeypatch, lambda states: 1 + 1e-6 * (len(states) > 32))
    assert list(model._find_joined_row_counts()) == [count for count in counts if count <= 32]


def test_wider_passes_of_which_the_head_does_not_agree_are_left_out(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TransformerNetwork.compute_logits

    def compute(self: TransformerNetwork, states: torch.Tensor) -> torch.Tensor:
        return right(self, states) * (1 + 1e-6 * (len(states) > model.max_width))

    monkeypatch.setattr(TransformerNetwork, "compute_logits", compute)
    assert model._find_joined_row_counts()[-1] == model.max_width


@pytest.mark.parametrize("fault", [bits_by_company, bits_by_number_of_rows, last_rows_in_another_way, neighbours_keys])
def test_a_planted_fault_is_found_when_the_model_is_loaded(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Each answer has its own passes then."""
    assert model._find_joined_row_counts()
    if len(model.pass_widths) == 1:
        pytest.skip("all passes have the same number of rows on this machine")
    fault(monkeypatch)
    assert not model._find_joined_row_counts()
