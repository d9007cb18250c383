"""The device's side of a round: tensors that stay on the device, and operations on them.

A round has two steps, which are timed separately: `draft` (draft steps with sampling) and `verify`
(the target's pass, acceptance, and appending tokens). Neither asks the device for a value, because
the context's length is itself a tensor. On CUDA, each step is played as a graph, one for each
lookahead and number of keys. Elsewhere it runs normally.

    context    c0 c1 … c(L-1)     of length L; the target's cache lacks the last, the draft's two
    draft      reads c(L-2) c(L-1), writes d0; reads d0, writes d1; …
    verify     reads c(L-1) d0 … d(g-1) and padding, draws t0 … tg,
               accepts a leading d's, appends t0 … ta

After a round without a draft, the draft's cache misses tokens of the context; `catch_up_draft`
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from llm_spec_torch.graphs import CudaGraphs, StepKey
from llm_spec_torch.network import KeyValueCache, TransformerNetwork
from llm_spec_torch.sampling import DeviceSampler, SamplingSwitches

__all__ = ["DeviceRoundEngine", "DeviceRoundReport", "NetworkWithCache", "RoundEnginePool"]

_NUM_REPORT_FIELDS: Final = 4  # before the drafted tokens in a report
_MAX_ENGINES: Final = 32  # kept for later requests; an engine's graphs take memory


@dataclass(frozen=True, slots=True)
class NetworkWithCache:
    """A model's part in an engine: its weights, and the cache of one slot."""

    network: TransformerNetwork
    cache: KeyValueCache  # batch of one
    min_rows: int  # fewer are padded: a single row may take another, slower path


class DeviceRoundReport(NamedTuple):
    """A round's results for the host."""

    num_accepted: int
    next_token_id: int
    is_finite: bool  # the target's logits
    draft_is_finite: bool
    drafted_ids: tuple[int, ...]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int], lookahead: int) -> DeviceRoundReport:
        """Unpack `DeviceRoundEngine.report`."""
        accepted, next_id, finite, draft_finite = numbers[:_NUM_REPORT_FIELDS]
        drafted_ids = tuple(numbers[_NUM_REPORT_FIELDS : _NUM_REPORT_FIELDS + lookahead])
        return cls(accepted, next_id, bool(finite), bool(draft_finite), drafted_ids)


