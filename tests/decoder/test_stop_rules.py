"""Lists of stop strings of which a server may choose another one: their answers are the target's own, plainly."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from llm_spec import ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, open_provider
from llm_spec.decoder.config import StrategyName
from llm_spec.decoder.stop_rules import may_token_complete_two
from llm_spec.local.detokenizing import StopMatcher
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.server import ScriptedModelServer, ServerLatency
from llm_spec.testing.server.model import ScriptedModel

TEXT = "First some words, then the function getregentry is called here, and more words follow after that one."
Rule = Literal["first of the list", "begins first"]
RULES: tuple[Rule, ...] = ("first of the list", "begins first")


def find_cut(text: str, stop: Sequence[str], rule: Rule) -> int | None:
    """Where a server cuts that looks at a text after each of its tokens; None: nowhere yet."""
    found = [at for each in stop if (at := text.find(each)) >= 0]
    return None if not found else found[0] if rule == "first of the list" else min(found)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), False),
        (("get",), False),
        (("reg", "get"), True),  # "getreg" may be one token
        (("get", "reg"), True),  # and so may "reget"
        (("unc", "fun"), True),
        (("STOP", "END"), True),
        (("b", "ab"), True),
        (("ab", "b"), True),  # of "bab" some take the first character for the end, and some the last two
        (("\nb", "\nc"), False),
        (("\n", "\n\n"), False),
        (("User:", "Assistant:"), False),
        (("\nUser:", "\nAssistant:", "\n\n"), False),
        (("</s>", "<|im_end|>"), False),
        (("###", "\n\n"), False),
        (("\n\n", "###"), True),
        (("}", "\n"), False),
        (("\n", "}"), True),
        (("```", "\n```"), True),
        (("a", "a"), False),
        (("x\ny" * 70, "\nz" * 140), True),  # too long to look at
        (tuple(f"\n{number}:" for number in range(100, 120)), True),  # too many
    ],
    ids=str,
)
def test_lists(stop: tuple[str, ...], expected: bool) -> None:
    """Whether one token may complete two of them, after which servers cut elsewhere than this library does."""
    assert may_token_complete_two(stop) is expected


def test_all_others_are_cut_at_one_place_by_every_rule() -> None:
    """Texts and lists at random, of few characters, so that the strings are in each other and overlap."""
    generator = random.Random(0)  # noqa: S311 - cases, no secrets
    pieces = re.compile(r"[^\S\r\n]*[^\w\s]*(?:\w+|\s*)")
    num_compared = 0
    for _ in range(15_000):
        text = "".join(generator.choice("ab.:\n ") for _ in range(12))
        starts = [generator.randrange(11) for _ in range(generator.choice((2, 2, 3)))]
        stop = [text[start : start + generator.randint(1, 4)] for start in starts]
        if may_token_complete_two(stop):
            continue
        num_compared += 1
        matcher = StopMatcher(stop)
        shown = "".join(delta.text for delta in [*matcher.push(text), *matcher.flush()])
        for rule in RULES:
            read = ""
            for token in filter(None, pieces.findall(text)):
                read += token
                cut = find_cut(read, stop, rule)
                if cut is not None:
                    read = read[:cut]
                    break
            assert read == shown, (text, stop, rule)
    assert num_compared > 5_000


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strategy", ["race", "probe", "score", "auto"])
async def test_the_text_is_the_servers_own(strategy: StrategyName, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of two stop strings of one token counts there."""
    write_whole: Any = ScriptedModel.write_answer

    def write_answer(
        model: ScriptedModel, prompt_ids: Any, prefix: str, *, max_tokens: int, stops: Sequence[str], is_repeating: bool
    ) -> Any:
        answer = write_whole(model, prompt_ids, prefix, max_tokens=max_tokens, stops=(), is_repeating=is_repeating)
        text = ""
        for piece in answer.pieces:
            text += piece
            cut = find_cut(text, stops, rule)
            if cut is not None:
                pieces = split_into_pieces(text[:cut])
                ids = model.vocabulary.get_ids(pieces)
                return replace(answer, pieces=pieces, token_ids=ids, finish_reason="stop", ending=())
        return answer

    monkeypatch.setattr(ScriptedModel, "write_answer", write_answer)
    latency = ServerLatency(first_token_s=0.01, token_s=0.002)
    async with ScriptedModelServer(TEXT, continues_prefix="fields", latency=latency) as server:
        provider = open_provider(f"vllm:m@{server.url}")
        try:
            await provider.discover("token_endpoint")  # type: ignore[attr-defined]
            await provider.discover("token_scorer")  # type: ignore[attr-defined]
            config = SpeculativeConfig(strategy=strategy, baseline_every=0)
            for stop in (
                ["reg", "get"],
                ["unc", "fun", "zzz"],
                ["called", "lled here"],
                ["function"],
                ["\n\n", "called"],
            ):
                alone = await SpeculativeDecoder(target=provider, draft=None).decode("go", temperature=0, stop=stop)
                decoder = SpeculativeDecoder(target=provider, draft=ReferenceDraft(TEXT), config=config)
                result = await decoder.decode("go", temperature=0, stop=stop)
                assert (result.content, result.guarantee) == (alone.content, "exact")
                if strategy != "auto":
                    assert (result.plain_reason == "request") is may_token_complete_two(stop)
                    assert result.strategy == ("plain" if may_token_complete_two(stop) else strategy)
        finally:
            await provider.aclose()
