"""GGUF files as token models: the contract, and one clear error for whatever cannot be one."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_spec_gguf import GgufModel, GgufOptions, GgufProvider, library, model
from llm_spec_gguf.library import LlamaContext, LlamaModel
from llm_spec_gguf.width_search import AgreeingWidths
from support.gguf_models import WriteModel, byte_level_vocabulary, sentencepiece_vocabulary, write_mamba

from llm_spec import ConfigError, ProviderDraft, TargetError, open_provider
from llm_spec.contract.errors import ModelLoadError
from llm_spec.contract.token_model import PassTimingModel, PrefixReusingSession
from llm_spec.local.caches import PREFILL_CHUNK_TOKENS, prefill_prompt
from llm_spec.local.threads import count_usable_cores
from llm_spec.testing import check_token_model_conformance


@pytest.mark.parametrize("threads", [1, 2])
def test_trained_model_conforms(pair: dict[str, Path], threads: int) -> None:
    """Rows independent of the width among what is promised, wherever the model says so."""
    check_token_model_conformance(GgufModel(pair["target"], threads=threads, max_width=16))


@pytest.mark.parametrize("vocabulary", [byte_level_vocabulary(), sentencepiece_vocabulary()], ids=["bytes", "pieces"])
def test_tiny_model_conforms(write_model: WriteModel, vocabulary: dict[str, Any]) -> None:
    """With both kinds of vocabulary that most files have."""
    check_token_model_conformance(GgufModel(write_model(vocabulary=vocabulary), threads=1, max_width=16))


@pytest.mark.parametrize("max_width", [None, 16])
def test_model_without_flash_attention_conforms(pair: dict[str, Path], max_width: int | None) -> None:
    """With keys and values in another order, and other kernels."""
    check_token_model_conformance(GgufModel(pair["target"], threads=2, max_width=max_width, flash_attention=False))


@pytest.mark.parametrize(("options", "expected"), [({}, -1), ({"flash_attention": False}, 0)])
def test_flash_attention_is_llama_cpps_choice_but_where_it_is_switched_off(
    write_model: WriteModel, monkeypatch: pytest.MonkeyPatch, options: GgufOptions, expected: int
) -> None:
    """In the search for widths as in sessions."""
    seen: list[int] = []
    init = library.llama.llama_init_from_model

    def init_and_note(pointer: Any, parameters: Any) -> Any:
        seen.append(parameters.flash_attn_type)
        return init(pointer, parameters)

    monkeypatch.setattr(library.llama, "llama_init_from_model", init_and_note)
    session = GgufModel(write_model(), threads=1, **options).open()
    num_searches = len(seen)
    session.forward([5], num_rows=1)
    session.close()
    assert num_searches
    assert seen == [expected] * (num_searches + 1)


def test_rows_that_depend_on_the_width_are_not_promised(pair: dict[str, Path]) -> None:
    """`exact=False` gives up the promise and says so."""
    assert not GgufModel(pair["draft"], exact=False).same_text


@pytest.mark.parametrize(
    ("widths", "seconds", "given", "max_width"),
    [
        ([1, 4, 16], {1: 1.0, 4: 1.5, 16: 8.0}, None, 16),
        ([1, 4, 16], {1: 1.0, 4: 3.5, 16: 14.0}, None, 1),  # verifying takes nearly as long as writing
        ([1, 4, 16], {1: 1.0, 4: 4.5, 16: 7.0}, None, 16),  # but a long draft does not
        ([2, 4, 16], {1: 1.0, 2: 1.5, 4: 1.5, 16: 4.0}, None, 1),  # a plain step would take longer than without drafts
        ([2, 4, 16], {1: 1.0, 2: 1.05, 4: 1.5, 16: 4.0}, None, 16),
        ([2, 4, 16], {1: 1.0, 2: 2.0, 4: 4.0, 16: 14.0}, 16, 16),
    ],
)
def test_where_no_draft_can_pay_nothing_is_drafted(  # noqa: PLR0917 - fixtures and the combination
    write_model: WriteModel,
    monkeypatch: pytest.MonkeyPatch,
    widths: list[int],
    seconds: dict[int, float],
    given: int | None,
    max_width: int,
) -> None:
    """Unless a width was asked for; the text is promised all the same."""
    monkeypatch.setattr(model, "find_agreeing_widths", lambda *_, **__: AgreeingWidths(widths, seconds))
    loaded = GgufModel(write_model(), threads=1, max_width=given)
    assert (loaded.max_width, loaded.same_text) == (max_width, True)


def test_what_passes_cost_is_known_to_lookahead_from_the_first_answer_on(
    write_model: WriteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line through the widths of several rows, in plain steps; a pass is padded to a wider one that takes less.

    With what deviates from it, the costs are those that were measured.
    """
    seconds = {1: 2.0, 2: 5.0, 3: 7.0, 4: 6.0, 8: 8.0, 16: 12.0}
    monkeypatch.setattr(model, "find_agreeing_widths", lambda *_, **__: AgreeingWidths([1, 2, 3, 4, 8, 16], seconds))
    loaded = GgufModel(write_model(), threads=1)
    assert isinstance(loaded, PassTimingModel)
    assert loaded.pass_costs is not None
    costs = [loaded.pass_costs.wide + loaded.pass_costs.per_token * more for more in (1, 15)]
    assert costs == pytest.approx([1.5, 5.0], abs=0.8)
    line, deviations = loaded.pass_costs, loaded.pass_costs.deviations
    exact = [line.wide + line.per_token * more + deviations[more - 1] for more in range(1, 16)]
    assert exact == pytest.approx([1.5] + [2.0] * 2 + [3.0] * 4 + [5.0] * 8)
    session, widths = loaded.open(), list[int]()
    read = LlamaContext.read

    def read_and_note(self: LlamaContext, token_ids: Sequence[int], *, num_rows: int) -> np.ndarray:
        widths.append(len(token_ids))
        return read(self, token_ids, num_rows=num_rows)

    monkeypatch.setattr(LlamaContext, "read", read_and_note)
    for count in (1, 2, 3, 5, 9):
        session.forward([5] * count, num_rows=count)
    session.close()
    assert widths == [1, 2, 4, 8, 16]
    assert GgufModel(write_model(), threads=1, exact=False).pass_costs is None


