"""Drafts that follow earlier texts in another form: what they propose, when they read, and what they keep apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from llm_spec import CascadeDraft, ChatRequest, Fixed, PromptLookup, SpeculativeConfig, SpeculativeDecoder, SuffixDraft
from llm_spec.contract.optional import open_token_draft
from llm_spec.contract.token_model import DraftToken, RequestAwareDrafter, TokenDraft
from llm_spec.testing import ByteTokenizer, LocalProvider, TableModel
from llm_spec.testing.conformance import check_draft_conformance

FILE = 'import os\n\n\ndef find(name):\n\treturn os.environ["A_" + name]\n'
ESCAPED = 'import os\\n\\n\\ndef find(name):\\n\\treturn os.environ[\\"A_\\" + name]\\n'
MAKERS: list[Callable[[], Any]] = [PromptLookup, SuffixDraft, lambda: CascadeDraft(PromptLookup(), SuffixDraft())]
parametrize_drafts = pytest.mark.parametrize("make", MAKERS, ids=["lookup", "suffix", "joined"])


class CountingTokenizer(ByteTokenizer):
    """Remembers what was encoded beside prompts, which are short ones."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return super().encode(text)

    def encode_chat(self, request: ChatRequest) -> list[int]:  # noqa: ARG002 - the same for all
        return [1, 2, 3]


