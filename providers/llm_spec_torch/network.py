"""The forward pass of a decoder-only transformer over a static key-value cache.

There is one path for every shape: `batch` sequences of `width` tokens each, or sequences of any
lengths, each at its own position. Keys and values are written where the positions say, so going
back only changes a length. Attention reads the first `num_keys` places, and the mask hides what
follows each token. Nothing here asks the device for a value, so a round of such passes can be
recorded as one CUDA graph.

The weights come from transformers' modules (`weights.py`). The modules themselves are not used,
because they launch more operations a layer and rebuild masks and caches in Python for every pass
(one thread, 8 layers of 256: 6.1 ms for one row and 11.3 ms for 16 there, 4.6 ms for one row here).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from llm_spec_torch.linear_layers import Linear

__all__ = [
    "AttentionShape",
    "FoldedRmsNorm",
    "KeyValueCache",
    "LayerKernels",
    "LayerKind",
    "LayerWeights",
    "RmsNorm",
    "SequenceRows",
    "TransformerNetwork",
]


# torch gives it no types.
_vector_norm: Callable[..., Tensor] = cast("Any", torch.linalg).vector_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.dtype == self.weight.dtype:
            return functional.rms_norm(rows, self.weight.shape, self.weight, self.eps)
        return functional.rms_norm(rows.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class FoldedRmsNorm:
    """An `RmsNorm` without the weight and the root of the size, which the next matrix contains.

    On a CPU, torch makes eight operations of `rms_norm`. These are five, and three of them have one
    number a row. They round as IEEE 754 says, so that vector code and scalar code give the same
    numbers. The number of rows decides which of the two runs.
    """

    floor: float  # size * eps

    def __call__(self, rows: Tensor) -> Tensor:
        norms = _vector_norm(rows, dim=-1, keepdim=True)
        return rows / norms.square_().add_(self.floor).sqrt_()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The shape of attention, the same in all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    fused: bool = True  # torch's fused attention; else matmul, softmax, matmul in float32

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Attend with queries to keys and values.

        Queries are [batch, kv_heads, rows, head_dim], keys and values
        [batch, kv_heads, num_keys, head_dim].
        """
        if self.fused and self.softcap is None:
            return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=self.scale)
        scores = queries.float() @ keys.float().transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return ((scores + bias).softmax(-1) @ values.float()).to(queries.dtype)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The differences between a model's layers: how far they see, and how they rotate."""

    window: int | None  # tokens that sliding-window attention sees, with its own
    rotation: Tensor  # [context_length, 1, head_dim / 2] complex64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's weights.

    Rows of queries and keys are ordered so that each rotated pair stands side by side.
    """

    attention_norm: RmsNorm | FoldedRmsNorm
    queries_keys_values: Linear
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    output: Linear
    after_attention_norm: RmsNorm | None
    mlp_norm: RmsNorm | FoldedRmsNorm
    gate_up: Linear
    down: Linear
    after_mlp_norm: RmsNorm | None
    kind: int  # index in TransformerNetwork.kinds


class LayerKernels(Protocol):
    """A layer's work between its matrix products, in fewer kernels than torch's.

    They are for passes of a few tokens.
    """

    def has_room(self, width: int) -> bool:
        """Return True if passes of that many tokens a sequence can use the kernels."""
        ...

    def add_and_norm(
        self, states: Tensor, update: Tensor | None, norm: RmsNorm | FoldedRmsNorm
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and the normed sum; all are [num_rows, hidden_size]."""
        ...

    def activate(self, gate_up: Tensor) -> Tensor:
        """Return `silu(gate) * up`: [num_rows, size] from [num_rows, 2 * size]."""
        ...

    def rotate_and_store(  # noqa: PLR0917 - tensors, in the order in which a layer has them
        self,
        heads: Tensor,
        rotation: Tensor,
        norms: tuple[RmsNorm | None, RmsNorm | None],
        cache_rows: Tensor,
        stored: Tensor,
        batch: int,
    ) -> Tensor:
        """Norm and rotate queries and keys, store keys and values, and return the queries.

        `heads` is [num_rows, num_heads + 2 * num_kv_heads, head_dim], queries are
        [batch, num_kv_heads, rows, head_dim].
        """
        ...

    def attend(self, queries: Tensor, stored: Tensor, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        """Attend with such queries at `positions`, [batch, width].

        Returns [num_rows, num_heads * head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class KeyValueCache:
    """Keys and values, one tensor a layer: [batch, capacity, 2 * num_kv_heads, head_dim].

    Values follow keys in the third dimension.
    """

    layers: tuple[Tensor, ...]

    @property
    def capacity(self) -> int:
        """The number of tokens that one sequence has room for."""
        return self.layers[0].shape[1]

    def select_sequences(self, start: int, stop: int) -> KeyValueCache:
        """Return a view of the cache of some neighbouring sequences."""
        return KeyValueCache(tuple(stored[start:stop] for stored in self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """One sequence's part in a joined pass.

    It begins at `position` of the cache's sequence `index`.
    """

    index: int
    token_ids: Sequence[int]
    position: int
    width: int  # rows of its attention, at least one for each token
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerNetwork:
    """A model's weights; `compute_hidden_states` and `compute_logits` are its forward pass.

    All requests share it; it is never changed.
    """

    embedding: Tensor  # [vocab_size, hidden_size]; has the file's dtype if mapped from the file
    dtype: torch.dtype  # of everything else
    embedding_scale: Tensor | None
    layers: tuple[LayerWeights, ...]
    kinds: tuple[LayerKind, ...]
    attention: AttentionShape
    final_norm: RmsNorm | FoldedRmsNorm
    head: Linear
    final_softcap: float | None
    activation: Callable[[Tensor], Tensor]
    vocab_size: int
    kernels: LayerKernels | None = None  # for layers of Llama's kind on CUDA

    def copy_with_first_layers(self, num_layers: int) -> TransformerNetwork:
        """Return an early-exit draft: the first layers, followed by the last norm and head."""
        return replace(self, layers=self.layers[:num_layers])

    def copy_with_one_layer_of_each_kind(self) -> TransformerNetwork:
        """Return the first layer of each kind: kernels treat all layers of a kind the same."""
        firsts = {layer.kind: layer for layer in reversed(self.layers)}
        return replace(self, layers=tuple(firsts.values()))

    def look_up_embeddings(self, token_ids: Tensor) -> Tensor:
        """Return the table's rows of token ids, [num_ids, hidden_size]."""
        return functional.embedding(token_ids, self.embedding).to(self.dtype)

    def compute_hidden_states(
        self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache, num_keys: int
    ) -> Tensor:
        """Append tokens to the cache; return their last hidden states.

        The states are [batch * width, hidden_size]. `token_ids` and `positions` are int64
        [batch, width]. A token sees keys up to its own position, so `num_keys` must be above every
        position that counts. Tokens at positions beyond `num_keys` are padding, written where
        nothing reads them.
        """
        num_keys = min(num_keys, cache.capacity)
        first_places = torch.arange(len(positions), device=positions.device)[:, None] * cache.capacity
        cache_rows = (positions + first_places).flatten()
        rotations = self._list_rotations(positions.flatten())
        if self.kernels is not None and self.kernels.has_room(positions.shape[1]):
            fused = _FusedPass(self.kernels, positions, num_keys, cache_rows, rotations)
            return self._run_layers_with_kernels(token_ids.flatten(), cache, fused)
        group = self._make_attention_group(slice(0, len(positions)), slice(0, positions.numel()), positions, num_keys)
        return self._run_layers(token_ids.flatten(), cache, _PassContext([group], cache_rows, rotations))

    def compute_joined_hidden_states(
        self, sequences: Sequence[SequenceRows], cache: KeyValueCache, num_rows: int
    ) -> Tensor:
        """Append tokens to several sequences of the cache; return their last hidden states.

        The states are [num_rows, hidden_size], one sequence after another. `num_rows` is the number
        of rows in matrix products, at least one for each token; states beyond the tokens have no
        meaning. Attention runs for each sequence separately, with the same shapes as if the
        sequence were read alone.
        """
        device = self.embedding.device
        groups: list[_AttentionGroup] = []
        token_ids: list[int] = []
        positions: list[int] = []
        cache_rows: list[int] = []
        for each in sequences:
            places = range(each.position, each.position + len(each.token_ids))
            rows = slice(len(token_ids), len(token_ids) + len(places))
            attended = torch.arange(each.position, each.position + each.width, device=device)[None]
            index = slice(each.index, each.index + 1)
            groups.append(self._make_attention_group(index, rows, attended, min(each.num_keys, cache.capacity)))
            token_ids += each.token_ids
            positions += places
            cache_rows += (each.index * cache.capacity + place for place in places)
        num_padding = num_rows - len(token_ids)
        ids = torch.tensor(token_ids + token_ids[-1:] * num_padding, device=device)
        pass_context = _PassContext(
            groups,
            cache_rows=torch.tensor(cache_rows, device=device),
            rotations=self._list_rotations(torch.tensor(positions + [0] * num_padding, device=device)),
        )
        return self._run_layers(ids, cache, pass_context)

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return logits of hidden states, [num_rows, vocab_size] float32."""
        logits = self.head(self.final_norm(states)).float()
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return logits

    # --------------------------------------------------------------------------------------- inside

    def _run_layers_with_kernels(self, token_ids: Tensor, cache: KeyValueCache, fused: _FusedPass) -> Tensor:
        states, update, kernels = self._embed(token_ids), None, fused.kernels
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            states, normed = kernels.add_and_norm(states, update, layer.attention_norm)
            heads = layer.queries_keys_values(normed).view(len(states), -1, self.attention.head_dim)
            norms = (layer.query_norm, layer.key_norm)
            rotation, batch = fused.rotations[layer.kind], len(fused.positions)
            queries = kernels.rotate_and_store(heads, rotation, norms, fused.cache_rows, stored, batch)
            window = self.kinds[layer.kind].window
            attended = kernels.attend(queries, stored, fused.positions, fused.num_keys, window)
            states, normed = kernels.add_and_norm(states, layer.output(attended), layer.mlp_norm)
            update = layer.down(kernels.activate(layer.gate_up(normed)))
        return states if update is None else states + update

    def _embed(self, token_ids: Tensor) -> Tensor:
        states = self.look_up_embeddings(token_ids)
        return states if self.embedding_scale is None else states * self.embedding_scale

    def _run_layers(self, token_ids: Tensor, cache: KeyValueCache, pass_context: _PassContext) -> Tensor:
        states = self._embed(token_ids)
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            states = self._run_attention(layer, states, stored, pass_context)
            gate, up = layer.gate_up(layer.mlp_norm(states)).chunk(2, -1)
            transformed = layer.down(self.activation(gate).mul_(up))
            states = states + (transformed if layer.after_mlp_norm is None else layer.after_mlp_norm(transformed))
        return states

    def _list_rotations(self, positions: Tensor) -> list[Tensor]:
        return [kind.rotation[positions] for kind in self.kinds]

    def _make_attention_group(self, sequences: slice, rows: slice, positions: Tensor, num_keys: int) -> _AttentionGroup:
        batch, width = positions.shape
        masks = [self._make_attention_mask(positions, num_keys, kind.window) for kind in self.kinds]
        return _AttentionGroup(sequences, rows, batch, width, num_keys, masks)

    def _make_attention_mask(self, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        """Return a bias on scores, [batch, 1, width * num_heads / num_kv_heads, num_keys]."""
        batch, width = positions.shape
        # Padding after the keys sees some too: without any, its rows would be NaN.
        positions = positions.clamp(max=num_keys - 1)
        keys = torch.arange(num_keys, device=positions.device)
        is_visible = keys <= positions[:, :, None]
        if window is not None:
            is_visible = is_visible & (keys > positions[:, :, None] - window)
        bias = torch.zeros(is_visible.shape, dtype=self.dtype, device=positions.device)
        bias = bias.masked_fill_(~is_visible, float("-inf"))
        group = self.attention.num_heads // self.attention.num_kv_heads
        return bias[:, None, :, None].expand(batch, 1, width, group, num_keys).reshape(batch, 1, -1, num_keys)

    def _run_attention(self, layer: LayerWeights, states: Tensor, stored: Tensor, pass_context: _PassContext) -> Tensor:
        """Run a layer's attention and store its keys and values: [batch * width, hidden_size]."""
        shape = self.attention
        heads = layer.queries_keys_values(layer.attention_norm(states))
        heads = heads.view(len(states), -1, shape.head_dim)
        heads = self._apply_rope(layer, heads, pass_context.rotations[layer.kind])
        num_written = len(pass_context.cache_rows)
        stored.flatten(0, 1).index_copy_(0, pass_context.cache_rows, heads[:num_written, shape.num_heads :])
        queries = heads[:, : shape.num_heads]
        parts = [self._attend(queries[group.rows], stored, group, layer.kind) for group in pass_context.groups]
        if num_written < len(states):
            parts.append(parts[-1].new_zeros(len(states) - num_written, parts[-1].shape[1]))
        attended = layer.output(parts[0] if len(parts) == 1 else torch.cat(parts))
        return states + (attended if layer.after_attention_norm is None else layer.after_attention_norm(attended))

    def _attend(self, queries: Tensor, stored: Tensor, group: _AttentionGroup, kind: int) -> Tensor:
        """Attend with a group's queries, [num_rows, num_heads, head_dim].

        Returns [num_rows, num_heads * head_dim].
        """
        shape, batch, width = self.attention, group.batch, group.width
        num_rows = len(queries)
        keys, values = stored[group.sequences, : group.num_keys].transpose(1, 2).chunk(2, 1)
        if num_rows < batch * width:
            queries = torch.cat([queries, queries[-1:].expand(batch * width - num_rows, -1, -1)])
        # Heads that share keys are rows of one product.
        rows = queries.view(batch, width, shape.num_kv_heads, -1, shape.head_dim)
        rows = rows.transpose(1, 2).reshape(batch, shape.num_kv_heads, -1, shape.head_dim)
        out = shape(rows, keys, values, group.masks[kind])
        out = out.view(batch, shape.num_kv_heads, width, -1, shape.head_dim).transpose(1, 2)
        return out.reshape(batch * width, -1)[:num_rows]

    def _apply_rope(self, layer: LayerWeights, heads: Tensor, rotation: Tensor) -> Tensor:
        """Norm queries and keys and rotate them by their positions; the shape is `heads`'s."""
        num_queries, num_rotated = self.attention.num_heads, self.attention.num_heads + self.attention.num_kv_heads
        if layer.query_norm is not None and layer.key_norm is not None:
            parts = heads.tensor_split((num_queries, num_rotated), dim=1)
            heads = torch.cat([layer.query_norm(parts[0]), layer.key_norm(parts[1]), parts[2]], dim=1)
        both = heads[:, :num_rotated]
        pairs = torch.view_as_complex(both.float().view(*both.shape[:-1], -1, 2))
        if heads.dtype == torch.float32:
            pairs.mul_(rotation)  # in place: `float` was no copy
        else:
            both.copy_(torch.view_as_real(pairs * rotation).flatten(-2))
        return heads


@dataclass(frozen=True, slots=True)
class _AttentionGroup:
    """Sequences of one length in a pass."""

    sequences: slice  # of the cache
    rows: slice  # of the pass; fewer than `batch * width` are padded
    batch: int
    width: int
    num_keys: int
    masks: list[Tensor]  # by kind of layer


@dataclass(frozen=True, slots=True)
class _FusedPass:
    """The values that all layers share in a pass with fused kernels."""

    kernels: LayerKernels
    positions: Tensor  # [batch, width]
    num_keys: int
    cache_rows: Tensor  # as below
    rotations: list[Tensor]


@dataclass(frozen=True, slots=True)
class _PassContext:
    """The values that all layers share in a pass."""

    groups: list[_AttentionGroup]
    cache_rows: Tensor  # places in the cache (two dimensions flattened) of the pass's first rows
    rotations: list[Tensor]  # by kind of layer
