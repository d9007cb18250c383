"""Answers held to a schema, pattern or grammar: always valid, and the same with and without speculation."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from llm_spec_onnx import OnnxProvider
from support.matrix import every_combination
from support.tiny_models import BUILTIN, write_tiny_model

import llm_spec.local.acceptance
import llm_spec.local.grammar
from llm_spec import (
    CascadeDraft,
    ChatRequest,
    Fallback,
    Finish,
    Fixed,
    InvalidRequestError,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    TextDelta,
    open_provider,
)
from llm_spec.contract.errors import MissingExtraError
from llm_spec.contract.token_model import GrammarTokenizer, TokenDrafter, TokenModel
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer
from llm_spec.local.acceptance import VerifyResult
from llm_spec.local.acceptance_name import AcceptanceName
from llm_spec.local.answer import generate_events
from llm_spec.local.grammar import GrammarConstraint, build_answer_constraint
from llm_spec.local.sampling import Sampler
from llm_spec.testing import LocalProvider, RandomDraft, TableModel

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WORDS = r"[a-z]{3,9}( [a-zé]{2,5}){2,4}"
SIGNATURE = 'start: "def " NAME "(" [ARG (", " ARG){0,2}] "):"\nNAME: /[a-z_]{2,9}/\nARG: /[a-z]{1,6}/'


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3
        and {*value["tags"]} <= {"a", "b c", "é"}
    )


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


FORMATS: dict[str, dict[str, Any]] = {
    "schema": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    "choice": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no", 12, None]}}},
    "regex": {"type": "regex", "pattern": WORDS},
    "grammar": {"type": "grammar", "grammar": SIGNATURE},
}
VALID: dict[str, Callable[[str], bool]] = {
    "schema": is_person,
    "choice": lambda text: json.loads(text) in ["yes", "no", 12, None],
    "regex": matches(WORDS),
    "grammar": matches(r"def [a-z_]{2,9}\(([a-z]{1,6}(, [a-z]{1,6}){0,2})?\):"),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.0, "seed": 6, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        "temperature": 0.8,
        "seed": 7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {7: 100.0, 300: 100.0, 301: -50.0},  # the first is EOS
    },
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 100.0}},
}
TARGET = OnnxProvider(BUILTIN / "target")
DRAFT = ProviderDraft(open_provider("builtin:draft"))
TOKENIZER = FolderTokenizer(BUILTIN / "target")
DRAFTS: dict[str, TokenDrafter] = {
    "model": DRAFT,
    "random": RandomDraft(2),
    "lookup": PromptLookup(min_ngram=1),
    "joined": CascadeDraft(PromptLookup(min_ngram=1), DRAFT),
}
PROMPT = 'def person(self, name, age): return {"name": "abc def", "age": 12, "tags": ["a", "b c"]}'


def token_model(provider: OnnxProvider) -> TokenModel:
    model = provider.capabilities.token_model
    assert model is not None
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> OnnxProvider:
    """A model whose weights are noise: it says whatever it is allowed to."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, "shared", "fp32", seed=3)
    return OnnxProvider(folder)


def ask(response_format: dict[str, Any] | None, *, max_tokens: int = 500, **options: Any) -> ChatRequest:
    return ChatRequest.create(PROMPT, response_format=response_format, max_tokens=max_tokens, **options)


def answer(
    target: TokenModel,
    request: ChatRequest,
    drafter: TokenDrafter | None = None,
    lookahead: int = 4,
    acceptance: AcceptanceName = "coupled",
) -> tuple[str, Finish]:
    batches = generate_events(target, request, drafter=drafter, acceptance=acceptance, lookahead=Fixed(lookahead))
    events = list(itertools.chain.from_iterable(batches))
    assert not any(isinstance(event, Fallback) for event in events)
    finish = events[-1]
    assert isinstance(finish, Finish)
    return "".join(event.text for event in events if isinstance(event, TextDelta)), finish