def make_request(result: str = FILE, arguments: str = '{"path": "find.py"}') -> ChatRequest:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": arguments}}
    return ChatRequest.create(
        [
            {"role": "user", "content": "mend it"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": result},
        ]
    )


def open_draft(drafter: Any, request: ChatRequest | None, target: TableModel) -> tuple[TokenDraft, list[int]]:
    prompt_ids = target.tokenizer.encode_chat(request or make_request())
    return open_token_draft(drafter, target, choose, prompt_ids, request), prompt_ids


def choose(logits: Any, context_ids: Any) -> DraftToken:  # noqa: ARG001 - greedy
    return DraftToken(int(logits.argmax()))


def propose(drafter: Any, answer: str, request: ChatRequest | None, num: int = 24) -> str:
    """What is drafted after an answer that grew by one character a round."""
    draft, context_ids = open_draft(drafter, request, TableModel())
    tokens: list[DraftToken] = []
    for byte in answer.encode():
        context_ids.append(byte)
        tokens = list(itertools.islice(draft.propose(context_ids), num))
    draft.close()
    return bytes(token.token_id for token in tokens).decode()


@parametrize_drafts
def test_a_file_that_was_read_is_drafted_as_a_call_writes_it(make: Callable[[], Any]) -> None:
    """Over escapes and to its end, where the prompt alone knows nothing of them."""
    begun = 'write {"content": "import os\\n\\n\\n'
    assert propose(make(), begun, make_request(), 100) == ESCAPED.removeprefix("import os\\n\\n\\n")
    assert propose(make(), begun, None, 4) != "def "


@parametrize_drafts
def test_a_file_that_a_call_wrote_is_drafted_as_it_is(make: Callable[[], Any]) -> None:
    """Also a file that was read with numbered lines."""
    numbered = "".join(f"{i}\t{line}" for i, line in enumerate(FILE.splitlines(keepends=True), 1))
    for request in (make_request("ok", '{"text": "' + ESCAPED + '"}'), make_request(numbered)):
        assert propose(make(), "Here:\nimport os\n\n\ndef ", request, 100) == FILE.partition("def ")[2]


@parametrize_drafts
def test_a_diff_goes_on_with_the_lines_of_the_file(make: Callable[[], Any]) -> None:
    """In an answer and in a call's argument."""
    assert propose(make(), "\n@@ -1 +1 @@\n import os\n \n", make_request(), 22) == " \n def find(name):\n \tr"
    assert propose(make(), "\\n@@ -1 +1 @@\\n import os\\n \\n", make_request(), 16) == " \\n def find(nam"


@parametrize_drafts
def test_nothing_is_encoded_before_it_is_needed(make: Callable[[], Any]) -> None:
    """Not without tools, nor for an answer that writes no escapes; then some thousand characters a round."""
    result = "".join(f"line {i}\n" for i in range(1_000_000))
    plain = ChatRequest.create(result[-100_000:])
    for request, answer in ((plain, 'a\\n"b\n@@'), (make_request(result), 'Done.\n<tool_call>\n{"name": "f"}')):
        tokenizer = CountingTokenizer()
        draft, context_ids = open_draft(make(), request, TableModel(tokenizer=tokenizer))
        for byte in answer.encode():
            context_ids.append(byte)
            list(itertools.islice(draft.propose(context_ids), 4))
        assert tokenizer.texts == []
    context_ids += b"\\n\x01"
    for _ in range(40):
        num_before = sum(map(len, tokenizer.texts))
        context_ids.append(1)
        list(itertools.islice(draft.propose(context_ids), 4))
        assert sum(map(len, tokenizer.texts)) - num_before <= 2 * 4096  # a joined draft has two readers
    assert 0 < sum(map(len, tokenizer.texts)) < 2 * 2 * 65_536


@parametrize_drafts
def test_a_request_is_never_anothers(make: Callable[[], Any]) -> None:
    """Its texts end with it: in the same draft, in another client's, and where both are open at once."""
    drafter, other = make(), make()
    begun = 'write {"content": "import os\\n\\n\\n'
    first, context_ids = open_draft(drafter, make_request(), TableModel())
    unknown = propose(make(), begun, make_request("nothing\nhere"))
    assert propose(drafter, begun, make_request("nothing\nhere")) == unknown
    list(itertools.islice(first.propose([*context_ids, *begun.encode()]), 4))
    first.close()
    assert propose(other, begun, make_request("nothing\nhere")) == unknown


def test_a_draft_with_a_request_has_its_clients_history() -> None:
    """What it was answered goes into that one, and into no other client's."""
    shared = SuffixDraft()
    one, two = shared.copy_for_new_client(), shared.copy_for_new_client()
    draft, context_ids = open_draft(one, make_request(), TableModel())
    list(itertools.islice(draft.propose(context_ids), 1))
    context_ids += b"<tool_call>xylophone</tool_call>"
    list(itertools.islice(draft.propose(context_ids), 1))
    draft.close()
    assert propose(one, "<tool_call>xyl", make_request(), 6) == "ophone"
    assert propose(two, "<tool_call>xyl", make_request(), 6) == propose(
        SuffixDraft(), "<tool_call>xyl", make_request(), 6
    )


@parametrize_drafts
async def test_text_and_rounds(make: Callable[[], Any]) -> None:
    """A decoder shows its draft the request: the same text as plain, in fewer rounds than without tools."""
    text = 'write {"content": "' + ESCAPED + '"}'
    provider = LocalProvider(TableModel(text, order=12))
    plain = await SpeculativeDecoder(target=provider, draft=None).decode(make_request())
    assert isinstance(make(), RequestAwareDrafter)
    assert plain.content == text
    results = {}
    for name, request in (("tools", make_request()), ("none", ChatRequest.create(FILE))):
        decoder = SpeculativeDecoder(
            target=provider, draft=make(), config=SpeculativeConfig(lookahead=Fixed(8), baseline_every=0)
        )
        results[name] = await decoder.decode(request)
        assert results[name].content == text
        assert results[name].fallbacks == ()
    assert results["tools"].stats.num_rounds < results["none"].stats.num_rounds


@parametrize_drafts
async def test_sampled_text_is_plain_text(make: Callable[[], Any]) -> None:
    """With noise that leaves the text again and again."""
    provider = LocalProvider(TableModel('{"content": "' + ESCAPED + '"}', order=3))
    for seed in range(8):
        options: dict[str, Any] = {"max_tokens": 120, "temperature": 1.6, "seed": seed}
        request = ChatRequest.create(make_request().messages, **options)
        plain = await SpeculativeDecoder(target=provider, draft=None).decode(request)
        drafted = await SpeculativeDecoder(
            target=provider, draft=make(), config=SpeculativeConfig(strategy="tokens")
        ).decode(request)
        assert drafted.content == plain.content


async def test_a_draft_that_knows_no_requests_goes_on_as_it_is() -> None:
    """Within a joined draft, too."""

    class Other:
        name, capabilities = PromptLookup.name, PromptLookup.capabilities
        _lookup = PromptLookup()
        draft, aclose = _lookup.draft, _lookup.aclose
        token_draft_refusal, open_token_draft = _lookup.token_draft_refusal, _lookup.open_token_draft

    request = make_request()
    provider = LocalProvider(TableModel("mend it, mend it"))
    assert not isinstance(Other(), RequestAwareDrafter)
    for draft in (Other(), CascadeDraft(Other(), PromptLookup())):
        result = await SpeculativeDecoder(
            target=provider, draft=draft, config=SpeculativeConfig(strategy="tokens")
        ).decode(request)
        assert result.content == "mend it, mend it"


async def test_the_contract_holds() -> None:
    """Of the drafts that read requests."""
    for make in MAKERS:
        await check_draft_conformance(make, target=TableModel())
