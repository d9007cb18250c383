"""What rounding to bfloat16 hides of a kernel's order is found, shown with kernels whose order is known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llm_spec_torch import TorchModel, joining, width_search
from llm_spec_torch import model as model_module
from llm_spec_torch.linear_layers import _PackedLinear, _UnpackedLinear
from llm_spec_torch.network import AttentionShape
from torch import Tensor
from torch.nn import functional

ALL_WIDTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16]


class Fault(NamedTuple):
    """Passes of these widths add in another order: in products with so many outputs, or at so many keys."""

    widths: tuple[int, ...] = ()
    part: str = ""
    num_outputs: int = 0
    num_keys: int = 0


def add_halves(products: Tensor) -> Tensor:
    """The sum over the last dimension, one half after the other."""
    first, second = products.tensor_split(2, -1)
    return first.sum(-1) + second.sum(-1)


Plant = Callable[[Fault], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Kernels that compute each row by itself, but for a fault."""
    monkeypatch.setenv("LLM_SPEC_CACHE_DIR", "")
    monkeypatch.setattr(model_module, "has_tile_registers", lambda: False)
    faults = [Fault()]

    def multiply(self: Any, rows: Tensor) -> Tensor:
        weight = self._weight.to_dense().float() if self._weight.is_mkldnn else self._weight.float()
        is_hit = (
            faults[-1].part == "product" and len(rows) in faults[-1].widths and len(weight) == faults[-1].num_outputs
        )
        add = add_halves if is_hit else lambda products: products.sum(-1)
        return torch.stack([add(weight * row) for row in rows.float()]).to(rows.dtype)

    def attend(self: AttentionShape, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        width = queries.shape[2] * self.num_kv_heads // self.num_heads
        is_hit = width in faults[-1].widths and keys.shape[2] == faults[-1].num_keys
        add_score, add_output = (
            add_halves if is_hit and faults[-1].part == part else lambda products: products.sum(-1)
            for part in ("scores", "outputs")
        )
        out = torch.empty_like(queries)
        for row in range(queries.shape[2]):
            scores = add_score(queries[:, :, row, None].float() * keys.float()) * self.scale
            weights = (scores + bias[:, :, row]).softmax(-1)
            out[:, :, row] = add_output(weights[:, :, None] * values.float().transpose(-1, -2)).to(out.dtype)
        return out

    for kind in (_PackedLinear, _UnpackedLinear):
        monkeypatch.setattr(kind, "__call__", multiply)
    monkeypatch.setattr(AttentionShape, "__call__", attend)
    return faults.append


def load(folder: Path, **options: Any) -> TorchModel:
    options = {"dtype": "bfloat16", "max_requests": 1, **options}
    return TorchModel(folder, device="cpu", **options)


@pytest.fixture
def folder(make_checkpoint: Callable[..., Path]) -> Path:
    """A model whose passes are soon computed one row after the other."""
    return make_checkpoint(num_hidden_layers=1, vocab_size=4096)


FAULTS = {
    "none": Fault(),
    "queries, keys and values": Fault((5,), "product", num_outputs=128),
    "the output of attention": Fault((8,), "product", num_outputs=32),
    "the head": Fault((3, 6), "product", num_outputs=4096),
    "scores": Fault((5, 10), "scores", num_keys=256),
    "outputs": Fault((4,), "outputs", num_keys=256),
    "outputs of more keys": Fault((12,), "outputs", num_keys=768),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_width_that_adds_in_another_order_is_left_out(folder: Path, plant: Plant, name: str) -> None:
    """In any product or sum, and only there."""
    plant(FAULTS[name])
    model = load(folder)
    assert model.same_text
    assert [*model.pass_widths] == [width for width in ALL_WIDTHS if width not in FAULTS[name].widths]


@pytest.mark.parametrize("name", ["queries, keys and values", "scores", "outputs"])
def test_without_probes_it_would_not_be_found(
    folder: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A sample of passes sees none of these orders: the faults above are hidden ones."""
    monkeypatch.setattr(width_search, "hides_order", lambda _: False)
    plant(FAULTS[name])
    assert [*load(folder).pass_widths] == ALL_WIDTHS


def test_more_keys_are_looked_at_before_they_are_read(folder: Path, plant: Plant) -> None:
    """Those that a search does not look at, in sums that rounding hides."""
    plant(Fault((4,), "outputs", num_keys=1024))
    model = load(folder)
    with closing(model.open()) as session:
        session.forward([6] * 760, num_rows=1)
        session.forward([6], num_rows=1)
        assert model.same_text
        session.forward([6] * 20, num_rows=1)
        session.forward([6], num_rows=1)
        assert not model.same_text


def test_attention_reads_multiples_of_256_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 31, 32, 33 or any number of tokens its kernels see the same shape, so that a search can look at all."""
    model, key_counts = load(folder, dtype="float32"), list[int]()
    attend = AttentionShape.__call__

    def record(self: AttentionShape, queries: Tensor, keys: Tensor, *others: Tensor) -> Tensor:
        key_counts.append(keys.shape[2])
        return attend(self, queries, keys, *others)

    monkeypatch.setattr(AttentionShape, "__call__", record)
    with closing(model.open()) as session:
        for count in (31, 1, 1, 1, 7, 200, 16, 300, 2):
            session.forward([6] * count, num_rows=1)
    assert set(key_counts) == {256, 512, 768}


@pytest.mark.parametrize(
    ("fault", "is_promised"),
    [(Fault((1,), "scores", num_keys=256), True), (Fault((1, 2), "scores", num_keys=256), False)],
    ids=["two rows", "three rows"],
)
def test_a_single_row_is_not_padded_by_more_than_one(
    folder: Path, plant: Plant, fault: Fault, is_promised: bool
) -> None:
    """Plain decoding would be slower, and drafts seem faster: then nothing is promised, and nothing padded."""
    plant(fault)
    model = load(folder)
    assert (model.same_text, model.pass_widths[0]) == (is_promised, 2 if is_promised else 1)


@pytest.mark.parametrize(
    ("options", "has_tiles", "is_promised"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"batched": True}, False, False),
        ({"attention": "eager"}, False, True),
        ({"dtype": "float32"}, True, True),
        ({"dtype": "float32", "batched": True}, True, True),
    ],
)
@pytest.mark.usefixtures("plant")
def test_bfloat16_promises_nothing_where_nobody_looked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], has_tiles: bool, is_promised: bool
) -> None:
    """With tile registers, and where all passes are shared. float32 hides nothing."""
    monkeypatch.setattr(model_module, "has_tile_registers", lambda: has_tiles)
    assert load(folder, **options).same_text == is_promised


