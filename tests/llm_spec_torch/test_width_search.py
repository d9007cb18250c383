"""Widths are found part by part and kept between loads, shown with rows whose bits are known."""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llm_spec_torch import TorchModel, TorchProvider
from llm_spec_torch import model as model_module
from llm_spec_torch.network import TransformerNetwork
from llm_spec_torch.width_search import AgreeingWidthSearch
from torch import Tensor

from llm_spec import SpeculativeDecoder
from llm_spec.testing import RandomDraft

WIDTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16]
HEAD = 0  # in place of a number of keys


class Fault(NamedTuple):
    """Passes whose rows have other bits: by width, by how many keys attention reads, by the number of layers."""

    widths: Sequence[int] = ()
    num_keys: Sequence[int] = (HEAD, 256, 512, 768)
    min_layers: int = 0

    def error(self, network: TransformerNetwork, width: int, num_keys: int) -> float:
        is_hit = width in self.widths and num_keys in self.num_keys and len(network.layers) >= self.min_layers
        return 1e-6 * is_hit


Plant = Callable[[Fault], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Rows that have nothing to do with each other agree on every CPU, but for a fault, which each call changes.

    Additions in place of layers: the search looks at bits alone, and that real layers run is shown elsewhere.
    """
    logits = TransformerNetwork.compute_logits
    faults = [Fault()]

    def compute_hidden(self: TransformerNetwork, ids: Tensor, positions: Tensor, cache: Any, num_keys: int) -> Tensor:  # noqa: ARG001 - its signature
        rows = (self.look_up_embeddings(ids) + positions[..., None]).flatten(end_dim=1)
        return rows * (1 + faults[-1].error(self, len(rows), num_keys))

    def compute_logits(self: TransformerNetwork, states: Tensor) -> Tensor:
        rows = torch.cat([logits(self, row) for row in states.split(1)])
        return rows * (1 + faults[-1].error(self, len(rows), HEAD))

    monkeypatch.setattr(model_module, "check_logits_match", lambda *_: None)
    monkeypatch.setattr(TransformerNetwork, "compute_hidden_states", compute_hidden)
    monkeypatch.setattr(TransformerNetwork, "compute_logits", compute_logits)
    return faults.append


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where findings are kept."""
    monkeypatch.setenv("LLM_SPEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for every search from the beginning."""
    find, counted = AgreeingWidthSearch.search_agreeing_widths, list[int]()

    def count(self: AgreeingWidthSearch, candidates: Sequence[int], max_width: int) -> list[int]:
        counted.append(max_width)
        return find(self, candidates, max_width)

    monkeypatch.setattr(AgreeingWidthSearch, "search_agreeing_widths", count)
    return counted


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what becomes of a finding, whatever was found and however."""
    monkeypatch.setattr(AgreeingWidthSearch, "search_agreeing_widths", lambda self, candidates, max_width: [2, 3, 5])  # noqa: ARG005 - its signature
    monkeypatch.setattr(AgreeingWidthSearch, "are_widths_still_agreeing", lambda self, widths: True)  # noqa: ARG005 - as above


def load_widths(folder: Path) -> list[int]:
    model = TorchModel(folder, device="cpu", max_requests=1)
    return list(model.pass_widths) if model.same_text else []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(),
        Fault([5], num_keys=[256]),
        Fault([6], num_keys=[768]),
        Fault([8, 12], num_keys=[HEAD]),
        Fault([10], num_keys=[256], min_layers=2),
        Fault(range(16)),
    ],
    ids=["none", "a layer", "many keys", "head", "a later layer", "all but the widest"],
)
def test_a_width_that_differs_anywhere_is_left_out(tiny_folder: Path, plant: Plant, fault: Fault) -> None:
    """In a layer, behind many keys, in the head, or only where all layers are read."""
    plant(fault)
    assert load_widths(tiny_folder) == [width for width in WIDTHS if width not in fault.widths]


@pytest.mark.parametrize(
    ("fault", "keeps_promise"),
    [(Fault(), True), (Fault([5], num_keys=[1024]), False), (Fault([7], num_keys=[1024]), True)],
    ids=["none", "a width", "a width that no pass has"],
)
def test_more_keys_are_looked_at_before_the_first_pass_that_reads_them(
    tiny_folder: Path, plant: Plant, fault: Fault, keeps_promise: bool
) -> None:
    """A search looks at 768; behind a prompt of any length the promise holds until a short pass reads more."""
    plant(fault)
    model = TorchModel(tiny_folder, device="cpu", max_requests=1)
    with closing(model.open()) as session:
        session.forward([6] * 760, num_rows=1)
        session.forward([6], num_rows=1)
        assert model.same_text
        session.forward([6] * 20, num_rows=1)  # a prompt, which has one shape with a draft and without
        assert model.same_text
        session.forward([6, 6], num_rows=1)
        assert model.same_text == keeps_promise
    with closing(model.open()) as session:  # and so it stays
        session.forward([7], num_rows=1)
    assert model.same_text == keeps_promise


def test_the_time_of_a_look_is_not_that_of_a_pass(
    tiny_folder: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookahead is chosen by what passes cost."""
    plant(Fault())
    model = TorchModel(tiny_folder, device="cpu", max_requests=1)
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    with closing(model.open()) as session:
        session.forward([6], num_rows=1)
        assert session.forward_cost_s is None
        session.forward([6] * 800, num_rows=1)
        assert session.forward_cost_s is None
        session.forward([6], num_rows=1)  # read at its begin and its end, and twice in between
        assert session.forward_cost_s == 2.0


@pytest.mark.parametrize("drafted", [True, False])
async def test_an_answer_that_outgrows_the_promise_says_so(tiny_folder: Path, plant: Plant, drafted: bool) -> None:
    """Its text is exact all the same. Without a draft it is the target's own, whatever the widths."""
    plant(Fault([2], num_keys=[1024]))
    provider = TorchProvider(TorchModel(tiny_folder, device="cpu", max_requests=1))
    decoder = SpeculativeDecoder(target=provider, draft=RandomDraft() if drafted else None)
    short, long = "x", "x" * 1500
    assert (await decoder.decode(short, max_tokens=8)).same_text
    result = await decoder.decode(long, max_tokens=30)
    assert result.usage is not None
    assert result.usage.input_tokens < 768 < result.usage.input_tokens + result.usage.output_tokens
    assert (result.guarantee, result.same_text) == ("exact", not drafted)
    assert (await decoder.decode(short, max_tokens=8)).same_text == (not drafted)


def test_a_finding_is_kept_and_used(
    tiny_folder: Path,
    plant: Plant,
    folder: Path,
    searches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second load does not search; one of another kind does, as when nothing may be kept."""
    plant(Fault([3]))
    found = load_widths(tiny_folder)
    assert (load_widths(tiny_folder), len(searches)) == (found, 1)
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    TorchModel(tiny_folder, device="cpu", max_requests=1, attention="eager")
    assert len(searches) == 2
    monkeypatch.setattr(model_module, "describe_cpu_for_kernels", lambda: {"processor": "another"})
    assert (load_widths(tiny_folder), len(searches)) == (found, 3)
    monkeypatch.setenv("LLM_SPEC_CACHE_DIR", "")
    assert (load_widths(tiny_folder), len(searches), len(list(folder.iterdir()))) == (found, 4, 3)


@pytest.mark.parametrize("num_keys", [HEAD, 256, 512, 768], ids=["head", "256 keys", "512 keys", "768 keys"])
@pytest.mark.usefixtures("folder")
def test_a_finding_that_is_no_longer_true_is_not_used(
    tiny_folder: Path, plant: Plant, searches: list[int], num_keys: int
) -> None:
    """What has changed without a trace in versions and CPU is found out, and the new finding kept."""
    plant(Fault())
    assert load_widths(tiny_folder) == WIDTHS
    plant(Fault([4], num_keys=[num_keys]))
    right = [width for width in WIDTHS if width != 4]
    assert (load_widths(tiny_folder), len(searches)) == (right, 2)
    assert (load_widths(tiny_folder), len(searches)) == (right, 2)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"widths": [2, 16]}',
        *[
            json.dumps({"facts": None, "widths": widths}).encode()
            for widths in (2, ["a"], [None], [], [0, 2], [4, 2], [99])
        ],
    ],
    ids=lambda text: text[:40].decode(errors="replace"),
)
@pytest.mark.usefixtures("quick_search")
def test_a_broken_or_foreign_file_is_the_same_as_none(
    tiny_folder: Path, folder: Path, searches: list[int], text: bytes
) -> None:
    """The widths are searched again, and the file is written anew."""
    found = load_widths(tiny_folder)
    (path,) = folder.iterdir()
    kept = path.read_bytes()
    path.write_bytes(text.replace(b"null, ", json.dumps(json.loads(kept)["facts"]).encode() + b", ", 1))
    assert (load_widths(tiny_folder), len(searches), path.read_bytes()) == (found, 2, kept)


def test_a_folder_that_cannot_be_written_is_no_error(
    tiny_folder: Path, plant: Plant, folder: Path, searches: list[int]
) -> None:
    """A file stands where the folder would be; each load searches."""
    plant(Fault())
    folder.write_text("")
    assert [load_widths(tiny_folder), load_widths(tiny_folder)] == [WIDTHS, WIDTHS]
    assert (len(searches), folder.read_text()) == (2, "")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
def test_a_loaded_model_holds_no_more_of_its_file_than_the_table_of_embeddings(
    make_checkpoint: Callable[..., Path],
) -> None:
    """transformers maps the weights; a part of them that was kept would keep all in memory."""
    folder = make_checkpoint("qwen3")
    model = TorchModel(folder, device="cpu", max_requests=1)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    sizes = [int(end, 16) - int(start, 16) for start, end in (line[0].split("-") for line in lines)]
    table = model.vocab_size * 32 * 4
    assert table <= sum(sizes) <= table + 2 * mmap.PAGESIZE
