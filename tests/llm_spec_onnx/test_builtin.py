"""The pair that comes along: small, exact, light."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from support.matrix import every_combination
from support.tiny_models import BUILTIN

from llm_spec import (
    CascadeDraft,
    CostAware,
    Ewma,
    Fixed,
    PromptLookup,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SuffixDraft,
    Threshold,
    open_draft,
    open_provider,
)
from llm_spec.local.lookahead import LookaheadPolicy
from llm_spec.testing import RandomDraft, check_provider_conformance

TARGET = open_provider("builtin:target")
MODEL_DRAFT = open_draft("builtin:draft")
DRAFTS = {
    "model": MODEL_DRAFT,
    "random": RandomDraft(3),
    "lookup": PromptLookup(),
    "joined": CascadeDraft(PromptLookup(), MODEL_DRAFT),
    "suffix": SuffixDraft(),
    "suffix joined": CascadeDraft(PromptLookup(), SuffixDraft(), MODEL_DRAFT),
    "given": ReferenceDraft("    self.assertEqual(fd.close(), None)\n"),
}
POLICIES: dict[str, LookaheadPolicy] = {
    "1": Fixed(1),
    "8": Fixed(8),
    "32": Fixed(32),
    "adaptive": CostAware(),
    "threshold": Threshold(),
    "ewma": Ewma(),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 11},
    "filtered": {"temperature": 0.8, "seed": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        "temperature": 0.9,
        "seed": 13,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {70: 2.0, 57: -3.0},
    },
}


OPTIONS: dict[str, Any] = {"max_tokens": 32, "stop": "XYZ"}
PROMPT = "def test_fd_close(self):"


@pytest.fixture(scope="module")
def plain_texts() -> dict[str, str]:
    """What the target writes alone, by kind of sampling."""

    async def write(sampling: str) -> str:
        return (
            await SpeculativeDecoder(target=TARGET, draft=None).decode(PROMPT, **OPTIONS, **SAMPLING[sampling])
        ).content

    return {sampling: asyncio.run(write(sampling)) for sampling in SAMPLING}


@every_combination(draft=DRAFTS, policy=POLICIES, sampling=SAMPLING)
async def test_same_text(draft: str, policy: str, sampling: str, plain_texts: dict[str, str]) -> None:
    """With every draft, lookahead policy and kind of sampling the text is the one of the target alone."""
    config = SpeculativeConfig(strategy="tokens", lookahead=POLICIES[policy])
    result = await SpeculativeDecoder(target=TARGET, draft=DRAFTS[draft], config=config).decode(
        PROMPT, **OPTIONS, **SAMPLING[sampling]
    )
    assert result.content == plain_texts[sampling]
    assert (result.same_text, result.guarantee, result.fallbacks) == (True, "exact", ())


async def test_conforms() -> None:
    """builtin:target keeps the promises of a provider."""
    await check_provider_conformance(lambda: open_provider("builtin:target"), patience_s=600.0)


async def test_a_mismatched_vocabulary_is_plain_or_refused() -> None:
    """A draft of another tokenizer cannot propose ids to this target: `auto` decodes plainly."""
    from llm_spec import UnsupportedError
    from llm_spec.testing import LocalProvider, TableModel

    stranger = LocalProvider(TableModel(vocab_size=300))
    result = await SpeculativeDecoder(target=TARGET, draft=stranger).decode("def f():", max_tokens=4)
    assert result.strategy == "plain"
    with pytest.raises(UnsupportedError, match="vocabulary 300"):
        await SpeculativeDecoder(target=TARGET, draft=stranger, config=SpeculativeConfig(strategy="tokens")).decode(
            "def f():"
        )


def test_size() -> None:
    """Both folders together take at most 15 MB."""
    assert sum(path.stat().st_size for path in BUILTIN.rglob("*") if path.is_file()) <= 15e6


def test_memory_at_rest() -> None:
    """A process with both models loaded stays below 200 MB resident."""
    code = (
        "from llm_spec import SpeculativeDecoder; from pathlib import Path; import os\n"
        "decoder = SpeculativeDecoder(target='builtin:target', draft='lookup+builtin:draft')\n"
        "print(int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 200e6


def test_import_is_light() -> None:
    """Registering the providers loads none of what they need."""
    code = (
        "import sys; from llm_spec.decoder.entry_points import registered_providers; registered_providers()\n"
        "print(sorted({'onnxruntime', 'tokenizers', 'jinja2'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
