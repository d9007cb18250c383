"""TorchModel and its provider: the contracts, caches that are taken over, options, one clear error for bad input."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import shutil
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import llm_spec_torch
import numpy as np
import pytest
import torch
from llm_spec_torch import TorchModel, TorchProvider
from llm_spec_torch.checkpoint import find_checkpoint_folder, load_transformers_module, map_embedding
from llm_spec_torch.network import TransformerNetwork
from safetensors.torch import load_file, save_file
from support.hub import HubDouble, use_hub
from support.text_checks import check_one_text, check_texts

from llm_spec import (
    ChatRequest,
    ConfigError,
    InvalidRequestError,
    ModelOutputError,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
    open_provider,
)
from llm_spec.contract.errors import ModelLoadError
from llm_spec.local.caches import PREFILL_CHUNK_TOKENS, prefill_prompt
from llm_spec.testing import check_provider_conformance, check_token_model_conformance

from .conftest import MakeCheckpoint

IDS = [int(t) for t in np.random.default_rng(3).integers(8, 4096, 700)]


# ------------------------------------------------------------------------------------------ contracts


@pytest.mark.parametrize("options", [{}, {"max_width": 5}, {"attention": "eager"}, {"dtype": "bfloat16"}])
def test_keeps_the_promises_of_a_token_model(tiny_folder: Path, options: dict[str, Any]) -> None:
    """Where it says that rows do not depend on the width, they do not."""
    check_token_model_conformance(TorchModel(tiny_folder, **options))


def test_without_exact_it_is_as_wide_as_its_tokens(tiny_folder: Path) -> None:
    """And promises no same text."""
    model = TorchModel(tiny_folder, exact=False)
    assert not model.same_text
    check_token_model_conformance(model)


def test_without_exact_no_row_is_added(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token is one row, in sessions of a model without the promise and in drafts of one with it."""
    widths: list[int] = []
    compute = TransformerNetwork.compute_hidden_states

    def record(self: TransformerNetwork, ids: torch.Tensor, *others: Any) -> torch.Tensor:
        widths.append(ids.shape[1])
        return compute(self, ids, *others)

    models = TorchModel(tiny_folder, exact=False, batched=False), TorchModel(tiny_folder, batched=False)
    monkeypatch.setattr(TransformerNetwork, "compute_hidden_states", record)
    for session in (models[0].open(), models[1].open(exact=False)):
        with closing(session):
            for count in (1, 2, 7):
                session.forward(IDS[:count], num_rows=count)
    assert widths == 2 * [1, 2, 7]


async def test_keeps_the_promises_of_a_provider(tiny_model: TorchModel) -> None:
    """Streaming, leaving, errors; one loaded checkpoint stands all of it."""
    await check_provider_conformance(lambda: TorchProvider(tiny_model), patience_s=600.0)


def test_a_string_opens_it_with_options(tiny_folder: Path) -> None:
    """Each in its type; the name has no options in it."""
    provider = open_provider(f"torch:{tiny_folder}?dtype=bfloat16&layers=2&max_requests=2&exact=false&cache_gib=0.5")
    model: Any = provider.capabilities.token_model
    assert provider.name == f"torch:{tiny_folder}"
    assert (model.dtype, model.same_text) == (torch.bfloat16, False)


def test_padded_vocabularies_draft_for_each_other(make_checkpoint: MakeCheckpoint, tiny_model: TorchModel) -> None:
    """151936 against 152064 columns: the tokenizer counts, not the padding."""
    wider = TorchModel(make_checkpoint(vocab_size=4160))
    assert wider.vocab_size == 4160
    for target, draft in ((tiny_model, wider), (wider, tiny_model)):
        assert ProviderDraft(TorchProvider(draft)).token_draft_refusal(target) is None


async def test_a_wider_draft_writes_the_targets_text(make_checkpoint: MakeCheckpoint, tiny_model: TorchModel) -> None:
    """With columns that the target does not have, and the other way round."""
    wider = TorchModel(make_checkpoint(vocab_size=4160))
    for target, draft in ((tiny_model, wider), (wider, tiny_model)):
        options: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 2}
        plain = await SpeculativeDecoder(target=TorchProvider(target), draft=None).decode("def f():", **options)
        decoder = SpeculativeDecoder(
            target=TorchProvider(target),
            draft=ProviderDraft(TorchProvider(draft)),
            config=SpeculativeConfig(strategy="tokens"),
        )
        result = await decoder.decode("def f():", **options)
        check_one_text(result, plain, target)


