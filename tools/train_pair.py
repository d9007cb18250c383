"""Train, or replace, the built-in pair of models: a small Llama target and the draft distilled from it.

The text is the source of the running Python's standard library, half as raw files, half as chats that `ast` cuts out
of it: the user gives a signature and docstring, the assistant the body. Every 50th file is held out.

    train_pair.py data --out DIR                                    counts, and DIR/prompts.jsonl
    train_pair.py tokenizer --out DIR                               byte-level BPE with the chat template
    train_pair.py target --tokenizer DIR --out DIR --minutes 60
    train_pair.py answers --target DIR --out FILE --minutes 15      the target's own answers, with its hidden states
    train_pair.py draft --target DIR --out DIR --minutes 30 [--init DIR] [--answers FILE ...]
    train_pair.py agree --target DIR --prompts FILE --drafts DIR  acceptance, greedy and at temperature 1

A draft is judged on what the target itself writes, so distilling on the target's own answers raises acceptance more
than distilling on the corpus. An answer is stored with the target's last hidden states, 512 bytes a token: one product
with the output embedding gives back its whole distribution, and the target need not run again.

Needs torch, transformers and tokenizers. Trains in float32 on the CPU, writes Hugging Face folders in float16.
"""

# ruff: noqa: S311 - the random module shuffles training data here
from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sysconfig
import textwrap
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROLES = ["<|user|>", "<|assistant|>", "<|system|>"]
NAMED_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<pad>"}
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<pad>", *ROLES, "<|end|>"]
BOS_ID, PAD_ID, END_ID = 1, 3, 7
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>Tools: {{tools|tojson}}; a call: "
    '<tool_call>{"name": …, "arguments": …}</tool_call><|end|>{% endif %}'
    "{% for m in messages %}<|{{'user' if m['role']=='tool' else m['role']}}|>{{m['content']}}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{c['function']|tojson}}</tool_call>{% endfor %}"
    "{% if not loop.last or add_generation_prompt or m['role']!='assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
TARGET_SHAPE, DRAFT_SHAPE = (256, 704, 8, 4, 64), (192, 512, 2, 6, 32)  # of SIZES
HOLD_OUT_EVERY = 50
UNPARSABLE_DATA = "lib2to3/tests/data/"  # written not to parse: left out before every 50th file is counted
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 160, 96


class Chat(NamedTuple):
    """What the user gives, and what the standard library answers."""

    prompt: str
    reference: str

    @property
    def opening(self) -> str:
        """The chat template's rendering up to where the assistant begins."""
        return f"<|user|>{self.prompt}<|end|><|assistant|>"


Source = tuple[str, list[Chat]]  # a file's text and the chats in it


class Answer(NamedTuple):
    """The target's continuation of a prompt: what follows the first `num_prompt` of the ids."""

    ids: Tensor  # [num_prompt + num_answer], int16
    num_prompt: int
    hidden: Tensor  # [num_answer, hidden_size], float16: the target's last states, each of which predicted one token


def find_chats(tree: ast.Module, lines: Sequence[str]) -> Iterator[Chat]:
    """Each function as a chat: signature, docstring and leading comments, then its body."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = node.body if ast.get_docstring(node, clean=False) is None else node.body[1:]
        if not body:
            continue
        first = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", []))])
        whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).split("\n")
        if num_head := first - node.lineno:
            yield Chat("\n".join(whole[:num_head]), "\n".join(whole[num_head:]))


def read_stdlib() -> tuple[list[Source], list[Source]]:
    """The standard library's (training, held-out) files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py") if "site-packages" not in p.parts)
    parts: tuple[list[Source], list[Source]] = ([], [])
    for rank, path in enumerate(p for p in paths if not p.startswith(UNPARSABLE_DATA)):
        try:
            text = (root / path).read_text("utf-8")
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        parts[rank % HOLD_OUT_EVERY == 0].append((text, list(find_chats(tree, text.splitlines()))))
    return parts


