"""An agent's history as a draft: tokens a round with and without the forms in which earlier texts come back.

    python benchmarks/agent_history.py --tokenizer FOLDER [--files 12]

Every turn of an assistant, calls included, is a text to be written behind the messages before it. No model runs, so
`llm-spec bench` cannot give these figures: a pass of w tokens costs 1 + .05 (w - 1), a drafted token .002, and the
lookahead is the default one. The synthetic agent reads modules of Python's standard library (plainly, or with numbered
lines) and edits them; `history` is one draft of a client for all turns of a transcript. Without forms a draft sees the
ids of the prompt alone. Shares are of the accepted tokens, by what they were copied from; times of drafting are this
machine's.

FOLDER has a tokenizer.json and a chat template whose model writes calls as Hermes does.
"""

from __future__ import annotations

import argparse
import difflib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from predicted_edits import edit_file, list_modules

from llm_spec import ChatRequest, InvalidRequestError, PromptLookup, SuffixDraft
from llm_spec.contract.optional import open_token_draft
from llm_spec.contract.token_model import DraftToken, TokenDrafter, TokenModel, TokenSession
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer
from llm_spec.local.lookahead import CostAware, RoundFeedback
from llm_spec.local.loop import count_right_tokens, count_worth_verifying
from llm_spec.local.propose import Proposer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys},
        },
    }
    for name, description, keys in (
        ("read_file", "Read a file", ["path"]),
        ("write_file", "Write a whole file", ["path", "content"]),
        ("str_replace", "Replace a text that occurs once in a file", ["path", "old_str", "new_str"]),
        ("apply_patch", "Apply a unified diff", ["patch"]),
    )
]
MAX_WIDTH = 64


class Turn(NamedTuple):
    """What the assistant writes, and behind which messages."""

    kind: str
    request: ChatRequest
    text: str
    is_first: bool  # of a transcript


@dataclass
class Sums:
    """Of the turns of one kind, by one draft."""

    num_tokens: int = 0
    num_rounds: int = 0
    cost: float = 0.0
    draft_s: float = 0.0
    accepted: Counter[str] = field(default_factory=Counter[str])

    def count_tokens_a_round(self) -> float:
        return self.num_tokens / max(1, self.num_rounds)

    def speedup(self) -> float:
        return self.num_tokens / max(1.0, self.cost)

    def draft_us(self) -> float:
        return self.draft_s / max(1, self.num_tokens) * 1e6


def write_call(name: str, arguments: Any) -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def make_call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


# ------------------------------------------------------------------------------------ transcripts


def make_turns(num_files: int) -> Iterator[Turn]:
    """For each file: a replacement, the whole file and a patch as calls; a diff and the whole file as answers."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(list_modules())]
    fitting = [text for text in texts if 60 <= text.count("\n") <= 220 and len(text) <= 8000]
    for number, before in enumerate(fitting[:num_files]):
        after = edit_file(before, 0.1, number)
        path = f"src/module_{number}.py"
        user = {"role": "user", "content": f"Please clean up {path}."}
        read = make_call("read_file", {"path": path})
        numbered = "".join(f"{i:6}\t{line}" for i, line in enumerate(before.splitlines(keepends=True), 1))
        diff = make_diff(before, after, path)
        wrote = [user, make_call("write_file", {"path": path, "content": after})]
        wrote += [{"role": "tool", "tool_call_id": "c1", "content": "ok"}, {"role": "user", "content": "Show it."}]
        writings = [
            ("str_replace", write_call("str_replace", make_replacement(path, before, after))),
            ("write_file", write_call("write_file", {"path": path, "content": after})),
            ("apply_patch", write_call("apply_patch", {"patch": diff})),
            ("diff as answer", f"Here is the change:\n\n```diff\n{diff}```"),
        ]
        is_first = True
        for reading, content in (("", before), (", numbered", numbered)):
            messages = [user, read, {"role": "tool", "tool_call_id": "c1", "content": content}]
            for kind, text in writings:
                yield Turn(kind + reading, ChatRequest.create(messages, tools=TOOLS), text, is_first)
                is_first = False
        yield Turn("file as answer", ChatRequest.create(wrote, tools=TOOLS), f"```python\n{after}```", is_first)


def make_diff(before: str, after: str, path: str) -> str:
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))


def make_replacement(path: str, before: str, after: str) -> dict[str, str]:
    """The first change with three lines around it."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    _, i1, i2, j1, j2 = next(change for change in changes if change[0] != "equal")
    kept_before, kept_after = old[max(0, i1 - 3) : i1], old[i2 : i2 + 3]
    old_str, new_str = ("".join([*kept_before, *part, *kept_after]) for part in (old[i1:i2], new[j1:j2]))
    return {"path": path, "old_str": old_str, "new_str": new_str}


# ---------------------------------------------------------------------------------------- rounds