# -------------------------------------------------------------------------------------------- caches


def test_the_next_turn_reads_only_what_is_new(tiny_folder: Path) -> None:
    """Whole chunks of a prompt are taken over, and give the same bits as reading them again."""
    model = TorchModel(tiny_folder, max_requests=2)
    with closing(model.open()) as session:
        prefill_prompt(session, IDS[:600])
    with closing(model.open()) as session:
        assert session.reuse_prefix(IDS[:650]) == 2 * PREFILL_CHUNK_TOKENS
        session.forward(IDS[512:650], num_rows=1)
        taken_over = session.forward(IDS[650:653], num_rows=3).copy()
    fresh = TorchModel(tiny_folder).open()
    prefill_prompt(fresh, IDS[:650])
    assert np.array_equal(fresh.forward(IDS[650:653], num_rows=3), taken_over)


def test_a_chunk_that_differs_is_read_again(tiny_folder: Path) -> None:
    """From its beginning: its rows were read beside other ones."""
    model = TorchModel(tiny_folder)
    with closing(model.open()) as session:
        prefill_prompt(session, IDS[:600])
    with closing(model.open()) as session:
        assert session.reuse_prefix([*IDS[:300], 5, 6, 7]) == PREFILL_CHUNK_TOKENS


def test_a_draft_takes_over_every_token(tiny_folder: Path) -> None:
    """Its rows need not be the same to the last bit."""
    model = TorchModel(tiny_folder)
    with closing(model.open(exact=False)) as session:
        prefill_prompt(session, IDS[:50])
    with closing(model.open(exact=False)) as session:
        assert session.reuse_prefix([*IDS[:40], 5, 6, 7]) == 40


def test_what_was_read_in_rounds_is_read_again(tiny_folder: Path) -> None:
    """The cached answer of a turn stood beside other rows; only the prompt's chunks are the same for sure."""
    model = TorchModel(tiny_folder)
    with closing(model.open()) as session:
        prefill_prompt(session, IDS[:PREFILL_CHUNK_TOKENS])
        for token_id in IDS[PREFILL_CHUNK_TOKENS : 2 * PREFILL_CHUNK_TOKENS]:
            session.forward([token_id], num_rows=1)
    with closing(model.open()) as session:
        assert session.reuse_prefix(IDS[: 2 * PREFILL_CHUNK_TOKENS]) == PREFILL_CHUNK_TOKENS


def test_the_longest_idle_cache_goes_first(tiny_folder: Path) -> None:
    """A new prompt does not drive out the conversation that has just been answered."""
    model = TorchModel(tiny_folder, max_requests=2)
    for start in (0, 300):
        with closing(model.open()) as session:
            prefill_prompt(session, IDS[start : start + PREFILL_CHUNK_TOKENS])
    with closing(model.open()) as session:
        assert session.reuse_prefix(IDS[100:400]) == 0
    with closing(model.open()) as session:
        assert session.reuse_prefix(IDS[300:600]) == PREFILL_CHUNK_TOKENS


def test_more_sessions_than_caches_are_refused(tiny_folder: Path) -> None:
    """With one clear error, and a closed one makes room."""
    model = TorchModel(tiny_folder, max_requests=1)
    first, second = model.open(), model.open()
    first.forward([5], num_rows=1)
    with pytest.raises(TargetError, match="all 1 key-value caches are in use"):
        second.forward([5], num_rows=1)
    first.close()
    assert second.forward([5], num_rows=1).shape == (1, 4096)


def test_the_context_is_cut_to_the_memory(tiny_folder: Path) -> None:
    """`cache_gib` bounds what all requests take together."""
    per_token = 2 * 3 * 2 * 16 * 4
    model = TorchModel(tiny_folder, max_requests=4, cache_gib=4 * (500 + 16) * per_token / 2**30)
    assert model.context_length == 500
    assert TorchModel(tiny_folder, max_context=400).context_length == 400