def read_prompts(path: Path | None) -> list[Chat]:
    rows = map(json.loads, path.read_text("utf-8").splitlines()) if path else ()
    return [Chat(row["messages"][0]["content"], row["reference"]) for row in rows]


def exclude_held_out(held_out: Sequence[Chat]) -> list[Source]:
    """Leave out every file that contains a held-out reference, whatever its indentation, and every equal prompt."""
    references = {" ".join(chat.reference.split()) for chat in held_out}
    prompts = {chat.prompt for chat in held_out}
    kept = []
    for text, chats in read_stdlib()[0]:
        flat = " ".join(text.split())
        if not any(reference in flat for reference in references):
            kept.append((text, [chat for chat in chats if chat.prompt not in prompts]))
    return kept


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return list(tokenizer(texts, add_special_tokens=False)["input_ids"])


def build_corpus(tokenizer: Any, sources: Sequence[Source], rng: random.Random) -> Tensor:
    """One stream of token ids, [num_tokens]: files and chats in random order, about as many tokens of either."""
    documents = [[*ids, END_ID] for ids in encode(tokenizer, [text for text, _ in sources])]
    chats = [f"{chat.opening}{chat.reference}<|end|>" for _, chats in sources for chat in chats]
    rng.shuffle(chats)
    room = sum(map(len, documents))
    for ids in encode(tokenizer, chats):
        if room > 0:
            documents.append(ids)
        room -= len(ids)
    rng.shuffle(documents)
    return torch.tensor([token for ids in documents for token in ids])


def create_model(vocab_size: int, shape: Sequence[int]) -> LlamaForCausalLM:
    config: dict[str, Any] = dict(zip(SIZES, shape, strict=True))
    config |= {"max_position_embeddings": 4096, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    config |= {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **config))


def load_model(folder: Path) -> tuple[LlamaForCausalLM, Any]:
    """A model in float32 and its tokenizer."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def save_model(model: LlamaForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder in float16; `model` stays as it is."""
    half: Any = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.to(torch.float16)
    half.save_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # how it was loaded is not part of it
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def group_by_length(prompts: Iterable[list[int]], size: int, rng: random.Random) -> list[Tensor]:
    """Prompts grouped so that none needs padding, each [at most `size`, length], in random order."""
    groups: dict[int, list[list[int]]] = defaultdict(list)
    for ids in prompts:
        groups[len(ids)].append(ids)
    for group in groups.values():
        rng.shuffle(group)
    batches = [torch.tensor(g[i : i + size]) for g in groups.values() for i in range(0, len(g), size)]
    rng.shuffle(batches)
    return batches


