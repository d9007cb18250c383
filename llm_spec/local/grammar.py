"""Constrains answers to a JSON schema, a regular expression or a grammar.

The library is llguidance (extra `grammar`). A draft reads ahead of the confirmed tokens, and
rejected tokens must be taken back before the next token is judged (vLLM #34650 did not). So callers
keep no state: `mask` depends on the answer alone, and its matcher rolls back by itself to the
common prefix of the requested answer and the one that it has read.

The library reads a source by recursion: about 6,000 rules in a chain take 16 MiB of stack, and an
overflow ends the process. A regular expression takes time and memory by the square of its length: 8
KiB take 1 s and 70 MB, 32 KiB take 30 s and 1 GB. So sources are bounded, and compiled one at a
time on a deep stack. Masks need hardly any stack.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.errors import InvalidRequestError, MissingExtraError
from llm_spec.contract.token_model import (
    GrammarTokenizer,
    MessageFormatTokenizer,
    Tokenizer,
    TokenModel,
    VocabularyTokenizer,
)
from llm_spec.contract.tools import ToolUse
from llm_spec.local.forks import call_in_forked_child
from llm_spec.local.messages.grammar import write_tool_grammar
from llm_spec.local.threads import call_on_deep_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from llm_spec.contract.request import ChatRequest
    from llm_spec.local.sampling import TokenConstraint

__all__ = ["GrammarConstraint", "build_answer_constraint", "supports_response_format"]

_NO_TOOLS: Final = ToolUse()
Mask: TypeAlias = NDArray[np.bool_]

_LIBRARY: Final = "llguidance"
# Whitespace between the parts of JSON. Without a limit, a model that has begun to indent may never
# end.
_WHITESPACE: Final = r"[ \t\n\r]{1,32}"
_ERROR_DRAWING: Final = re.compile(r"\n(<state>| +\d+ \|)")
# bytes
_MAX_SOURCE: Final = {"json_schema": 64 * 1024, "regex": 8 * 1024, "grammar": 8 * 1024, "tools": 64 * 1024}
# The fields that may constrain an answer, by the format's type.
_CONSTRAINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": (),
    "json_object": ("schema", "json_schema"),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
}
_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_CACHED_POSITIONS: Final = 34  # the longest draft, its bonus and one more
_CACHED_TOKENIZERS: Final = 4  # one of 128,000 ids takes 0.6 s to make


def supports_response_format(tokenizer: Tokenizer) -> bool:
    """Return True if a local model's answers can be constrained to a format.

    Its tokenizer must allow it, and the extra must be installed.
    """
    return isinstance(tokenizer, GrammarTokenizer | VocabularyTokenizer) and _is_grammar_library_installed()


def build_answer_constraint(
    target: TokenModel, request: ChatRequest, tool_use: ToolUse = _NO_TOOLS, *, is_reasoning: bool = False
) -> TokenConstraint | None:
    """Build the constraint of `response_format` and of tools that must be called or are strict.

    Returns None if nothing is constrained. The constraint begins after `request.prefix`, and within
    reasoning if `is_reasoning`. The formats are OpenAI's `text`, `json_object` (with llama.cpp's
    `schema`, if it is given) and `json_schema`, `{"type": "regex", "pattern": …}` (Rust's syntax,
    for the whole answer) and `{"type": "grammar", "grammar": …}` (llguidance's variant of Lark,
    rule `start`). A schema is always enforced, `strict` or not. Schemas may have 64 KiB (as compact
    JSON, those of all tools together), patterns and grammars 8 KiB.

    Raises InvalidRequestError for a source that is too long or cannot be enforced, and
    MissingExtraError without the library.
    """
    source = _make_grammar_source(target, request, tool_use, is_reasoning=is_reasoning)
    if source is None:
        return None
    source.check_source_length()
    tokenizer = target.tokenizer
    if not isinstance(tokenizer, GrammarTokenizer | VocabularyTokenizer):
        raise InvalidRequestError(
            f"{source.field} is set, but {target.name} does not expose its vocabulary; leave it out"
        )
    if not tokenizer.eos_token_ids:
        raise InvalidRequestError(f"{source.field} is set, but {target.name} has no end-of-answer token; leave it out")
    if not _is_grammar_library_installed():
        raise MissingExtraError(
            f"{source.field} needs {_LIBRARY}, which is not installed; run: pip install 'llm-spec[grammar]'"
        )
    matcher = _make_grammar_matcher(source, target, tokenizer)
    if request.prefix:
        _advance_matcher_over_prefix(matcher, tokenizer, request.prefix, source.field)
    return GrammarConstraint(
        matcher, vocab_size=target.vocab_size, eos_token_ids=tokenizer.eos_token_ids, field=source.field
    )


def _make_grammar_source(
    target: TokenModel, request: ChatRequest, tool_use: ToolUse, *, is_reasoning: bool
) -> _GrammarSource | None:
    source = None if request.response_format is None else _GrammarSource.from_response_format(request.response_format)
    tokenizer = target.tokenizer
    if not tool_use.tools or not isinstance(tokenizer, MessageFormatTokenizer) or tokenizer.message_format is None:
        return source
    if not tool_use.is_constrained and source is None:
        return None
    if source is not None and source.kind != "json_schema" and not tool_use.must_call:
        raise InvalidRequestError(f"response_format is a {source.kind}, and tools are set; give one of the two")
    grammar = write_tool_grammar(
        tokenizer.message_format,
        tokenizer.reasoning,
        tool_use,
        is_reasoning=is_reasoning,
        mark_tokens=tokenizer.mark_tokens,
        dump_schema=_dump_schema_with_whitespace_rule,
        content_schema=None if source is None or tool_use.must_call else source.source,
    )
    return _GrammarSource("tools", grammar, "tools")


class GrammarConstraint:
    """A `TokenConstraint` of one request, from a matcher at the beginning of its answer.

    Only EOS may follow a complete answer, and nothing but a complete answer. After an answer that
    the grammar does not allow, any token may follow: only a draft asks about it, and the target
    never emits it.
    """

    def __init__(
        self, matcher: LLMatcher, *, vocab_size: int, eos_token_ids: frozenset[int], field: str = "response_format"
    ) -> None:
        self._beginning = matcher
        self._field = field
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._anything = _make_mask_read_only(np.ones(vocab_size, np.bool_))
        self._end = _make_mask_read_only(np.isin(np.arange(vocab_size), [*eos_token_ids]))
        self._reset_matcher()

    def mask(self, answer_ids: Sequence[int]) -> Mask:
        if answer_ids and answer_ids[-1] in self._eos_token_ids:
            return self._end
        num_common = _count_common_prefix(self._ids, answer_ids)
        if num_common == len(answer_ids) and num_common in self._masks:
            return self._masks[num_common]
        self._roll_back_matcher(len(self._ids) - num_common)
        return self._compute_mask() if self._advance_matcher(answer_ids[num_common:]) else self._anything

    def _reset_matcher(self) -> None:
        self._matcher = self._beginning.deep_copy()
        self._ids: list[int] = []  # the part of the answer that the matcher has read
        # by the number of ids before them; draft and target ask for the same ones
        self._masks: dict[int, Mask] = {}

    def _roll_back_matcher(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._ids[-num_tokens:]
            self._masks = {position: mask for position, mask in self._masks.items() if position <= len(self._ids)}

    def _advance_matcher(self, token_ids: Sequence[int]) -> bool:
        """Let the matcher read as far as the grammar allows; return True if it read all."""
        num_read = self._matcher.try_consume_tokens([*token_ids])
        self._raise_if_matcher_failed()
        self._ids += token_ids[:num_read]
        return num_read == len(token_ids)

    def _compute_mask(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._raise_if_matcher_failed()
        mask = _make_mask_read_only(np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_))
        if len(self._masks) >= _CACHED_POSITIONS:
            del self._masks[next(iter(self._masks))]
        self._masks[len(self._ids)] = mask
        return mask

    def _raise_if_matcher_failed(self) -> None:
        """Raise if the grammar can read no more: it is too complex, or the tokens cannot write it.

        A matcher answers nothing after an error. It is reset, because perhaps only a draft led it
        there.
        """
        if self._matcher.is_error():
            where, error = len(self._ids), self._matcher.get_error() or self._matcher.stop_reason()
            self._reset_matcher()
            raise InvalidRequestError(
                f"{self._field} cannot be followed beyond token {where}: {_format_grammar_library_error(error)}"
            )


# -------------------------------------------------------------------------------------- the request


class _GrammarSource(NamedTuple):
    """A constraint: a schema (as JSON), pattern or grammar, and its request field."""

    kind: Literal["json_schema", "regex", "grammar", "tools"]
    source: str
    field: str = "response_format"

    @property
    def error_label(self) -> str:
        """The name in errors."""
        return self.field if self.kind == self.field else f"{self.field} {self.kind}"

    @classmethod
    def from_response_format(cls, response_format: Mapping[str, Any]) -> _GrammarSource | None:
        """Parse OpenAI's dict; returns None if any text is allowed."""
        kind = _require_field(response_format, "type", str, "response_format")
        _refuse_stray_constraints(response_format, kind)
        match kind:
            case "text":
                return None
            case "json_object" | "json_schema":
                schema, where = _find_schema(response_format, kind)
                return cls("json_schema", _dump_schema_with_whitespace_rule(schema, where))
            case "regex":
                return cls("regex", _require_field(response_format, "pattern", str, "response_format"))
            case "grammar":
                return cls("grammar", _require_field(response_format, "grammar", str, "response_format"))
            case _:
                kinds = ", ".join(_CONSTRAINTS)
                raise InvalidRequestError(f"response_format.type is {kind!r}; it must be one of {kinds}")

    def check_source_length(self) -> None:
        """Raise InvalidRequestError if the source needs too much time or stack to compile."""
        num_bytes, most = len(self.source.encode(errors="surrogatepass")), _MAX_SOURCE[self.kind]
        if num_bytes > most:
            raise InvalidRequestError(f"{self.error_label} has {num_bytes} bytes; it may have {most}")

    def compile_to_library_grammar(self) -> str:
        """Return the source in the library's own form; its errors show when a matcher is made."""
        from llguidance import LLMatcher

        match self.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(self.source)
            case "regex":
                return LLMatcher.grammar_from_regex(self.source)
            case "grammar" | "tools":
                return LLMatcher.grammar_from_lark(self.source)


