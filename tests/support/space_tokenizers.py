"""Small tokenizers that treat spaces as those of well-known models do, and folders of tiny models with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from support.tiny_models import write_tiny_model

__all__ = ["CHAT_TEMPLATE", "KINDS", "make_tokenizer", "write_model_with_tokenizer"]

# prepend: as Llama 2's and Mistral's, which put a space before every text. metaspace: the same in the newer layout.
# byte_level: as GPT-2's and most others', which add nothing.
KINDS = ("prepend", "metaspace", "byte_level")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SPACE = "▁"
_WORDS = ["the", "end", "time", "out", "wil", "It", "is"]
_CONTROL = ["<unk>", "<s>", "</s>"]


def make_tokenizer(kind: str) -> Tokenizer:
    """Control tokens, one token for each byte or letter, two line breaks, and words with and without a space."""
    if kind == "byte_level":
        return _make_byte_level_tokenizer()
    names = [*_CONTROL, *(f"<0x{value:02X}>" for value in range(256)), _SPACE, "\n", *map(chr, range(33, 127))]
    merges = [("\n", "\n")]
    for word in _WORDS:
        for start in (_SPACE, word[0]):
            rest = word if start == _SPACE else word[1:]
            merges += [(start + rest[:count], rest[count]) for count in range(len(rest))]
    names += [first + second for first, second in merges]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(
        vocabulary, list(dict.fromkeys(merges)), unk_token=_CONTROL[0], byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _CONTROL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _make_byte_level_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate([*_CONTROL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _CONTROL])
    return tokenizer


def write_model_with_tokenizer(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    """A tiny random model with this tokenizer, whose end of a turn is `</s>`."""
    write_tiny_model(folder, "shared", "fp32", seed=3)
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": CHAT_TEMPLATE, **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    model_config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(model_config), encoding="utf-8")
    return folder