def check_one_text(target: TokenModel, draft: TokenDrafter, name: str, **options: Any) -> None:
    """The answer is valid, complete, and the same whatever the lookahead."""
    request = ask(FORMATS[name], **options)
    plain, ended = answer(target, request)
    assert ended.stopped_by == "eos"
    assert VALID[name](plain), plain
    for lookahead in (1, 3, 8):
        text, finish = answer(target, request, draft, lookahead)
        assert (text, finish.stopped_by, finish.usage) == (plain, ended.stopped_by, ended.usage), lookahead


@every_combination(name=FORMATS, draft=DRAFTS, sampling=SAMPLING)
def test_valid_and_the_same_with_and_without_speculation(name: str, draft: str, sampling: str) -> None:
    """Every kind of format, draft and sampling: valid to the end, and one text at every lookahead."""
    check_one_text(token_model(TARGET), DRAFTS[draft], name, **SAMPLING[sampling])


@every_combination(name=FORMATS, draft=["itself", "target", "random"], sampling=["greedy", "sampled", "penalised"])
def test_a_model_of_noise_is_held_to_it(tiny: OnnxProvider, name: str, draft: str, sampling: str) -> None:
    """Validity owes nothing to the model: one of random weights gives valid answers, too, and one text."""
    drafts = {"itself": ProviderDraft(tiny), "target": ProviderDraft(TARGET), "random": RandomDraft(1)}
    check_one_text(token_model(tiny), drafts[draft], name, **SAMPLING[sampling])


@every_combination(name=FORMATS, draft=DRAFTS, acceptance=["rejection", "lossy_typical"])
def test_the_other_rules_give_valid_answers(name: str, draft: str, acceptance: AcceptanceName) -> None:
    """Whatever decides about drafted tokens, what is emitted obeys the grammar."""
    for seed, temperature in [(0, 0.0), (1, 1.5), (2, 1.5)]:
        request = ask(FORMATS[name], temperature=temperature, seed=seed)
        text, finish = answer(token_model(TARGET), request, DRAFTS[draft], 4, acceptance)
        assert finish.stopped_by == "eos"
        assert VALID[name](text), text


def test_any_json_object(tiny: OnnxProvider) -> None:
    """`json_object` gives an object, where it comes to an end; `text` constrains nothing."""
    num_ended = 0
    for seed in range(12):
        request = ask({"type": "json_object"}, temperature=1.0, seed=seed)
        text, finish = answer(token_model(TARGET), request, DRAFT)
        if finish.stopped_by == "eos":
            num_ended += 1
            assert isinstance(json.loads(text), dict)
        assert text.startswith("{")
    assert num_ended
    free = answer(token_model(tiny), ask(None, max_tokens=20))
    assert answer(token_model(tiny), ask({"type": "text"}, max_tokens=20)) == free


@pytest.mark.parametrize("draft", [None, DRAFT])
@pytest.mark.parametrize("where", ["schema", "json_schema", "neither", "empty", "null"])
def test_a_json_object_keeps_to_its_schema(where: str, draft: TokenDrafter | None) -> None:
    """Where it has one: as llama.cpp has it, or nested as with `json_schema`."""
    digits = {"type": "integer", "minimum": 5, "maximum": 7}
    own = {"type": "object", "properties": {"d": digits}, "required": ["d"], "additionalProperties": False}
    fields: dict[str, Any] = {
        "schema": {"schema": own},
        "json_schema": {"json_schema": {"name": "x", "schema": own}, "schema": None},
        "empty": {"schema": {}},
        "null": {"schema": None, "json_schema": None},
    }
    response_format = {"type": "json_object", **fields.get(where, {})}
    text, finish = answer(token_model(TARGET), ask(response_format), draft)
    if where in ("schema", "json_schema"):
        assert finish.stopped_by == "eos"
        value = json.loads(text)
        assert value.keys() == {"d"}
        assert value["d"] in (5, 6, 7)
    else:
        assert text.startswith("{")


