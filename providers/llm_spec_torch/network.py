"""The forward pass of a decoder-only transformer over a static key-value cache.

One path for every shape: `batch` sequences of `width` tokens each, every sequence at a position of its own. Keys and
values are written where the positions say, so that going back is moving a length; attention reads the first
`num_keys` places, and the mask hides what lies behind each token. Nothing here asks the device for a value, so a round
of such passes can be recorded as one CUDA graph.

Weights come from transformers' modules (`weights.py`). They are run here, not there, because the modules launch about
three times as many operations a layer and rebuild masks and caches in Python for every pass (measured on two cores,
8 layers of 256: 5.9 ms against 1.6 ms a token).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from llm_spec_torch.linear import Linear

__all__ = ["Attention", "Cache", "Kind", "Layer", "Network", "Norm"]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.dtype == self.weight.dtype:
            return functional.rms_norm(rows, self.weight.shape, self.weight, self.eps)
        return functional.rms_norm(rows.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(rows.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The shape of attention, the same in all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    fused: bool = True  # torch's fused attention, else matmul, softmax, matmul in float32

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Attend: queries [batch, kv_heads, rows, head_dim], keys and values [batch, kv_heads, num_keys, head_dim]."""
        if self.fused and self.softcap is None:
            return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=self.scale)
        scores = queries.float() @ keys.float().transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return ((scores + bias).softmax(-1) @ values.float()).to(queries.dtype)


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs between a model's layers: how far they see, and how positions turn their queries and keys."""

    window: int | None  # sliding-window attention sees so many tokens, itself included
    rotation: Tensor  # [context_length, 1, head_dim / 2] complex64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights. Rows of queries and keys are ordered so that each rotated pair stands side by side."""

    attention_norm: Norm
    queries_keys_values: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    after_attention_norm: Norm | None
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    after_mlp_norm: Norm | None
    kind: int  # index in Network.kinds


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values, one pair of tensors a layer: [batch, capacity, num_kv_heads, head_dim]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def capacity(self) -> int:
        """Tokens that one sequence has room for."""
        return self.keys[0].shape[1]

    def row(self, index: int) -> Cache:
        """The cache of one sequence, a view with a batch of one."""
        return Cache(tuple(k[index : index + 1] for k in self.keys), tuple(v[index : index + 1] for v in self.values))

    def first_layers(self, num_layers: int) -> Cache:
        """The cache of the first layers, a view."""
        return Cache(self.keys[:num_layers], self.values[:num_layers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A model's weights; `hidden` and `logits` are its forward pass. Never changed, shared by all requests."""

    embedding: Tensor  # [vocab_size, hidden_size]
    embedding_scale: Tensor | None
    layers: tuple[Layer, ...]
    kinds: tuple[Kind, ...]
    attention: Attention
    final_norm: Norm
    head: Linear
    final_softcap: float | None
    activation: Callable[[Tensor], Tensor]
    vocab_size: int

    def first_layers(self, num_layers: int) -> Network:
        """The same model cut off after some layers, its last norm and head behind them: an early-exit draft."""
        return replace(self, layers=self.layers[:num_layers])

    def hidden(self, token_ids: Tensor, positions: Tensor, cache: Cache, num_keys: int) -> Tensor:
        """Append tokens to the cache; their last hidden states, [batch * width, hidden_size].

        `token_ids` and `positions` are int64 [batch, width]; a token sees keys at places up to its own position, so
        `num_keys` must be above every position that counts. Positions may point behind `num_keys`: such tokens are
        padding, written where nothing reads them.
        """
        batch, width = token_ids.shape
        num_heads = self.attention.num_heads + 2 * self.attention.num_kv_heads
        places = (positions + torch.arange(batch, device=positions.device)[:, None] * cache.capacity).flatten()
        masks = [self._mask(positions, num_keys, kind.window) for kind in self.kinds]
        turns = [kind.rotation[positions.flatten()] for kind in self.kinds]
        states = functional.embedding(token_ids.flatten(), self.embedding)
        if self.embedding_scale is not None:
            states = states * self.embedding_scale
        for index, layer in enumerate(self.layers):
            heads = layer.queries_keys_values(layer.attention_norm(states)).view(batch * width, num_heads, -1)
            queries = self._remember(layer, heads, turns[layer.kind], places, cache, index)
            attended = self._attend(queries, cache, index, masks[layer.kind], (batch, width, num_keys))
            attended = layer.output(attended)
            if layer.after_attention_norm is not None:
                attended = layer.after_attention_norm(attended)
            states = states + attended
            gate, up = layer.gate_up(layer.mlp_norm(states)).chunk(2, -1)
            transformed = layer.down(self.activation(gate).mul_(up))
            if layer.after_mlp_norm is not None:
                transformed = layer.after_mlp_norm(transformed)
            states = states + transformed
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Logits of hidden states, [num_rows, vocab_size] float32."""
        logits = self.head(self.final_norm(states)).float()
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return logits

    # ------------------------------------------------------------------------------------------ inside

    def _mask(self, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        """What is added to the scores: [batch, 1, width * num_heads / num_kv_heads, num_keys]."""
        batch, width = positions.shape
        positions = positions.clamp(max=num_keys - 1)  # padding behind the keys sees some, or it would be NaN
        keys = torch.arange(num_keys, device=positions.device)
        seen = keys <= positions[:, :, None]
        if window is not None:
            seen = seen & (keys > positions[:, :, None] - window)
        bias = torch.zeros(seen.shape, dtype=self.embedding.dtype, device=positions.device)
        bias = bias.masked_fill_(~seen, float("-inf"))
        group = self.attention.num_heads // self.attention.num_kv_heads
        return bias[:, None, :, None].expand(batch, 1, width, group, num_keys).reshape(batch, 1, -1, num_keys)

    def _remember(self, layer: Layer, heads: Tensor, turn: Tensor, places: Tensor, cache: Cache, index: int) -> Tensor:
        """Rotate queries and keys, write keys and values; the queries, [batch * width, num_heads, head_dim]."""
        num_queries, num_keys = self.attention.num_heads, self.attention.num_kv_heads
        queries_keys, values = heads[:, : num_queries + num_keys], heads[:, num_queries + num_keys :]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = queries_keys[:, :num_queries], queries_keys[:, num_queries:]
            queries_keys = torch.cat([layer.query_norm(queries), layer.key_norm(keys)], dim=1)
        pairs = torch.view_as_complex(queries_keys.float().unflatten(-1, (-1, 2)))
        queries_keys = torch.view_as_real(pairs * turn).flatten(-2).to(heads.dtype)
        cache.keys[index].flatten(0, 1).index_copy_(0, places, queries_keys[:, num_queries:])
        cache.values[index].flatten(0, 1).index_copy_(0, places, values)
        return queries_keys[:, :num_queries]

    def _attend(self, queries: Tensor, cache: Cache, index: int, bias: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """[batch * width, num_heads * head_dim]; the heads that share keys are rows of one product."""
        batch, width, num_keys = shape
        num_kv_heads, head_dim = self.attention.num_kv_heads, self.attention.head_dim
        rows = queries.view(batch, width, num_kv_heads, -1, head_dim).permute(0, 2, 1, 3, 4)
        keys = cache.keys[index][:, :num_keys].transpose(1, 2)
        values = cache.values[index][:, :num_keys].transpose(1, 2)
        out = self.attention(rows.reshape(batch, num_kv_heads, -1, head_dim), keys, values, bias)
        out = out.view(batch, num_kv_heads, width, -1, head_dim).permute(0, 2, 1, 3, 4)
        return out.reshape(batch * width, -1)