def _refuse_stray_constraints(response_format: Mapping[str, Any], kind: str) -> None:
    """Refuse a field that constrains nothing in a format of this type: its caller relies on it."""
    known = {name for names in _CONSTRAINTS.values() for name in names}
    given = {name for name in known if response_format.get(name) is not None}
    stray = sorted(given - {*_CONSTRAINTS.get(kind, known)})
    if stray:
        takes = " or ".join(_CONSTRAINTS[kind]) or "no constraint"
        raise InvalidRequestError(f"response_format.{stray[0]} is set; a format of type {kind!r} takes {takes}")


def _find_schema(response_format: Mapping[str, Any], kind: str) -> tuple[Mapping[str, Any], str]:
    """Return the schema of a JSON format, and the field that holds it.

    `json_object` may leave it out: any object is then allowed. OpenAI's `json_object` has no
    schema, llama.cpp gives it as `schema`, and others nest it as in `json_schema`.
    """
    given = [name for name in _CONSTRAINTS[kind] if response_format.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequestError("response_format has schema and json_schema; give one of the two")
    if kind == "json_object" and not given:
        return _ANY_OBJECT, "response_format"
    if given == ["schema"]:
        schema, where = _require_field(response_format, "schema", Mapping, "response_format"), "response_format.schema"
    else:
        named = _require_field(response_format, "json_schema", Mapping, "response_format")
        where = "response_format.json_schema.schema"
        schema = _require_field(named, "schema", Mapping, "response_format.json_schema")
    return schema if schema or kind == "json_schema" else _ANY_OBJECT, where


def _require_field(fields: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value: object = fields.get(name)
    if not isinstance(value, kind):
        wanted = "a text" if kind is str else "an object"
        raise InvalidRequestError(f"{where}.{name} is {value!r}; it must be {wanted}")
    return value


def _dump_schema_with_whitespace_rule(schema: Mapping[str, Any], where: str) -> str:
    # llguidance's own place for options
    options = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
    try:
        return json.dumps({**options, **schema}, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not valid JSON: {error}") from error


# -------------------------------------------------------------------------------------- the library


def _is_grammar_library_installed() -> bool:
    return importlib.util.find_spec(_LIBRARY) is not None


_tokenizers: dict[tuple[str, int, frozenset[int]], LLTokenizer] = {}
_tokenizers_lock = threading.Lock()


@call_in_forked_child
def _reset_after_fork() -> None:
    global _tokenizers_lock  # noqa: PLW0603 - a lock that may be held cannot be released
    _tokenizers_lock = threading.Lock()


def _get_ll_tokenizer(target: TokenModel, tokenizer: GrammarTokenizer | VocabularyTokenizer) -> LLTokenizer:
    """Return the vocabulary in the library's form: slow to make, shared by all requests."""
    key = (tokenizer.fingerprint, target.vocab_size, tokenizer.eos_token_ids)
    with _tokenizers_lock:
        if key not in _tokenizers:
            if len(_tokenizers) >= _CACHED_TOKENIZERS:
                del _tokenizers[next(iter(_tokenizers))]
            _tokenizers[key] = _build_ll_tokenizer(target, tokenizer)
        return _tokenizers[key]


def _build_ll_tokenizer(target: TokenModel, tokenizer: GrammarTokenizer | VocabularyTokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    eos_token_ids = sorted(tokenizer.eos_token_ids)
    vocabulary: TokenizerWrapper | str
    if isinstance(tokenizer, VocabularyTokenizer):
        vocabulary = TokenizerWrapper(_ListedVocabulary(tokenizer))
    else:
        vocabulary = tokenizer.to_tokenizer_json()
    try:
        return LLTokenizer(vocabulary, n_vocab=target.vocab_size, eos_token=eos_token_ids)
    except ValueError as error:
        what = f"{_LIBRARY} cannot read the tokenizer of {target.name}: {error}"
        raise InvalidRequestError(f"response_format or tools are set; {what}") from error


class _ListedVocabulary:
    """A listed vocabulary in the library's form; encodes text that a grammar determines."""

    def __init__(self, tokenizer: VocabularyTokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokenizer.list_tokens()
        self.special_token_ids = tokenizer.list_control_token_ids()
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _make_grammar_matcher(
    source: _GrammarSource, target: TokenModel, tokenizer: GrammarTokenizer | VocabularyTokenizer
) -> LLMatcher:
    from llguidance import LLMatcher

    vocabulary = _get_ll_tokenizer(target, tokenizer)
    matcher = call_on_deep_stack(lambda: LLMatcher(vocabulary, source.compile_to_library_grammar(), log_level=0))
    if matcher.is_error():
        raise InvalidRequestError(
            f"{source.error_label} cannot be used: {_format_grammar_library_error(matcher.get_error())}"
        )
    return matcher


def _advance_matcher_over_prefix(matcher: LLMatcher, tokenizer: Tokenizer, prefix: str, field: str) -> None:
    """Let a matcher read the prefix of the answer, which is constrained, too."""
    prefix_ids = tokenizer.encode(prefix)
    num_read = matcher.try_consume_tokens(prefix_ids)
    if num_read < len(prefix_ids):
        read = tokenizer.decode(prefix_ids[:num_read])
        raise InvalidRequestError(f"prefix is {prefix!r}; {field} does not allow what follows {read!r} in it")


def _count_common_prefix(read_ids: list[int], answer_ids: Sequence[int]) -> int:
    """Return how many leading ids are equal."""
    shorter = min(len(read_ids), len(answer_ids))
    # nearly always true, and much faster than a loop
    if read_ids[:shorter] == answer_ids[:shorter]:
        return shorter
    return next(i for i in range(shorter) if read_ids[i] != answer_ids[i])


def _make_mask_read_only(mask: Mask) -> Mask:
    mask.setflags(write=False)
    return mask


def _format_grammar_library_error(error: str) -> str:
    """Return the library's error without its drawing and state, which may quote the answer."""
    return " ".join(_ERROR_DRAWING.split(error)[0].split())