@pytest.mark.parametrize("seconds", [{1: 1.0, 16: 4.0}, {1: 1.0}])
def test_one_width_beside_a_single_row_is_enough_for_a_cost(seconds: dict[int, float]) -> None:
    """A pass of any number of tokens is padded to it; and where there is none, none can be drafted."""
    costs = AgreeingWidths(list(seconds), seconds).pass_costs
    assert [costs.wide + costs.per_token * more for more in (1, 15)] == pytest.approx(
        [3.0, 3.0] if 16 in seconds else [0, 0]
    )


@pytest.mark.parametrize("flash_attention", [True, False])
def test_a_cache_that_is_full_moves_to_a_larger_one(
    write_model: WriteModel, monkeypatch: pytest.MonkeyPatch, *, flash_attention: bool
) -> None:
    """And keeps what was read, to the bit."""
    tiny = GgufModel(write_model(), threads=1, max_width=16, flash_attention=flash_attention)
    token_ids = [int(token_id) for token_id in np.random.default_rng(0).integers(0, tiny.vocab_size, 1400)]

    def read_all() -> np.ndarray:
        session = tiny.open()
        for start in range(0, 1390, 139):
            session.forward(token_ids[start : start + 139], num_rows=1)
        rows = session.forward(token_ids[1390:], num_rows=10).copy()
        session.close()
        return rows

    monkeypatch.setattr(tiny, "_first_capacity", 2048)
    expected = read_all()
    tiny.close()
    monkeypatch.setattr(tiny, "_first_capacity", 256)
    assert np.array_equal(read_all(), expected)


def test_ropes_that_depend_on_the_room_have_all_of_it_at_once(write_model: WriteModel) -> None:
    """What was read with other angles would not fit what comes."""
    path = write_model({"llama.rope.scaling.original_context_length": 512})
    assert GgufModel(path, threads=1, exact=False)._first_capacity == 2048


def test_closed_sessions_leave_no_more_than_two_caches_and_closing_the_model_none(tiny: GgufModel) -> None:
    """Memory is released on close, not when something is collected."""
    sessions = [tiny.open() for _ in range(4)]
    for session in sessions:
        session.forward([5], num_rows=1)
    contexts: list[LlamaContext] = [session._context for session in sessions]  # type: ignore[attr-defined]
    for session in sessions:
        session.close()
    assert sum(context.close.alive for context in contexts) == 2
    tiny.close()
    assert not any(context.close.alive for context in contexts)


