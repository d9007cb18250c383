"""TokenAnswer: the text of an answer whose tokens are confirmed one by one; part of a character is held back."""

from __future__ import annotations

from collections.abc import Sequence

from llm_spec.contract.endpoint import SampledToken, TokenEndpoint
from llm_spec.contract.events import Origin, TextDelta
from llm_spec.local.detokenizing import MAX_CHARACTER_TOKENS, REPLACEMENT_CHARACTER, list_possible_undecodable_lengths

__all__ = ["TokenAnswer"]


class TokenAnswer:
    """The confirmed tokens of one answer. `text`: what has come out of them; `held_ids`: those of which none has.

    A stream's piece may end with a token of which only a part is text yet. So what follows a stream is decoded together
    with its last tokens, unless it is text by itself.
    """

    def __init__(self, endpoint: TokenEndpoint) -> None:
        self.text = ""
        self.held_ids: list[int] = []
        self._endpoint = endpoint
        self._unemitted_ids: list[int] = []  # whose text comes out with the next piece
        self._context_ids: list[int] = []  # of a stream, the last ones before `held_ids`
        self._is_cut = False  # whether they end inside a character

    @property
    def ends_inside_character(self) -> bool:
        """Whether only the next tokens tell what the last ones mean."""
        return bool(self.held_ids) or self._is_cut

    async def check_for_cut_character(self) -> None:
        """Find out whether the last piece of a stream ended inside a character."""
        if self._context_ids and not self.held_ids:
            self._is_cut = (await self._endpoint.decode(self._context_ids)).endswith(REPLACEMENT_CHARACTER)

    async def add_token(self, token: SampledToken, origin: Origin) -> TextDelta | None:
        """Add the next token; the text that is complete with it.

        Bytes of an incomplete character are held back: only later tokens tell which character it is. Raises what the
        server's decoding raises.
        """
        self._unemitted_ids.append(token.token_id)
        if token.is_end:
            return None
        if not self.ends_inside_character and token.text and REPLACEMENT_CHARACTER not in token.text:
            self._context_ids.clear()
            return self._release_delta(token.text, origin)
        self.held_ids.append(token.token_id)
        text = await self._decode_held_ids()
        if not self.held_ids:
            self._context_ids.clear()
            self._is_cut = False
        return self._release_delta(text, origin)

    def add_delta(self, delta: TextDelta) -> TextDelta:
        """Add a piece as a stream gives it: without text its tokens are held back until a later piece."""
        token_ids = delta.token_ids or ()
        self._unemitted_ids += token_ids
        if not delta.text:
            self.held_ids += token_ids
            return TextDelta("", delta.origin, ())
        self._context_ids = [*self._context_ids, *self.held_ids, *token_ids][-MAX_CHARACTER_TOKENS:]
        self.held_ids.clear()
        return self._release_delta(delta.text, delta.origin) or delta

    def drop_held_ids(self) -> int:
        """Forget the beginning of a character; how many tokens that were."""
        num_held = len(self.held_ids)
        self.held_ids.clear()
        self._is_cut = False
        del self._unemitted_ids[len(self._unemitted_ids) - num_held :]
        return num_held

    async def flush(self, origin: Origin) -> TextDelta | None:
        """The text of tokens that are held back, however incomplete, where the answer ends with them."""
        text = await self._decode_in_context(self.held_ids) if self.held_ids else ""
        self.held_ids.clear()
        return self._release_delta(text, origin)

    # ------------------------------------------------------------------------------------------ inside

    def _release_delta(self, text: str, origin: Origin) -> TextDelta | None:
        """Text that comes out now, with the tokens that it completes."""
        if not text:
            return None
        self.text += text
        num_shown = len(self._unemitted_ids) - len(self.held_ids)
        shown_ids, self._unemitted_ids = self._unemitted_ids[:num_shown], self._unemitted_ids[num_shown:]
        return TextDelta(text, origin, tuple(shown_ids))

    async def _decode_in_context(self, held_ids: Sequence[int]) -> str:
        """What held tokens add to the text."""
        if not self._context_ids:
            return await self._endpoint.decode(held_ids)
        shown = (await self._endpoint.decode(self._context_ids)).rstrip(REPLACEMENT_CHARACTER)
        return (await self._endpoint.decode([*self._context_ids, *held_ids])).removeprefix(shown)

    async def _decode_held_ids(self) -> str:
        text, num_shown = await self._decode_in_context(self.held_ids), len(self.held_ids)
        if text.endswith(REPLACEMENT_CHARACTER):
            text, num_shown = await self._find_decodable_prefix(self.held_ids, text)
        del self.held_ids[:num_shown]
        return text

    async def _find_decodable_prefix(self, held_ids: Sequence[int], text: str) -> tuple[str, int]:
        """What no later byte can change, and of how many tokens; nothing while it may still become a character."""
        for num_tokens in list_possible_undecodable_lengths(len(held_ids)):
            part = await self._decode_in_context(held_ids[:num_tokens])
            if text.startswith(part):
                return part, num_tokens
        return "", 0