async def test_through_the_decoder() -> None:
    """`auto` uses strategy `tokens` for such requests, and says that the text is the target's own."""
    assert TARGET.capabilities.response_format
    plain = await SpeculativeDecoder(target=TARGET, draft=None).decode(
        PROMPT, response_format=FORMATS["schema"], max_tokens=99
    )
    result = await SpeculativeDecoder(target=TARGET, draft=DRAFT).decode(
        PROMPT, response_format=FORMATS["schema"], max_tokens=99
    )
    assert (result.strategy, result.guarantee, result.same_text) == ("tokens", "exact", True)
    assert result.content == plain.content
    assert is_person(result.content)


def test_stop_strings_cut_where_they_cut_without_speculation() -> None:
    """A stop string ends a constrained answer early, at the same place."""
    request = ask(FORMATS["schema"], stop=[', "tags"', "ge"])
    plain, ended = answer(token_model(TARGET), request)
    assert ended.stopped_by == "stop_string"
    assert plain.startswith("{")
    assert "ge" not in plain
    for name, lookahead in itertools.product(DRAFTS, (1, 4, 8)):
        assert answer(token_model(TARGET), request, DRAFTS[name], lookahead)[0] == plain


async def test_concurrent_requests_do_not_disturb_each_other() -> None:
    """Requests of different formats, drawn by turns from one pair, give what each gives alone."""
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(3))
    decoder = SpeculativeDecoder(target=TARGET, draft=DRAFT, config=config)
    wanted = [(name, seed) for name in FORMATS for seed in range(3)]

    async def decode(name: str, seed: int) -> str:
        result = await decoder.decode(PROMPT, response_format=FORMATS[name], temperature=1.0, seed=seed, max_tokens=500)
        return result.content

    alone = [await decode(*each) for each in wanted]
    assert await asyncio.gather(*(decode(*each) for each in wanted)) == alone
    assert all(VALID[name](text) for (name, _), text in zip(wanted, alone, strict=True))


# -------------------------------------------------------------------------------------- the begun answer


@pytest.mark.parametrize("draft", [None, DRAFT])
def test_a_prefix_is_part_of_the_answer(draft: TokenDrafter | None) -> None:
    """What the answer has begun with is constrained together with what follows it."""
    for prefix in ('{"na', '{"name": "Ada", "age": 3', '{"name": "Ada", "age": 36, "tags": []}'):
        text, finish = answer(token_model(TARGET), ask(FORMATS["schema"], prefix=prefix), draft)
        assert finish.stopped_by == "eos"
        assert is_person(prefix + text)
    assert text == ""


def test_a_prefix_that_does_not_fit_is_refused() -> None:
    """No answer could be valid, and the message says up to where it was."""
    with pytest.raises(InvalidRequestError, match=r"prefix is '\{\"nix\"'; .* what follows '\{\"n' in it"):
        answer(token_model(TARGET), ask(FORMATS["schema"], prefix='{"nix"'))


# ----------------------------------------------------------------------------------------- planted faults


def drop_nothing_from_the_matcher(self: Any, num_tokens: int) -> None:
    if num_tokens:
        del self._ids[-num_tokens:]
        self._masks.clear()


def keep_old_masks(self: Any, num_tokens: int) -> None:
    if num_tokens:
        self._matcher.rollback(num_tokens)
        del self._ids[-num_tokens:]


def verify_without_mask(sampler: Sampler, logits: Any, context_ids: Sequence[int], proposal: Any) -> VerifyResult:
    del sampler
    return llm_spec.local.acceptance._verify_proposal_greedy(logits, len(context_ids), proposal)


def choose_without_mask(sampler: Sampler, logits: Any, context_ids: Sequence[int]) -> Any:
    free = Sampler(
        sampler.sampling, vocab_size=sampler.vocab_size, num_prompt_tokens=sampler.num_prompt_tokens, seed=sampler.seed
    )
    return CHOOSE(free, logits, context_ids)