async def test_more_requests_than_places_wait_their_turn(tiny_folder: Path) -> None:
    """In the order in which they came, and one that leaves while it waits is gone."""
    provider = TorchProvider(tiny_folder, max_requests=1)
    order: list[int] = []

    async def ask(number: int) -> None:
        await provider.complete(ChatRequest.create("x", max_tokens=3))
        order.append(number)

    async with provider.stream(ChatRequest.create("x", max_tokens=40)) as events:
        await anext(events)
        waiting = [asyncio.ensure_future(ask(number)) for number in range(4)]
        await asyncio.sleep(0)
        waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [0, 2, 3]


def test_places_outlive_event_loops(tiny_folder: Path) -> None:
    """A loop that ended with requests waiting does not keep their places."""
    provider = TorchProvider(tiny_folder, max_requests=1)

    async def leave_one_waiting() -> None:
        async with provider.stream(ChatRequest.create("x", max_tokens=40)) as events:
            await anext(events)
            waiting = asyncio.ensure_future(provider.complete(ChatRequest.create("y", max_tokens=3)))
            await asyncio.sleep(0)
            waiting.cancel()

    asyncio.run(leave_one_waiting())
    assert asyncio.run(provider.complete(ChatRequest.create("x", max_tokens=2))).usage is not None


async def test_concurrent_requests_do_not_disturb_each_other(pair: tuple[Any, Any]) -> None:
    """Six at once say what each says alone."""
    decoder = SpeculativeDecoder(target=pair[0], draft=ProviderDraft(pair[1]))
    prompts = [f"def test_number_{n}(self):" for n in range(6)]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 4}
    alone = [(await decoder.decode(prompt, **options)).content for prompt in prompts]
    together = await asyncio.gather(*(decoder.decode(prompt, **options) for prompt in prompts))
    check_texts([result.content for result in together], alone, pair[0].model)