def test_a_session_begins_empty_whatever_the_last_one_read(tiny: GgufModel) -> None:
    """Its cache is an earlier session's."""
    with_others, alone = [tiny.open(), tiny.open()], tiny.open()
    for session in with_others:
        session.forward([7, 8, 9], num_rows=1)
    for session in with_others:
        session.close()
    again = tiny.open()
    rows = again.forward([5, 6], num_rows=2).copy()
    assert np.array_equal(rows, alone.forward([5, 6], num_rows=2))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_before", [600, 1100])
def test_the_next_turn_reads_only_what_is_new(pair: dict[str, Path], threads: int, num_before: int) -> None:
    """Whole chunks of a prompt are taken over, with the bits of reading them again; also from a larger cache."""
    model, fresh_model = [GgufModel(pair["target"], threads=threads, max_width=16) for _ in range(2)]
    token_ids = [int(token_id) for token_id in np.random.default_rng(2).integers(8, model.vocab_size, 1400)]
    with closing(model.open()) as session:
        prefill_prompt(session, token_ids[:num_before])
        session.forward(token_ids[num_before : num_before + 3], num_rows=1)
    turn = [*token_ids[:700], *token_ids[900:950]]
    with closing(model.open()) as session:
        assert isinstance(session, PrefixReusingSession)
        assert session.reuse_prefix(turn) == 2 * PREFILL_CHUNK_TOKENS
        session.forward(turn[2 * PREFILL_CHUNK_TOKENS :], num_rows=1)
        taken_over = [session.forward(token_ids[start : start + 3], num_rows=3).copy() for start in (950, 953)]
    fresh = fresh_model.open()
    prefill_prompt(fresh, turn)
    expected = [fresh.forward(token_ids[start : start + 3], num_rows=3).copy() for start in (950, 953)]
    assert np.array_equal(taken_over, expected)


def test_what_was_read_in_rounds_is_read_again(tiny: GgufModel) -> None:
    """Its rows stood beside other ones; to a draft that does not matter."""
    token_ids = [int(token_id) for token_id in np.random.default_rng(3).integers(0, tiny.vocab_size, 600)]
    with closing(tiny.open()) as session:
        prefill_prompt(session, token_ids[:300])
        for token_id in token_ids[300:310]:
            session.forward([token_id], num_rows=1)
    with closing(tiny.open()) as session:
        assert isinstance(session, PrefixReusingSession)
        assert session.reuse_prefix(token_ids) == PREFILL_CHUNK_TOKENS
        session.forward(token_ids[PREFILL_CHUNK_TOKENS:306], num_rows=1)
    with closing(tiny.open(exact=False)) as session:
        assert isinstance(session, PrefixReusingSession)
        assert session.reuse_prefix([*token_ids[:303], 5, 6]) == 303


def test_two_conversations_keep_their_caches(tiny: GgufModel) -> None:
    """A third one takes the cache that has been idle for longest."""
    prompts = [[number] * PREFILL_CHUNK_TOKENS for number in (5, 6, 7)]
    expected = ([0, 0, PREFILL_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS, 0, 0, PREFILL_CHUNK_TOKENS], [0, 1, 0, 1, 2, 0, 2])
    for num_reused, index in zip(*expected, strict=True):
        with closing(tiny.open()) as session:
            assert isinstance(session, PrefixReusingSession)
            assert session.reuse_prefix(prompts[index]) == num_reused
            session.forward(prompts[index][num_reused:] or [5], num_rows=1)


def test_two_conversations_that_begin_alike_keep_their_caches(tiny: GgufModel) -> None:
    """As with one system prompt: each turn reads only what is new."""
    chunk = [5] * PREFILL_CHUNK_TOKENS
    turns = {name: [*chunk, *[other] * 2 * PREFILL_CHUNK_TOKENS] for name, other in (("one", 6), ("other", 7))}
    for num_reused, name in ((0, "one"), (0, "other"), (3, "one"), (3, "other"), (3, "one")):
        with closing(tiny.open()) as session:
            assert isinstance(session, PrefixReusingSession)
            assert session.reuse_prefix([*turns[name], 8]) == num_reused * PREFILL_CHUNK_TOKENS
            if not num_reused:
                prefill_prompt(session, turns[name])