def check_walk(name: str) -> None:
    """Forwards, backwards, astray and by leaps: masks are those of a matcher that has come straight there."""
    rng = random.Random(name)  # noqa: S311 - repeatable, not secret
    walked = constraint(name)
    ids: list[int] = []
    for step in range(400):
        mask = constraint(name).mask(ids)
        if rng.random() < 0.6:
            assert np.array_equal(walked.mask(ids), mask), (step, ids)
        move = rng.random()
        if move < 0.2:
            del ids[rng.randrange(len(ids) + 1) :]  # a rejection
        elif move < 0.25:
            ids.append(rng.randrange(4200))  # a random draft's
        else:
            ids.append(rng.choice(np.flatnonzero(mask).tolist()))


def check_walks() -> None:
    for name in FORMATS:
        check_walk(name)


def check_texts() -> None:
    for name, sampling in itertools.product(FORMATS, ("greedy", "sampled")):
        check_one_text(token_model(TARGET), DRAFT, name, **SAMPLING[sampling])


CHOOSE = llm_spec.local.acceptance._sample_draft_token_coupled
BACK: tuple[Any, str] = (GrammarConstraint, "_roll_back_matcher")
ROWS: tuple[Any, str] = (llm_spec.local.acceptance, "_verify_proposal_coupled")
FAULTS: dict[str, tuple[tuple[Any, str], Any, Callable[[], None]]] = {
    "the matcher is not rolled back": (BACK, drop_nothing_from_the_matcher, check_texts),
    "the matcher is not rolled back, by the masks": (BACK, drop_nothing_from_the_matcher, check_walks),
    "masks survive a rollback": (BACK, keep_old_masks, check_walks),
    "verified rows are not masked": (ROWS, verify_without_mask, check_texts),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The checks that other tests make notice these."""
    (owner, name), planted, check = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, json.JSONDecodeError)):
        check()


def test_a_draft_without_the_mask_is_only_a_worse_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the target's own choice."""
    monkeypatch.setattr(llm_spec.local.acceptance, "_sample_draft_token_coupled", choose_without_mask)
    check_texts()


# ------------------------------------------------------------------------------------------ the mask itself


def stub(**changes: Any) -> TokenModel:
    """As much of a model as a grammar looks at; more columns than the tokenizer has ids."""
    return cast(
        "TokenModel", SimpleNamespace(**{"name": "stub", "tokenizer": TOKENIZER, "vocab_size": 4200, **changes})
    )


def constraint(name: str, model: TokenModel | None = None, prefix: str = "") -> Any:
    opened = build_answer_constraint(model or stub(), ask(FORMATS[name], prefix=prefix))
    assert opened is not None
    return opened


@pytest.mark.parametrize("name", FORMATS)
def test_the_mask_is_a_function_of_the_answer(name: str) -> None:
    """However one came there, the mask is a fresh matcher's."""
    check_walk(name)


@pytest.mark.parametrize("name", FORMATS)
def test_only_what_may_be_said(name: str) -> None:
    """EOS exactly where the answer may end, nothing else once it must, never a padding or control column."""
    [eos_id] = TOKENIZER.eos_token_ids
    texts = {
        "schema": '{"name": "Ada", "age": 36, "tags": ["b c"]}',
        "choice": '"yes"',
        "regex": "abcdefghi ab ab ab ababa",
        "grammar": "def abc():",
    }
    ids = TOKENIZER.encode(texts[name])
    walked = constraint(name)
    for length in range(len(ids) + 1):
        mask = walked.mask(ids[:length])
        assert mask.shape == (4200,)
        assert not mask[TOKENIZER.vocab_size :].any()
        assert not mask[:eos_id].any(), "control tokens"
        assert mask[ids[length]] if length < len(ids) else np.flatnonzero(mask).tolist() == [eos_id]
        may_end = name == "regex" and re.fullmatch(WORDS, TOKENIZER.decode(ids[:length]))
        assert mask[eos_id] == (length == len(ids) or bool(may_end))
    assert np.flatnonzero(walked.mask([*ids, eos_id])).tolist() == [eos_id]
    with pytest.raises(ValueError, match="read-only"):
        walked.mask(ids)[0] = True


def test_the_matcher_is_asked_once_for_each_position() -> None:
    """Draft and target share the masks of a round, and few are kept."""
    walked = constraint("schema")
    ids = TOKENIZER.encode('{"name": "Ada", "age": 36}')
    masks = [walked.mask(ids[:length]) for length in range(len(ids))]
    assert all(walked.mask(ids[:length]) is mask for length, mask in enumerate(masks))
    long = TOKENIZER.encode(" ab" * 300)
    walked = cast("Any", build_answer_constraint(stub(), ask({"type": "regex", "pattern": "( ab)*"})))
    for length in range(len(long)):
        walked.mask(long[:length])
    assert len(walked._masks) <= 34


def test_a_grammar_that_becomes_too_complex_ends_the_request_alone() -> None:
    """The error names the place, and the matcher serves what it could serve before: a draft may have led it there."""
    compiled = llm_spec.local.grammar._get_ll_tokenizer(stub(), TOKENIZER)
    source = LLMatcher.grammar_from_lark('start: "a" b\nb: "" | b b | "x"')
    limited = LLMatcher(compiled, source, limits=LLParserLimits(step_max_items=40, verbose_errors=False))
    walked = GrammarConstraint(limited, vocab_size=4200, eos_token_ids=TOKENIZER.eos_token_ids)
    a, x = TOKENIZER.encode("a")[0], TOKENIZER.encode("x")[0]
    first = walked.mask([])
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="response_format cannot be followed beyond token"):
            walked.mask([a, *[x] * 200])
        assert np.array_equal(walked.mask([]), first)