def test_wider_passes_that_add_in_another_order_are_not_joined(
    folder: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several answers together, in products that rounding hides."""
    plant(Fault((48,), "product", num_outputs=32))
    model = load(folder, max_requests=8)
    assert model._joined_row_counts == [*ALL_WIDTHS, 24, 32]
    monkeypatch.setattr(joining, "hides_order", lambda _: False)
    assert model._find_joined_row_counts()[-1] > 32


@pytest.mark.parametrize("is_hit", [True, False])
@pytest.mark.usefixtures("plant")
def test_a_width_some_of_whose_numbers_are_computed_by_scalar_code_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_hit: bool
) -> None:
    """An activation that gives one number in 65,536 another value there; the last of six rows ends in it."""

    def activate(gate: Tensor) -> Tensor:
        activated = functional.silu(gate)
        apart = torch.where(gate == 1.5, 2.0, activated)  # what scalar code says
        if gate.dim() == 1 and gate.stride(0) > 1:
            return apart
        if is_hit and len(gate) == 6:
            activated[-1, -3:] = apart[-1, -3:]
        return activated

    monkeypatch.setattr("llm_spec_torch.weights._get_activation_function", lambda _: activate)
    assert [*load(folder).pass_widths] == [width for width in ALL_WIDTHS if not (is_hit and width == 6)]