class DeviceRoundEngine:
    """A pair of slots with one kind of sampling, for one request at a time."""

    def __init__(
        self, target: NetworkWithCache, draft: NetworkWithCache | None, sampler: DeviceSampler, *, max_lookahead: int
    ) -> None:
        self.target, self.draft_model, self.sampler = target, draft, sampler
        self.in_use = False
        device = target.network.embedding.device
        self.context = torch.zeros(target.cache.capacity + 1, dtype=torch.int64, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.drafted = torch.zeros(max_lookahead, dtype=torch.int64, device=device)
        self.report = torch.zeros(_NUM_REPORT_FIELDS + max_lookahead, dtype=torch.int64, device=device)
        self._graphs = CudaGraphs(device) if device.type == "cuda" else None

    def begin_request(self, prompt_ids: Tensor) -> None:
        """Begin after a prompt, [num_tokens] int64, that both caches hold."""
        self.context[: prompt_ids.shape[0]] = prompt_ids
        self.length.fill_(prompt_ids.shape[0])
        self.report[_NUM_REPORT_FIELDS - 1] = 1  # a draft that did not run is not broken
        self.sampler.begin_answer(prompt_ids)

    def capture_steps(self, lookahead: int, num_keys: int, width: int, *, uses_device_draft: bool) -> None:
        """Record the next round's steps, so that the round's time does not include it."""
        if self._graphs is None:
            return
        steps = self._make_steps(lookahead, num_keys, width)
        keys = [key for key in (steps if lookahead and uses_device_draft else [*steps][1:]) if key not in self._graphs]
        if keys:
            kept = [(tensor, tensor.clone()) for tensor in (self.length, self.sampler.counts)]
            for key in keys:
                self._graphs.capture(key, steps[key])
            for tensor, value in kept:
                tensor.copy_(value)

    def catch_up_draft(self, num_tokens_missed: int, num_keys: int) -> None:
        """Let the draft read the tokens of the context that it missed."""
        part = self._require_draft_model()
        missed = self.length - 2 - num_tokens_missed + torch.arange(num_tokens_missed, device=self.length.device)
        step = self.drafted.shape[0] + 1
        for start in range(0, num_tokens_missed, step):
            positions = missed[start : start + step]
            part.network.compute_hidden_states(
                self._gather_context_ids(part, positions), positions[None], part.cache, num_keys
            )

    def run_draft(self, lookahead: int, num_keys: int) -> None:
        """Write `lookahead` tokens into `drafted`."""
        self._run_or_replay("draft", lookahead, num_keys, 0)

    def run_verify(self, lookahead: int, num_keys: int, width: int) -> None:
        """Verify `lookahead` tokens of `drafted` in a pass of `width` rows.

        The pass appends the accepted tokens and the next one, and fills `report`.
        """
        self._run_or_replay("verify", lookahead, num_keys, width)

    # --------------------------------------------------------------------------------------- inside

    def _make_steps(self, lookahead: int, num_keys: int, width: int) -> dict[StepKey, Callable[[], None]]:
        return {
            ("draft", lookahead, num_keys): lambda: self._run_draft_step(lookahead, num_keys),
            ("verify", lookahead, num_keys): lambda: self._run_verify_step(lookahead, num_keys, width),
        }

    def _run_or_replay(self, name: str, lookahead: int, num_keys: int, width: int) -> None:
        key = (name, lookahead, num_keys)
        if self._graphs is None:
            self._make_steps(lookahead, num_keys, width)[key]()
        else:
            self._graphs.replay(key)

    def _require_draft_model(self) -> NetworkWithCache:
        if self.draft_model is None:
            raise RuntimeError("this engine has no draft")
        return self.draft_model

    def _gather_context_ids(self, part: NetworkWithCache, positions: Tensor) -> Tensor:
        """Return the context at positions, [1, num_positions], clamped to the model's ids.

        Padding ids of the target may be beyond a draft's.
        """
        return self.context.index_select(0, positions)[None].clamp(max=part.network.embedding.shape[0] - 1)

    def _run_draft_step(self, lookahead: int, num_keys: int) -> None:
        part = self._require_draft_model()
        self.sampler.valid.fill_(True)
        positions = self.length + torch.arange(-2, 0, device=self.length.device)
        token_ids = self._gather_context_ids(part, positions)
        for index in range(lookahead):
            logits = part.network.compute_logits(
                part.network.compute_hidden_states(token_ids, positions[None], part.cache, num_keys)
            )
            row = logits[1:2] if index == 0 else logits[:1]
            token = self.sampler.choose_tokens(row, (self.length + index)[None], self.drafted[:index])
            self.drafted[index : index + 1].copy_(token)
            token_ids = token.clamp(max=part.network.embedding.shape[0] - 1).expand(1, part.min_rows)
            positions = self.length + index + torch.arange(part.min_rows, device=self.length.device)
        self.report[_NUM_REPORT_FIELDS - 1] = self.sampler.valid.long()

    def _run_verify_step(self, lookahead: int, num_keys: int, width: int) -> None:
        network, drafted = self.target.network, self.drafted[:lookahead]
        positions = self.length - 1 + torch.arange(width, device=self.length.device)
        last = self.context.index_select(0, positions[:1])
        token_ids = torch.cat([last, drafted, last.expand(width - 1 - lookahead)])
        states = network.compute_hidden_states(token_ids[None], positions[None], self.target.cache, num_keys)
        self.sampler.valid.fill_(True)
        verdict = self.sampler.verify(network.compute_logits(states)[: lookahead + 1], self.length, drafted)
        num_emitted = verdict.num_accepted + 1
        self.context.index_copy_(0, positions[: lookahead + 1] + 1, verdict.token_ids)
        self.sampler.count_committed_tokens(verdict.token_ids, num_emitted)
        self.length += num_emitted
        next_id = verdict.token_ids.gather(0, verdict.num_accepted[None])
        is_finite = (self.sampler.valid & states.sum(dtype=torch.float32).isfinite())[None].long()
        self.report[: _NUM_REPORT_FIELDS - 1] = torch.cat([verdict.num_accepted[None], next_id, is_finite])
        self.report[_NUM_REPORT_FIELDS : _NUM_REPORT_FIELDS + lookahead] = drafted


class RoundEnginePool:
    """The engines of a target: their recorded steps serve later requests with the same slots."""

    def __init__(self) -> None:
        # The longest unused engine first.
        self._engines: dict[tuple[object, ...], DeviceRoundEngine] = {}

    def acquire_engine(
        self,
        places: Sequence[object],
        networks_with_cache: Sequence[NetworkWithCache],
        switches: SamplingSwitches,
        vocab_size: int,
        max_lookahead: int,
    ) -> DeviceRoundEngine:
        """Return the engine of these places.

        While their slots are taken, nothing else uses it.
        """
        key = (*places, switches)
        engine = self._engines.pop(key, None)
        if engine is None:
            draft = networks_with_cache[1] if len(networks_with_cache) > 1 else None
            sampler = DeviceSampler(
                switches, vocab_size=vocab_size, device=networks_with_cache[0].network.embedding.device
            )
            engine = DeviceRoundEngine(networks_with_cache[0], draft, sampler, max_lookahead=max_lookahead)
        self._engines[key] = engine
        if len(self._engines) > _MAX_ENGINES:
            unused = next(
                (other for other, kept in [*self._engines.items()] if kept is not engine and not kept.in_use), ()
            )
            self._engines.pop(unused, None)
        return engine