def test_a_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many first requests at a time, one reading; the number that is kept is bounded."""
    reads: list[str] = []
    read = llm_spec.local.grammar._build_ll_tokenizer

    def counting(target: TokenModel, tokenizer: GrammarTokenizer) -> Any:
        reads.append(target.name)
        return read(target, tokenizer)

    monkeypatch.setattr(llm_spec.local.grammar, "_tokenizers", {})
    monkeypatch.setattr(llm_spec.local.grammar, "_build_ll_tokenizer", counting)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(constraint, [*FORMATS] * 4))
    assert len(reads) == 1
    assert len({id(each) for each in made}) == 16
    for vocab_size in range(4201, 4210):
        llm_spec.local.grammar._get_ll_tokenizer(stub(vocab_size=vocab_size), TOKENIZER)
    assert len(llm_spec.local.grammar._tokenizers) == 4


# ------------------------------------------------------------------------------------------------ bad input


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": fields}}


@pytest.mark.parametrize(
    ("response_format", "words"),
    [
        ({}, ["response_format.type is None"]),
        ({"type": "json"}, ["response_format.type is 'json'", "json_object", "grammar"]),
        ({"type": "json_schema"}, ["response_format.json_schema is None", "an object"]),
        ({"type": "json_schema", "schema": {}}, ["response_format.schema is set", "'json_schema' takes json_schema"]),
        ({"type": "json_schema", "pattern": "a"}, ["response_format.pattern is set"]),
        ({"type": "json_object", "schema": 7}, ["response_format.schema is 7", "an object"]),
        ({"type": "json_object", "json_schema": {}}, ["response_format.json_schema.schema is None"]),
        ({"type": "json_object", "schema": {}, "json_schema": {}}, ["give one of the two"]),
        ({"type": "json_object", "schema": {"type": "strin"}}, ["Invalid type: strin"]),
        ({"type": "json_object", "grammar": "start: x"}, ["response_format.grammar is set"]),
        ({"type": "text", "schema": {"type": "object"}}, ["response_format.schema is set", "takes no constraint"]),
        ({"type": "text", "json_schema": {}}, ["response_format.json_schema is set"]),
        ({"type": "regex", "pattern": "a", "schema": {}}, ["response_format.schema is set", "takes pattern"]),
        ({"type": "grammar", "grammar": "start: x", "pattern": "a"}, ["response_format.pattern is set"]),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, ["response_format.json_schema.schema is None"]),
        (schema(type="strin"), ["json_schema cannot be used", "Invalid type: strin"]),
        (schema(type="array", uniqueItems=True), ["Unimplemented keys", "uniqueItems"]),
        (schema(type="string", pattern="("), ["unclosed group"]),
        (schema(enum=[]), ["json_schema cannot be used"]),
        (schema(const={1, 2}), ["is not valid JSON", "set"]),
        (schema(const=float("nan")), ["is not valid JSON"]),
        ({"type": "regex"}, ["response_format.pattern is None", "a text"]),
        ({"type": "regex", "pattern": "a(b"}, ["regex cannot be used", "unclosed group"]),
        ({"type": "regex", "pattern": "(?=a)b"}, ["look-around"]),
        ({"type": "grammar", "grammar": 7}, ["response_format.grammar is 7"]),
        ({"type": "grammar", "grammar": "start: foo"}, ["grammar cannot be used", 'unknown name: "foo"', "1(8)"]),
        ({"type": "grammar", "grammar": ""}, ["grammar cannot be used"]),
    ],
    ids=str,
)
async def test_bad_formats_are_a_one_line_error(response_format: dict[str, Any], words: list[str]) -> None:
    """The message says what was wrong and where, with and without a draft."""
    for draft in (None, DRAFT):
        with pytest.raises(InvalidRequestError) as caught:
            await SpeculativeDecoder(target=TARGET, draft=draft).decode("x", response_format=response_format)
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value)


def chain_of_schemas(num_links: int) -> dict[str, Any]:
    links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(num_links)}
    return schema(**{"$defs": {**links, str(num_links): {"type": "string"}}, "$ref": "#/$defs/0"})


def chain_of_rules(num_links: int) -> dict[str, Any]:
    links = "".join(f"a{i}:a{i + 1}\n" for i in range(num_links))
    return {"type": "grammar", "grammar": f'start:a0\n{links}a{num_links}:"z"'}


@pytest.mark.parametrize(
    "response_format", [chain_of_schemas(1640), chain_of_rules(820)], ids=["64 KiB of schemas", "8 KiB of rules"]
)
def test_the_deepest_source_that_may_be_asked_for_ends_no_process(response_format: dict[str, Any]) -> None:
    """In a process of its own: where the stack is too small, there is no error to catch."""
    program = """