def test_a_cache_that_has_moved_is_kept_once(tiny: GgufModel) -> None:
    """A copy would be found first by the next turn, and moved again; and it would take another conversation's place."""
    prompt = [number % 50 + 3 for number in range(2 * PREFILL_CHUNK_TOKENS)]
    for num_reused in (0, 2, 2):
        session = tiny.open()
        assert isinstance(session, PrefixReusingSession)
        assert session.reuse_prefix(prompt) == num_reused * PREFILL_CHUNK_TOKENS
        if not num_reused:
            prefill_prompt(session, prompt)
        for _ in range(800):  # tokens, in an answer that takes more room than the prompt
            session.forward([5], num_rows=1)
        session.close()
        assert len(tiny._contexts._idle) == 1


def test_sessions_compute_in_one_thread(pair: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes have several threads: OpenMP makes them wait for each other longer where several threads call it."""
    found: list[int] = []
    decode = library.llama.llama_decode

    def note_thread(*arguments: object) -> int:
        found.append(threading.get_ident())
        status: int = decode(*arguments)
        return status

    monkeypatch.setattr(library.llama, "llama_decode", note_thread)
    opened = GgufModel(pair["target"], threads=max(2, count_usable_cores()))
    with ThreadPoolExecutor(3) as requests:
        rows = list(requests.map(lambda number: opened.open().forward([number], num_rows=1).copy(), range(5, 11)))
    assert len(rows) == 6
    assert len(set(found)) == 1


class TestBadInput:
    """Each is one line that names the file and what is wrong with it."""

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"nowhere\.gguf cannot be read: No such file"):
            GgufModel(tmp_path / "nowhere.gguf")

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="cannot be read: Is a directory"):
            GgufModel(tmp_path)

    def test_not_a_gguf_file(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.gguf"
        path.write_bytes(b"PK\x03\x04" + bytes(100))
        with pytest.raises(ModelLoadError, match=r"weights\.gguf is not a GGUF file: it begins with b'PK"):
            GgufModel(path)

    @pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
    def test_cut_short(self, write_model: WriteModel, share: float) -> None:
        path = write_model()
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        with pytest.raises(ModelLoadError, match=r"tiny\.gguf is not a model that llama\.cpp can load: \S+"):
            GgufModel(path)

    def test_cut_short_among_weights(self, write_model: WriteModel) -> None:
        path = write_model()
        path.write_bytes(path.read_bytes()[:-10_000])
        with pytest.raises(ModelLoadError, match="corrupted or incomplete"):
            GgufModel(path)

    def test_unknown_architecture(self, write_model: WriteModel) -> None:
        with pytest.raises(ModelLoadError, match="unknown model architecture: 'abacus'"):
            GgufModel(write_model({"general.architecture": "abacus"}))

    def test_unknown_quantization(self, write_model: WriteModel) -> None:
        path = write_model()
        content = path.read_bytes()
        at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
        path.write_bytes(content[:at] + (250).to_bytes(4, "little") + content[at + 4 :])
        with pytest.raises(ModelLoadError, match="invalid ggml type 250"):
            GgufModel(path)

    def test_without_a_vocabulary(self, write_model: WriteModel) -> None:
        with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.model"):
            GgufModel(write_model({"tokenizer.ggml.model": None}))

    def test_recurrent_state(self, tmp_path: Path) -> None:
        """Rejected tokens could not be taken back from it."""
        with pytest.raises(ModelLoadError, match=r"mamba\.gguf keeps a recurrent state"):
            GgufModel(write_mamba(tmp_path / "mamba.gguf"))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("threads=0", "threads is 0; it must be an integer at least 1"),
            ("threads=many", "threads is 'many'; it must be a number"),
            ("max_width=1", "max_width is 1"),
            ("max_context=10", "max_context is 10"),
            ("exact=yes", "exact is 'yes'; it must be true or false"),
            ("gpu=1", "gguf has no option 'gpu'; it has threads, exact, max_width, flash_attention, max_context"),
        ],
    )
    def test_options(self, write_model: WriteModel, options: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            open_provider(f"gguf:{write_model()}?{options}")

    def test_no_file_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"gguf:/path/model\.gguf"):
            open_provider("gguf:")

    def test_failed_loads_leave_nothing_behind(self, write_model: WriteModel) -> None:
        """A model of which only the rest is wrong has been loaded; its memory goes with the error."""
        before = count_loaded_models()
        path = write_model({"tokenizer.chat_template": "{% if %}"})
        with pytest.raises(ModelLoadError, match=r"the chat template in .*tiny\.gguf is broken"):
            GgufModel(path)
        assert count_loaded_models() == before


def count_loaded_models() -> int:
    gc.collect()
    return sum(isinstance(thing, LlamaModel) for thing in gc.get_objects())


async def test_another_tokenizer_cannot_draft_by_ids(write_model: WriteModel, target: GgufProvider) -> None:
    """Ids would mean other texts; the reason says so."""
    other = ProviderDraft(GgufProvider(write_model(), threads=1))
    target_model = target.capabilities.token_model
    assert target_model is not None
    assert "have different tokenizers" in (other.token_draft_refusal(target_model) or "")


def run_python(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


_TOO_LITTLE = """
import gc, resource, sys
from llm_spec import TargetError
from llm_spec_gguf import GgufModel
model = GgufModel(sys.argv[1], threads=1, exact=False)
model._first_capacity = 4_000_000  # 1 GB
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, resource.RLIM_INFINITY))
session = model.open()
try:
    session.forward([5] * 256, num_rows=1)