@pytest.mark.parametrize("batched", [None, False])
async def test_answers_at_once_compute_in_one_thread(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, batched: bool | None
) -> None:
    """Where passes have several threads: OpenMP makes them wait for each other longer where several threads call it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)  # more than there are cores
    batching: dict[str, Any] = {} if batched is None else {"batched": batched}
    provider = TorchProvider(TorchModel(tiny_folder, device="cpu", **batching))
    threads: list[int] = []
    compute = TransformerNetwork.compute_logits

    def note_thread(network: TransformerNetwork, states: torch.Tensor) -> torch.Tensor:
        threads.append(threading.get_ident())
        return compute(network, states)

    monkeypatch.setattr(TransformerNetwork, "compute_logits", note_thread)
    await asyncio.gather(*(provider.complete(ChatRequest.create(f"x = {n}", max_tokens=6)) for n in range(4)))
    assert len(threads) >= 6
    assert len(set(threads)) == 1


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4


@pytest.mark.slow
async def test_memory_does_not_grow_over_hundreds_of_requests(tiny_folder: Path) -> None:
    """Caches are made once and used again."""
    decoder = SpeculativeDecoder(target=TorchProvider(tiny_folder, max_requests=2), draft=PromptLookup())
    sizes: list[int] = []
    for number in range(500):
        await decoder.decode(f"x{number}", max_tokens=4, seed=number, temperature=1.0)
        if number % 125 == 124:
            gc.collect()
            sizes.append(resident_kib())
    assert sizes[-1] - sizes[0] < 4096, sizes


# ----------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("model.safetensors", None, "has no model.safetensors"),
        ("model.safetensors", "cut", r"is cut short: \d+ of \d+ bytes; download it again"),
        ("model.safetensors", "stub", "is cut short|is not a safetensors file"),
        ("model.safetensors", "text", "is cut short|is not a safetensors file"),
        ("config.json", "text", "is not valid JSON"),
        ("config.json", "unknown", "not a model that transformers"),
        ("config.json", "wider", "lacks weights, or they are of other shapes"),
        ("config.json", "deeper", "lacks weights, or they are of other shapes"),
    ],
)
def test_a_broken_checkpoint_is_one_clear_error(
    name: str, damage: str | None, message: str, make_checkpoint: MakeCheckpoint
) -> None:
    """Missing, half-downloaded, damaged: ModelLoadError names the file or what is wrong with it."""
    folder = make_checkpoint()
    path = folder / name
    data = path.read_bytes()
    if damage is None:
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-100])
    elif damage == "stub":
        path.write_bytes(data[:5])
    elif damage == "text":
        path.write_text("<html>not found</html>", encoding="utf-8")
    else:
        change = {
            "unknown": {"model_type": "no_such", "architectures": ["NoSuch"]},
            "wider": {"intermediate_size": 80},
            "deeper": {"num_hidden_layers": 4},
        }[damage]
        path.write_text(json.dumps(json.loads(data) | change), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=message):
        TorchModel(folder)


def test_a_missing_shard_is_named(make_checkpoint: MakeCheckpoint) -> None:
    """Of several weight files one is not there."""
    folder = make_checkpoint()
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"has no model-00001-of-00002\.safetensors"):
        TorchModel(folder)


def test_no_folder_and_no_name_is_refused() -> None:
    """Nothing is fetched for a path that does not exist."""
    with pytest.raises(ModelLoadError, match="does not exist"):
        TorchModel("/no/such/folder")


HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
]
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
OTHER_WEIGHTS = [
    "consolidated.safetensors",
    "original/model.safetensors",
    "metal/model.safetensors",
    "pytorch_model.bin",
]


@pytest.mark.parametrize(
    ("weights", "index"),
    [
        (["model.safetensors"], None),
        (SHARDS, {f"layer.{number}": name for number, name in enumerate([*SHARDS, *SHARDS])}),
        (["weights/part.safetensors"], {"a": "weights/part.safetensors"}),
        (SHARDS, dict.fromkeys("ab", SHARDS[0]) | {"c": SHARDS[1]}),
    ],
    ids=["one file", "shards", "in a folder", "beside a whole one"],
)
def test_of_a_models_weights_what_is_read_is_fetched(
    tmp_path: Path, weights: list[str], index: dict[str, str] | None
) -> None:
    """Many repositories of the hub have them several times; and every chat template comes along."""
    files = {path: path.encode() for path in [*HUB_FILES, *weights, *OTHER_WEIGHTS]}
    if index is not None:
        files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
        files["model.safetensors"] = b"whole"
    with HubDouble({"somebody/model": files}) as hub, use_hub(hub, tmp_path / "cache"):
        folder = find_checkpoint_folder("somebody/model")
    fetched = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert fetched == {*HUB_FILES, *weights, *(["model.safetensors.index.json"] if index is not None else [])}
    assert hub.sent.keys() == fetched


@pytest.mark.parametrize(("platform", "is_told"), [("linux", True), ("darwin", False)])
def test_a_missing_torch_is_had_in_the_build_that_the_machine_needs(
    monkeypatch: pytest.MonkeyPatch, platform: str, is_told: bool
) -> None:
    """On Linux the usual one brings several gigabytes for CUDA."""
    with monkeypatch.context() as patched:
        patched.setattr("sys.platform", platform)
        install = importlib.reload(llm_spec_torch).TORCH.install
    importlib.reload(llm_spec_torch)
    assert ("pip install torch --index-url https://download.pytorch.org/whl/cpu" in install) == is_told
    assert "[torch]'" in install


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16", "device": "cpu"}, "a CPU computes in 'float32' or 'bfloat16'"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"device": "cuda:99"}, "this machine has"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"layers": 9}, "layers is 9; the checkpoint has 3"),
        ({"cache_gib": 1e-6}, "raise cache_gib or lower max_requests"),
    ],
)
def test_what_the_device_cannot_do_is_refused(tiny_folder: Path, options: dict[str, Any], message: str) -> None:
    """Dtype, device and memory, each by name."""
    with pytest.raises(ModelLoadError, match=message):
        TorchModel(tiny_folder, **options)


@pytest.mark.parametrize(
    "options",
    [{"max_width": 1}, {"max_requests": 0}, {"layers": 0}, {"max_context": 3}, {"attention": "x"}, {"cache_gib": 0}],
)
def test_options_out_of_range_are_refused(tiny_folder: Path, options: dict[str, Any]) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is"):
        TorchModel(tiny_folder, **options)


@pytest.mark.parametrize("query", ["dtyp=float32", "exact=maybe", "layers=two"])
def test_options_in_a_string_are_checked(tiny_folder: Path, query: str) -> None:
    """An unknown name or a value of another type."""
    with pytest.raises(ConfigError, match=query.split("=", maxsplit=1)[0]):
        open_provider(f"torch:{tiny_folder}?{query}")


async def test_a_prompt_beyond_the_context_is_refused(tiny_folder: Path) -> None:
    """And the next one is answered."""
    provider = TorchProvider(tiny_folder, max_context=256)
    with pytest.raises(InvalidRequestError, match="takes fewer than 256"):
        await provider.complete(ChatRequest.create("x = 1\n" * 200))
    assert (await provider.complete(ChatRequest.create("x", max_tokens=3))).usage is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_table_of_embeddings_stays_in_its_file(make_checkpoint: MakeCheckpoint, dtype: str) -> None:
    """On a CPU it is not copied, in whatever dtype it was saved; logits are those of a model that has copied it."""
    folder = make_checkpoint(dtype=dtype)
    stored = convert_file(folder, dtype)
    model = TorchModel(folder, device="cpu", max_requests=1)
    assert model._network.embedding.dtype == getattr(torch, dtype)
    assert model._network.dtype == torch.float32
    assert torch.equal(model._network.embedding, stored)
    copied = TorchModel(folder, max_requests=1, module=load_transformers_module(folder, torch.float32, model.device))
    assert copied._network.embedding.dtype == torch.float32
    ids = list(range(40))
    found, expected = (one.open().forward(ids, num_rows=1) for one in (model, copied))
    np.testing.assert_array_equal(found, expected)


def convert_file(folder: Path, dtype: str) -> torch.Tensor:
    """Write a checkpoint's weights anew in a dtype; its table of embeddings."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors["model.embed_tokens.weight"]