import json, sys, threading
from test_grammar import ask, build_answer_constraint, stub
threading.stack_size(512 * 1024)
request = ask(json.loads(sys.stdin.read()))
thread = threading.Thread(target=lambda: print(build_answer_constraint(stub(), request).mask([]).sum()))
thread.start()
thread.join()
print(threading.stack_size())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(response_format),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_allowed, stack_bytes = map(int, done.stdout.split())
    assert num_allowed > 0
    assert stack_bytes == 512 * 1024


@pytest.mark.parametrize(
    "response_format",
    [chain_of_schemas(1800), chain_of_rules(1000), {"type": "regex", "pattern": "a?" * 4100}],
    ids=["schemas", "rules", "regex"],
)
def test_a_longer_source_is_refused_by_its_length(response_format: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"response_format \w+ has \d+ bytes; it may have (65536|8192)"):
        build_answer_constraint(stub(), ask(response_format))


def test_what_cannot_be_written_is_an_error() -> None:
    """A grammar none of whose sentences exists is refused."""
    with pytest.raises(InvalidRequestError, match="response_format"):
        answer(token_model(TARGET), ask({"type": "regex", "pattern": "[^\\s\\S]"}))


def test_models_that_cannot_are_refused() -> None:
    """One whose tokenizer tells nothing, one that has no EOS, one whose tokenizer the library cannot read."""
    table = TableModel()
    assert not LocalProvider(table).capabilities.response_format
    with pytest.raises(InvalidRequestError, match="but table:model does not expose its vocabulary"):
        build_answer_constraint(table, ask(FORMATS["regex"]))
    fields = {"fingerprint": "other", "encode": list, "decode": str, "encode_chat": list}
    endless = SimpleNamespace(**fields, eos_token_ids=frozenset(), to_tokenizer_json=TOKENIZER.to_tokenizer_json)
    with pytest.raises(InvalidRequestError, match="but stub has no end-of-answer token"):
        build_answer_constraint(
            cast("TokenModel", SimpleNamespace(name="stub", tokenizer=endless)), ask(FORMATS["regex"])
        )
    broken = SimpleNamespace(**fields, eos_token_ids=frozenset({7}), to_tokenizer_json=lambda: "{}")
    model = SimpleNamespace(name="stub", tokenizer=broken, vocab_size=4096)
    with pytest.raises(InvalidRequestError, match="cannot read the tokenizer of stub"):
        build_answer_constraint(cast("TokenModel", model), ask(FORMATS["regex"]))


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the command that installs it; requests that ask for nothing are served, capabilities are true."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    provider = OnnxProvider(BUILTIN / "draft")
    assert not provider.capabilities.response_format
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'llm-spec[grammar]'")):
        await provider.complete(ask(FORMATS["regex"]))
    assert (await provider.complete(ask({"type": "text"}, max_tokens=2))).content


