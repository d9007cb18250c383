"""Log-probabilities by token ids, in the words of an answer: each token by its text and its bytes."""

from __future__ import annotations

from typing import Final

from llm_spec.contract.events import TokenLogprob
from llm_spec.contract.model import TokenBytesTokenizer, Tokenizer
from llm_spec.local.chosen_logprobs import ChosenLogprob

__all__ = ["TokenNames"]


class TokenNames:
    """What the tokens of one tokenizer are called; one answer's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Final = tokenizer
        self._names: dict[int, tuple[str, bytes]] = {}

    def make_token_logprob(self, chosen: ChosenLogprob) -> TokenLogprob:
        """The log-probability of an answer's token, with those of the likeliest in its place."""
        top = tuple(self._make_named_logprob(token_id, logprob) for token_id, logprob in chosen.top)
        return self._make_named_logprob(chosen.token_id, chosen.logprob, top)

    def _make_named_logprob(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        if token_id not in self._names:
            self._names[token_id] = self._find_token_name(token_id)
        text, token_bytes = self._names[token_id]
        return TokenLogprob(text, logprob, token_bytes, top)

    def _find_token_name(self, token_id: int) -> tuple[str, bytes]:
        if isinstance(self._tokenizer, TokenBytesTokenizer):
            token_bytes = self._tokenizer.token_bytes(token_id)
            return token_bytes.decode(errors="replace"), token_bytes
        text = self._tokenizer.decode([token_id])
        return text, text.encode()