def test_a_table_that_is_not_the_loaded_one_is_not_used(tiny_folder: Path, tmp_path: Path) -> None:
    """Of another shape, dtype or content: then the loaded one is kept."""
    folder = tmp_path / "other"
    shutil.copytree(tiny_folder, folder)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert map_embedding(folder, table) is not None
    assert map_embedding(folder, table + 1.0) is None
    assert map_embedding(folder, table[:-1]) is None
    save_file({"model.embed_tokens.weight": table.to(torch.float64)}, folder / "model.safetensors")
    assert map_embedding(folder, table) is None
    save_file({"model.table": table}, folder / "model.safetensors")
    assert map_embedding(folder, table) is None


async def test_nan_in_the_weights_is_one_clear_error(tiny_folder: Path) -> None:
    """The answer fails, its cache is wiped, and the provider answers as before."""
    provider = TorchProvider(tiny_folder, max_requests=1)
    expected = await provider.complete(ChatRequest.create("x", max_tokens=8))
    embedding = provider.model._network.embedding
    kept = embedding.clone()
    embedding.fill_(float("nan"))
    with pytest.raises(ModelOutputError, match="NaN"):
        await provider.complete(ChatRequest.create("y", max_tokens=8))
    embedding.copy_(kept)
    assert (await provider.complete(ChatRequest.create("x", max_tokens=8))).message == expected.message


async def test_out_of_memory_is_one_clear_error(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator says becomes advice, the cache is given back, and the next request is answered."""
    provider = TorchProvider(tiny_folder, max_requests=1)
    from llm_spec_torch.network import TransformerNetwork

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(TransformerNetwork, "compute_hidden_states", exhausted)
        with pytest.raises(TargetError, match="lower cache_gib or max_requests"):
            await provider.complete(ChatRequest.create("x", max_tokens=3))
    assert (await provider.complete(ChatRequest.create("x", max_tokens=3))).usage is not None


def test_another_tokenizer_is_refused_for_drafting(make_checkpoint: MakeCheckpoint, tiny_model: TorchModel) -> None:
    """With both names and the reason."""
    folder = make_checkpoint()
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    refusal = ProviderDraft(TorchProvider(folder)).token_draft_refusal(tiny_model)
    assert refusal is not None
    assert "different tokenizers" in refusal


def test_too_many_token_ids_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    """A tokenizer with more ids than the model has columns belongs to another model."""
    with pytest.raises(ModelLoadError, match="belong to different models"):
        TorchModel(make_checkpoint(vocab_size=4000))


def test_a_folder_can_go_once_it_is_loaded(make_checkpoint: MakeCheckpoint) -> None:
    """Nothing is read later."""
    folder = make_checkpoint()
    model = TorchModel(folder)
    shutil.rmtree(folder)
    assert model.open().forward([5], num_rows=1).shape == (1, 4096)