def test_the_tokenizers_file_is_told_without_its_truncation(tmp_path: Path) -> None:
    """Truncation and padding, which are for batches of texts, would spoil what a grammar tokenizes."""
    for path in (BUILTIN / "draft").iterdir():
        if path.suffix != ".onnx":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    parts = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    parts["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts), encoding="utf-8")
    tokenizer = FolderTokenizer(tmp_path)
    assert isinstance(tokenizer, GrammarTokenizer)
    told = json.loads(tokenizer.to_tokenizer_json())
    assert (told["truncation"], told["padding"], told["model"]) == (None, None, parts["model"])


class ListedTokenizer:
    """The built-in tokenizer without its tokenizer.json: it lists its tokens."""

    fingerprint = "listed"
    eos_token_ids = TOKENIZER.eos_token_ids
    decode = staticmethod(TOKENIZER.decode)
    encode = staticmethod(TOKENIZER.encode)
    encode_chat = staticmethod(TOKENIZER.encode_chat)

    def list_tokens(self) -> list[bytes]:
        return [TOKENIZER.token_bytes(token_id) for token_id in range(TOKENIZER.vocab_size)]

    def list_control_token_ids(self) -> list[int]:
        return [i for i, token in enumerate(self.list_tokens()) if token and not TOKENIZER.decode([i])]


@pytest.mark.parametrize(
    "response_format",
    [*FORMATS.values(), {"type": "regex", "pattern": "(naïve café, 日本語 |a forced text 😀 ){3}"}],
    ids=[*FORMATS, "forced"],
)
def test_a_listed_vocabulary_gives_the_masks_of_a_tokenizer_file(response_format: dict[str, Any]) -> None:
    """Where a grammar leaves no choice among texts, only the tokens that the tokenizer would write are allowed."""
    request = ask(response_format)
    target = token_model(TARGET)
    listed = SimpleNamespace(name="listed", tokenizer=ListedTokenizer(), vocab_size=target.vocab_size)
    constraints = [build_answer_constraint(model, request) for model in (target, cast("TokenModel", listed))]
    generator = random.Random(0)  # noqa: S311 - repeatable, not secret
    answer_ids: list[int] = []
    for _ in range(40):
        by_file, by_list = (constraint.mask(answer_ids) for constraint in constraints if constraint is not None)
        assert np.array_equal(by_file, by_list)
        answer_ids.append(generator.choice([int(token_id) for token_id in np.flatnonzero(by_file)]))
        if answer_ids[-1] in TOKENIZER.eos_token_ids:
            break
