"""The device's side of a round: tensors that stay where they are, and the operations over them, recorded once.

A round is two steps, timed apart: `draft` (draft steps with sampling) and `verify` (the target's pass, acceptance,
the tokens appended). Neither asks the device for a value: where the answer stands is itself a tensor. On CUDA each
step of each lookahead and number of keys is recorded as a graph the second time that it is needed, and played from then
on; elsewhere it runs as it is.

    context    c0 c1 … c(L-1)     length L; the target's cache holds all but c(L-1), the draft's all but the last two
    draft      reads c(L-2) c(L-1), writes d0; reads d0, writes d1; …
    verify     reads c(L-1) d0 … d(g-1) and padding, draws t0 … tg, accepts a leading d's, appends t0 … ta
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from llm_spec_torch.network import Cache, Network
from llm_spec_torch.sampling import DeviceSampler, Switches

__all__ = ["HEAD", "Lane", "Lanes", "Part"]

HEAD: Final = 3  # numbers before the drafted tokens in `Lane.report`: accepted, next token, whether logits were finite


@dataclass(frozen=True, slots=True)
class Part:
    """A model's part in a lane: its weights, and the cache of one slot."""

    network: Network
    cache: Cache  # batch of one
    min_rows: int  # fewer are padded to so many (a single row may take another, slower path)


class Lane:
    """One pair of slots with one kind of sampling; used by one request at a time."""

    def __init__(self, target: Part, draft: Part | None, sampler: DeviceSampler, *, max_lookahead: int) -> None:
        self.target, self.draft_part, self.sampler = target, draft, sampler
        device = target.network.embedding.device
        self.context = torch.zeros(target.cache.capacity + 1, dtype=torch.int64, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.drafted = torch.zeros(max_lookahead, dtype=torch.int64, device=device)
        self.report = torch.zeros(HEAD + max_lookahead, dtype=torch.int64, device=device)
        self._graphs = _Graphs() if device.type == "cuda" else None

    def begin(self, prompt_ids: Tensor) -> None:
        """Stand behind a prompt, [num_tokens] int64, that both caches have read."""
        self.context[: prompt_ids.shape[0]] = prompt_ids
        self.length.fill_(prompt_ids.shape[0])
        self.sampler.begin(prompt_ids)

    def draft(self, lookahead: int, num_keys: int) -> None:
        """Fill `drafted` with so many tokens."""
        self._play(("draft", lookahead, num_keys), lambda: self._draft(lookahead, num_keys))

    def verify(self, lookahead: int, num_keys: int, width: int) -> None:
        """Judge so many of `drafted` in a pass of `width` rows, append what stands, and fill `report`."""
        self._play(("verify", lookahead, num_keys), lambda: self._verify(lookahead, num_keys, width))

    # ------------------------------------------------------------------------------------------ inside

    def _play(self, key: tuple[str, int, int], step: Callable[[], None]) -> None:
        if self._graphs is None:
            step()
        else:
            self._graphs.play(key, step)

    def _draft(self, lookahead: int, num_keys: int) -> None:
        part = self.draft_part
        if part is None:
            raise RuntimeError("this lane has no draft")
        positions = self.length + torch.arange(-2, 0, device=self.length.device)
        token_ids = self.context.index_select(0, positions)
        for index in range(lookahead):
            states = part.network.hidden(
                token_ids[None].clamp(max=part.network.embedding.shape[0] - 1), positions[None], part.cache, num_keys
            )
            logits = part.network.logits(states)
            row = logits[1:2] if index == 0 else logits[:1]
            token = self.sampler.choose(row, (self.length + index)[None], self.drafted[:index])
            self.drafted[index : index + 1].copy_(token)
            token_ids = token.expand(part.min_rows)
            positions = self.length + index + torch.arange(part.min_rows, device=self.length.device)

    def _verify(self, lookahead: int, num_keys: int, width: int) -> None:
        network, drafted = self.target.network, self.drafted[:lookahead]
        positions = self.length - 1 + torch.arange(width, device=self.length.device)
        last = self.context.index_select(0, positions[:1])
        token_ids = torch.cat([last, drafted, last.expand(width - 1 - lookahead)])
        states = network.hidden(token_ids[None], positions[None], self.target.cache, num_keys)
        self.sampler.valid.fill_(True)
        verdict = self.sampler.verify(network.logits(states)[: lookahead + 1], self.length, drafted)
        num_emitted = verdict.num_accepted + 1
        self.context.index_copy_(0, positions[: lookahead + 1] + 1, verdict.token_ids)
        self.sampler.commit(verdict.token_ids, num_emitted)
        self.length += num_emitted
        next_id = verdict.token_ids.gather(0, verdict.num_accepted[None])
        is_finite = (self.sampler.valid & states.sum().isfinite())[None].long()
        self.report[:HEAD] = torch.cat([verdict.num_accepted[None], next_id, is_finite])
        self.report[HEAD : HEAD + lookahead] = drafted


class Lanes:
    """The lanes of a target: what is recorded for two slots and a kind of sampling serves later requests there."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[object, ...], Lane] = {}

    def get(
        self, places: Sequence[object], parts: Sequence[Part], switches: Switches, vocab_size: int, max_lookahead: int
    ) -> Lane:
        """The lane of these places, which nobody else uses as long as their slots are taken."""
        key = (*places, switches)
        lane = self._lanes.get(key)
        if lane is None:
            draft = parts[1] if len(parts) > 1 else None
            sampler = DeviceSampler(switches, vocab_size=vocab_size, device=parts[0].network.embedding.device)
            lane = self._lanes[key] = Lane(parts[0], draft, sampler, max_lookahead=max_lookahead)
        return lane


class _Graphs:
    """Recorded steps, all in one pool of memory; they are played one after the other on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[str, int, int], torch.cuda.CUDAGraph | None] = {}

    def play(self, key: tuple[str, int, int], step: Callable[[], None]) -> None:
        """Run a step: as it is the first time (kernels are chosen and compiled then), recorded the second."""
        if key not in self._graphs:
            self._graphs[key] = None
            step()
            return
        graph = self._graphs[key]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
            self._graphs[key] = graph
        graph.replay()