class UnreadModel:
    """A tokenizer's model as drafts know it; nothing asks it for logits."""

    name = "unread"
    context_length = 1 << 20
    max_width = MAX_WIDTH
    same_text = True

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size

    def open(self, *, exact: bool = True) -> TokenSession:
        raise NotImplementedError("costs are simulated; no draft of this program asks the model")


def choose(logits: Any, context_ids: Sequence[int]) -> DraftToken:  # noqa: ARG001 - nothing is sampled
    return DraftToken(int(logits.argmax()))


def write_turn(drafter: TokenDrafter, model: TokenModel, turn: Turn, sums: Sums, *, with_forms: bool) -> None:
    """Draft and verify until the turn is written; raises InvalidRequestError where the prompt is too long."""
    prompt_ids = model.tokenizer.encode_chat(turn.request)
    answer_ids = [*model.tokenizer.encode(turn.text), min(model.tokenizer.eos_token_ids)]
    context_ids = list(prompt_ids)
    request = turn.request if with_forms else None
    draft = open_token_draft(drafter, model, choose, tuple(prompt_ids), request)
    proposer = Proposer(model, context_ids, timeout_s=30.0, cancelled=threading.Event())
    proposer.open_draft_if_possible(lambda: draft)
    lookahead = CostAware().start()
    while num_left := len(prompt_ids) + len(answer_ids) - len(context_ids):
        started = time.perf_counter()
        proposed = proposer.propose(lookahead, min(num_left - 1, MAX_WIDTH - 1))
        proposal = proposed[: count_worth_verifying(proposed, lookahead)]
        sums.draft_s += time.perf_counter() - started
        rest = answer_ids[len(answer_ids) - num_left :]
        num_accepted = count_right_tokens(proposal, rest)
        context_ids += rest[: num_accepted + 1]
        verify_s, draft_s = 1 + 0.05 * len(proposal), 0.002 * len(proposed)
        confidences = tuple(token.confidence for token in proposed)
        num_right = count_right_tokens(proposed, rest[: num_accepted + 1])
        lookahead.update(RoundFeedback(len(proposal), num_accepted, draft_s, verify_s, confidences, num_right))
        sums.num_rounds += 1
        sums.cost += verify_s + draft_s
        sums.accepted[getattr(draft, "source", "?")] += num_accepted
    assert proposer.fallback is None, proposer.fallback
    proposer.close()
    sums.num_tokens += len(answer_ids)


def measure(turns: Sequence[Turn], tokenizer: FolderTokenizer) -> list[str]:
    """Print a table; why turns were left out, such as prompts that are too long."""
    model = UnreadModel(tokenizer)
    contenders = {
        "lookup": partial(PromptLookup),
        "suffix": partial(SuffixDraft, max_stored_tokens=0),
        "suffix, history": partial(SuffixDraft),
    }
    left_out: list[str] = []
    for name, make in contenders.items():
        sums: dict[tuple[str, bool], Sums] = {}
        for with_forms in (False, True):
            drafter: TokenDrafter = make()
            left_out = []
            for turn in turns:
                drafter = make() if turn.is_first else drafter
                try:
                    counted = sums.setdefault((turn.kind, with_forms), Sums())
                    write_turn(drafter, model, turn, counted, with_forms=with_forms)
                except InvalidRequestError as error:
                    left_out.append(str(error))
        if len(left_out) == len(turns):
            raise SystemExit(f"none of {len(turns)} turns can be drafted for: {left_out[-1]}")
        for kind in dict.fromkeys(turn.kind for turn in turns):
            print_row(name, kind, sums[kind, False], sums[kind, True])
    return left_out


def print_row(name: str, kind: str, without: Sums, with_forms: Sums) -> None:
    rounds, speedups, drafting = (
        [of(one) for one in (without, with_forms)] for of in (Sums.count_tokens_a_round, Sums.speedup, Sums.draft_us)
    )
    total = max(1, with_forms.accepted.total())
    shares = ", ".join(f"{source} {num / total:.0%}" for source, num in with_forms.accepted.most_common())
    print(
        f"{name:16} {kind:24} {with_forms.num_tokens:7} tokens  {rounds[0]:5.2f} -> {rounds[1]:5.2f} a round  "
        f"{speedups[0]:5.2f}x -> {speedups[1]:5.2f}x  draft {drafting[0]:3.0f} -> {drafting[1]:3.0f} us a token  "
        f"{shares}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", required=True, type=Path, help="a folder with tokenizer.json and chat template")
    parser.add_argument("--files", type=int, default=12)
    arguments = parser.parse_args()
    tokenizer = FolderTokenizer(arguments.tokenizer)
    turns = list(make_turns(arguments.files))
    left_out = measure(turns, tokenizer)
    print(f"{len(turns)} turns, {len(left_out)} left out{f'; the last: {left_out[-1]}' if left_out else ''}")


if __name__ == "__main__":
    main()