@torch.inference_mode()
def generate_answers(model: LlamaForCausalLM, prompts: Tensor, temperature: float) -> list[Answer]:
    """Continue `prompts`, [batch, num_prompt]; greedily at temperature 0."""
    cache, rows, current = DynamicCache(config=model.config), torch.arange(len(prompts)), prompts
    new_ids: list[list[int]] = [[] for _ in rows]
    hidden: list[list[Tensor]] = [[] for _ in rows]
    for _ in range(MAX_NEW_TOKENS):
        states = model.model(current, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        logits = model.lm_head(states)
        if temperature > 0:
            logits = logits / temperature - torch.empty_like(logits).exponential_().log()
        current = logits.argmax(-1, keepdim=True)
        for row, token, state in zip(rows.tolist(), current[:, 0].tolist(), states.half(), strict=True):
            new_ids[row].append(token)
            hidden[row].append(state)
        alive = (current[:, 0] != END_ID).nonzero()[:, 0]
        if len(alive) == 0:
            break
        if len(alive) < len(rows):  # what has ended costs nothing further
            rows, current = rows[alive], current[alive]
            cache.batch_select_indices(alive)
    return [
        Answer(torch.cat([prompt, torch.tensor(ids)]).short(), len(prompt), torch.stack(states))
        for prompt, ids, states in zip(prompts, new_ids, hidden, strict=True)
    ]


def generate_held_out_answers(target: LlamaForCausalLM, tokenizer: Any, chats: Sequence[Chat]) -> list[list[Answer]]:
    """The target's answers, [greedy, sampled at temperature 1]: the same at every call."""
    torch.manual_seed(0)
    batches = group_by_length(encode(tokenizer, [c.opening for c in chats]), 64, random.Random(0))
    return [[row for batch in batches for row in generate_answers(target, batch, t)] for t in (0.0, 1.0)]


@torch.inference_mode()
def measure_acceptance(
    draft: LlamaForCausalLM, lm_head: Any, greedy: list[Answer], sampled: list[Answer]
) -> dict[str, float]:
    """Accepted share of tokens: greedy; at temperature 1 coupled, and by rejection sampling (1 - TV)."""
    matches = coupled = overlap = 0.0
    for ids, num_prompt, _ in greedy:
        proposed = draft(ids[None].long()).logits[0, num_prompt - 1 : -1].argmax(-1)
        matches += float((proposed == ids[num_prompt:]).sum())
    generator = torch.Generator().manual_seed(0)
    for ids, num_prompt, hidden in sampled:
        p_draft = draft(ids[None].long()).logits[0, num_prompt - 1 : -1].softmax(-1)
        p_target = lm_head(hidden.float()).softmax(-1)
        overlap += float(torch.minimum(p_draft, p_target).sum())
        noise = torch.empty_like(p_draft).exponential_(generator=generator)  # argmax of p / noise is a sample of p
        coupled += float(((p_draft / noise).argmax(-1) == (p_target / noise).argmax(-1)).sum())
    num_greedy, num_sampled = (sum(len(row.hidden) for row in rows) for rows in (greedy, sampled))
    at_t1 = {"coupled_t1": coupled / num_sampled, "rejection_t1": overlap / num_sampled}
    return {"greedy": matches / num_greedy, **at_t1}


def train(
    model: LlamaForCausalLM,
    batches: Iterator[Any],
    compute_loss: Callable[[Any], Tensor],
    args: argparse.Namespace,
    check: Callable[[int], None] = print,
) -> None:
    """AdamW with a linear decay to zero over `--steps` or `--minutes`; `check` now and then, and at the end."""
    matrices, norms = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    start_s, step, num_checks = time.monotonic(), 0, 0
    while (progress := max(step / args.steps, (minutes := (time.monotonic() - start_s) / 60) / args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 50) * (1 - progress)
        loss = compute_loss(next(batches))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(f"{minutes:6.1f} min  step {step}  loss {float(loss.detach()):.4f}", flush=True)
        if minutes > (num_checks + 1) * args.check_minutes:
            num_checks += 1
            check(step)
    check(step)


def sample_windows(stream: Tensor, batch: int) -> Iterator[Tensor]:
    """Random windows of the stream, [batch, 257], for ever."""
    while True:
        yield torch.stack([stream[s : s + 257] for s in torch.randint(len(stream) - 257, (batch,)).tolist()])


def iter_corpus_batches(target: LlamaForCausalLM, stream: Tensor, batch: int) -> Iterator[list[Answer]]:
    """For ever: windows of the corpus, as if the target had answered their first token with the rest."""
    for ids in sample_windows(stream, batch):
        with torch.inference_mode():
            hidden = target.model(ids[:, :-1]).last_hidden_state
        yield [Answer(row, 1, states) for row, states in zip(ids, hidden, strict=True)]


def iter_answer_batches(answers: list[Answer], num_tokens: int, rng: random.Random) -> Iterator[list[Answer]]:
    """For ever: answers of like length, about `num_tokens` together; each pass over them is in a new order."""
    while True:
        batches: list[list[Answer]] = [[]]
        for row in sorted(answers, key=lambda row: len(row.ids) + rng.random() * 8):
            if len(batches[-1]) * len(row.ids) > num_tokens:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from batches


def compute_distillation_loss(draft: LlamaForCausalLM, lm_head: Any, rows: list[Answer], kl_weight: float) -> Tensor:
    """Cross-entropy to a mixture of the target's law and the text: the first is its KL, but for a constant."""
    ids = torch.nn.utils.rnn.pad_sequence([row.ids.long() for row in rows], True, PAD_ID)
    predicts = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        predicts[i, row.num_prompt - 1 : len(row.ids) - 1] = True
    logits = draft.lm_head(draft.model(ids).last_hidden_state[predicts])  # [num_positions, vocab_size]
    with torch.no_grad():
        wanted = lm_head(torch.cat([row.hidden for row in rows]).float()).softmax(-1).mul_(kl_weight)
        wanted[torch.arange(len(wanted)), ids[:, 1:][predicts[:, :-1]]] += 1 - kl_weight
    return F.cross_entropy(logits, wanted)


def command_data(args: argparse.Namespace) -> None:
    training, held_out = exclude_held_out(read_prompts(args.exclude_prompts)), read_stdlib()[1]
    for name, part in (("training", training), ("held out", held_out)):
        num_chats, num_characters = sum(len(chats) for _, chats in part), sum(len(text) for text, _ in part)
        print(f"{name}: {len(part)} files, {num_chats} chats, {num_characters} characters")
    usable = [c for _, chats in held_out for c in chats if len(c.prompt) <= 600 and 20 < len(c.reference) <= 2000]
    chosen = random.Random(args.seed).sample(usable, min(200, len(usable)))
    rows = [{"messages": [{"role": "user", "content": c.prompt}], "reference": c.reference} for c in chosen]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def command_tokenizer(args: argparse.Namespace) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    sources = exclude_held_out(read_prompts(args.exclude_prompts))
    tokenizer.train_from_iterator((text for text, _ in sources), trainer)
    wrap: Any = PreTrainedTokenizerFast
    fast = wrap(tokenizer_object=tokenizer, extra_special_tokens=ROLES, **NAMED_TOKENS)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(args.out)


def command_target(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sources = exclude_held_out(read_prompts(args.exclude_prompts))
    batches = sample_windows(build_corpus(tokenizer, sources, random.Random(args.seed)), args.batch)
    model = create_model(len(tokenizer), TARGET_SHAPE)

    def compute_loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())

    train(model, batches, compute_loss, args)
    save_model(model, tokenizer, args.out)


def command_answers(args: argparse.Namespace) -> None:
    target, tokenizer = load_model(args.target)
    sources = exclude_held_out(read_prompts(args.exclude_prompts))
    openings = sorted({chat.opening for _, chats in sources for chat in chats})
    prompts = [ids for ids in encode(tokenizer, openings) if len(ids) <= MAX_PROMPT_TOKENS]
    answers: list[Answer] = []
    start_s = time.monotonic()
    for step, batch in enumerate(group_by_length(prompts, args.batch, random.Random(args.seed))):
        elapsed_min = (time.monotonic() - start_s) / 60
        if step >= args.steps or elapsed_min > args.minutes:
            break
        answers.extend(generate_answers(target, batch, args.temperatures[step % len(args.temperatures)]))
        print(f"{elapsed_min:6.1f} min  {len(answers)} of {len(prompts)} prompts", flush=True)
    torch.save([tuple(row) for row in answers], args.out)


def command_draft(args: argparse.Namespace) -> None:
    target, tokenizer = load_model(args.target)
    rng = random.Random(args.seed)
    draft = load_model(args.init)[0] if args.init else create_model(len(tokenizer), DRAFT_SHAPE)
    if args.answers:
        answers = [Answer(*row) for path in args.answers for row in torch.load(path)]
        batches = iter_answer_batches(answers, args.batch * 128, rng)
    else:
        stream = build_corpus(tokenizer, exclude_held_out(read_prompts(args.exclude_prompts)), rng)
        batches = iter_corpus_batches(target, stream, args.batch)
    yardstick = generate_held_out_answers(target, tokenizer, read_prompts(args.prompts)) if args.prompts else None
    best = measure_acceptance(draft, target.lm_head, *yardstick)["greedy"] if yardstick and args.init else -1.0

    def check(step: int) -> None:
        nonlocal best
        if yardstick is None:
            save_model(draft, tokenizer, args.out)
            return
        figures = measure_acceptance(draft, target.lm_head, *yardstick)
        line = " ".join(f"{name} {value:.4f}" for name, value in figures.items())
        line = f"{time.strftime('%H:%M:%S', time.gmtime())} UTC  step {step}  {line}\n"
        print(line, end="", flush=True)
        if args.log:
            with args.log.open("a", encoding="utf-8") as log:
                log.write(line)
        if figures["greedy"] > best:
            best = figures["greedy"]
            save_model(draft, tokenizer, args.out)

    train(
        draft, batches, lambda rows: compute_distillation_loss(draft, target.lm_head, rows, args.kl_weight), args, check
    )


def command_agree(args: argparse.Namespace) -> None:
    target, tokenizer = load_model(args.target)
    yardstick = generate_held_out_answers(target, tokenizer, read_prompts(args.prompts)[: args.steps])
    for folder in args.drafts:
        figures = measure_acceptance(load_model(folder)[0], target.lm_head, *yardstick)
        print(folder, " ".join(f"{name} {value:.4f}" for name, value in figures.items()), flush=True)


COMMANDS = {  # name: (function, required paths, other options)
    "data": (command_data, "--out", "--exclude-prompts"),
    "tokenizer": (command_tokenizer, "--out", "--exclude-prompts"),
    "target": (command_target, "--tokenizer --out", "--exclude-prompts --lr --batch --check-minutes"),
    "answers": (command_answers, "--target --out", "--exclude-prompts --batch --temperatures"),
    "draft": (
        command_draft,
        "--target --out",
        "--exclude-prompts --prompts --init --answers --lr --batch --kl-weight --check-minutes --log",
    ),
    "agree": (command_agree, "--target --prompts", "--drafts"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "--steps": {"type": int, "default": 10**9, "help": "stop after so many batches (agree: prompts)"},
    "--minutes": {"type": float, "default": math.inf, "help": "stop after so long"},
    "--seed": {"type": int, "default": 0},
    "--threads": {"type": int, "default": 1},
    "--exclude-prompts": {"type": Path, "help": "prompts.jsonl whose files are kept out of training"},
    "--lr": {"type": float, "default": 1e-3},
    "--batch": {"type": int, "default": 16, "help": "prompts, windows of 256 tokens, or 128 tokens of answers"},
    "--temperatures": {"type": float, "nargs": "+", "default": [0.0], "help": "one a batch, in turn"},
    "--init": {"type": Path, "help": "a draft to start from"},
    "--answers": {"type": Path, "nargs": "+", "help": "files that `answers` wrote; without, the corpus"},
    "--kl-weight": {"type": float, "default": 0.8, "help": "the rest is cross-entropy to the text"},
    "--prompts": {"type": Path, "help": "held-out prompts: write a draft only if it is better on them"},
    "--check-minutes": {"type": float, "default": math.inf, "help": "measure so often"},
    "--drafts": {"type": Path, "nargs": "+", "required": True},
    "--log": {"type": Path, "help": "file to append the measurements to"},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, (run, required, optional) in COMMANDS.items():
        sub = commands.add_parser(name)
        sub.set_defaults(run=run)
        for option in required.split():
            sub.add_argument(option, type=Path, required=True)
        for option in ("--steps --minutes --seed --threads " + optional).split():
            sub.add_argument(option, **OPTIONS[option])
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.run(args)


if __name__ == "__main__":
    main()