except TargetError as error:
    print(error)
session.close()
model._first_capacity = 1024
print(model.open().forward([5, 6], num_rows=2).shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory, as Linux has them")
def test_too_little_memory(write_model: WriteModel) -> None:
    """One error that says what to do; the model goes on with what there is."""
    path = write_model({"llama.context_length": 4_000_000})
    run = run_python(_TOO_LITTLE, path)
    message = f"gguf:{path}: no memory for a key-value cache of 4000000 tokens; lower max_context"
    assert (run.stdout.splitlines(), run.returncode) == ([message, "(2, 262)"], 0), run


def test_memory_that_the_machine_does_not_have_is_not_taken(tiny: GgufModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be given, and the process ended when it is used."""
    monkeypatch.setattr(library, "_read_available_bytes", lambda: 1000 * 2**20)
    monkeypatch.setattr(tiny, "_first_capacity", 4_000_000)
    monkeypatch.setattr(tiny, "context_length", 4_000_000)
    with pytest.raises(TargetError, match="no memory for a key-value cache of 4000000 tokens; lower max_context"):
        tiny.open().forward([5], num_rows=1)


@pytest.mark.parametrize("flash_attention", [True, False])
def test_what_attention_keeps_without_flash_attention_is_counted(
    write_model: WriteModel, monkeypatch: pytest.MonkeyPatch, *, flash_attention: bool
) -> None:
    """A cache may fit and what a pass computes of it not."""
    loaded = GgufModel(write_model(), threads=1, flash_attention=flash_attention)
    monkeypatch.setattr(library, "_read_available_bytes", lambda: 160 * 2**20)
    monkeypatch.setattr(loaded, "_first_capacity", 40_960)
    monkeypatch.setattr(loaded, "context_length", 40_960)
    session = loaded.open()
    if flash_attention:
        session.forward([5], num_rows=1)
    else:
        with pytest.raises(TargetError, match="no memory for a key-value cache of 40960 tokens"):
            session.forward([5], num_rows=1)
    session.close()


def test_nothing_goes_to_the_standard_streams(write_model: WriteModel) -> None:
    """What llama.cpp reports goes to the library's logger."""
    program = "import sys; from llm_spec_gguf import GgufModel; GgufModel(sys.argv[1])"
    run = run_python(program, write_model())
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 0)


def test_what_llama_cpp_reports_is_logged(write_model: WriteModel, caplog: pytest.LogCaptureFixture) -> None:
    """For those who ask for it."""
    with caplog.at_level("DEBUG", logger="llm_spec.gguf"):
        GgufModel(write_model(), threads=1, max_width=16)
    assert "llama_model_loader" in caplog.text
