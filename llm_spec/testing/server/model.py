"""The greedy model that knows one text: its answers, and its logprobs of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final, Literal

from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.server.script import AnswerScript
from llm_spec.testing.server.vocabulary import ASSISTANT, EOS_ID, GrowingVocabulary

__all__ = ["ScriptedAnswer", "ScriptedModel", "make_unlikely_token_ids"]

_UNLIKELY: Final = -10.0  # the logprob of a token that is not the script's


@dataclass(frozen=True, kw_only=True)
class ScriptedAnswer:
    """The answer to one prompt.

    `token_ids`: one id for each piece.
    `ending`: the ids after them, which have no text.
    `repeated`: a prefix repeated in front of the answer. It was not generated and has no ids.
    """

    prompt_ids: Sequence[int]
    pieces: Sequence[str]
    token_ids: Sequence[int]
    finish_reason: Literal["stop", "length"]
    ending: tuple[int, ...] = ()
    repeated: str = ""

    @property
    def text(self) -> str:
        return self.repeated + "".join(self.pieces)


class ScriptedModel:
    """A script and its vocabulary."""

    def __init__(self, text: str) -> None:
        self.script = AnswerScript(text)
        self.vocabulary = GrowingVocabulary()

    def find_answer_prefix(self, prompt_ids: Sequence[int]) -> str:
        """Return the beginning of the answer: the text after the last mark, or all text."""
        return self.vocabulary.decode(prompt_ids).rpartition(ASSISTANT)[2]

    def write_answer(
        self, prompt_ids: Sequence[int], prefix: str, *, max_tokens: int, stops: Sequence[str], is_repeating: bool
    ) -> ScriptedAnswer:
        """Return what follows the prefix that the prompt ends with.

        The answer ends before a stop string, without an ending.
        """
        rest = self.script.find_rest_after_prefix(prefix)
        pieces = rest[:max_tokens]
        text = "".join(pieces)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            pieces = split_into_pieces(text[: min(found)])
        is_cut = len(rest) >= max_tokens and not found
        return ScriptedAnswer(
            prompt_ids=prompt_ids,
            pieces=pieces,
            token_ids=self.vocabulary.get_ids(pieces),
            finish_reason="length" if is_cut else "stop",
            ending=() if is_cut or found else (EOS_ID,),
            repeated=prefix if is_repeating else "",
        )

    def make_prompt_logprobs(self, prompt_ids: Sequence[int], top: int) -> list[dict[str, Any] | None]:
        """Return the logprobs of a prompt in vLLM's format.

        Each position has the token itself and the likeliest `top`; the first token has none.
        """
        pieces = self.vocabulary.get_pieces(prompt_ids)
        first = len(pieces) - pieces[::-1].index(ASSISTANT) if ASSISTANT in pieces else 0
        entries: list[dict[str, Any] | None] = []
        for at, token_id in enumerate(prompt_ids):
            likeliest = token_id if at < first else self._find_next_token_id("".join(pieces[first:at]))
            entries.append(self._make_logprobs_entry(likeliest, token_id, top) if at else None)
        return entries

    def _find_next_token_id(self, prefix: str) -> int:
        return next(iter(self.vocabulary.get_ids(self.script.find_rest_after_prefix(prefix)[:1])), EOS_ID)

    def _make_logprobs_entry(self, likeliest: int, token_id: int, top: int) -> dict[str, Any]:
        known = {
            str(each): {"logprob": logprob, "rank": rank, "decoded_token": self.vocabulary.decode([each])}
            # if both are the same token, the last entry wins
            for each, logprob, rank in ((token_id, _UNLIKELY, 2), (likeliest, 0.0, 1))
        }
        others = make_unlikely_token_ids(top - len(known), token_id, likeliest)
        ranks = range(len(known) + 1, top + 1)
        return known | {
            str(other): {"logprob": _UNLIKELY - rank, "rank": rank, "decoded_token": ""}
            for other, rank in zip(others, ranks, strict=True)
        }


def make_unlikely_token_ids(number: int, *token_ids: int) -> list[int]:
    """Return `number` ids of other tokens, all of them unlikely."""
    return list(islice((token_id for token_id in count(1) if token_id not in token_ids), max(0, number)))
