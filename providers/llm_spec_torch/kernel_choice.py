"""Chooses fused kernels for a model's layers if they are faster and give the same logits.

Both are tested when the model is loaded, with its own weights on its own device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from llm_spec.contract.errors import ModelLoadError
from llm_spec_torch.checks import check_logits_match
from llm_spec_torch.graphs import measure_replay_s
from llm_spec_torch.network import KeyValueCache, LayerKernels, TransformerNetwork
from llm_spec_torch.noise import has_triton

__all__ = ["choose_faster_network", "choose_network_with_kernels_or_without", "make_layer_kernels"]

_NUM_TIMINGS = 3  # of each network, in turn

ReadLogits: TypeAlias = Callable[[TransformerNetwork], Tensor]


def make_layer_kernels(network: TransformerNetwork) -> LayerKernels | None:
    """Return kernels for layers like Llama's, or None for other layers or without Triton.

    Such layers have SwiGLU, no norm after attention, and no soft cap.
    """
    shape = network.attention
    has_other_parts = any(layer.after_attention_norm or layer.after_mlp_norm for layer in network.layers)
    is_like_llama = network.activation is functional.silu and shape.softcap is None and not has_other_parts
    if not (is_like_llama and shape.fused and has_triton()):
        return None
    from llm_spec_torch.layer_triton import TritonLayerKernels  # needs Triton

    if not TritonLayerKernels.supports(shape.head_dim):
        return None
    return TritonLayerKernels(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, scale=shape.scale
    )


def choose_network_with_kernels_or_without(
    network: TransformerNetwork, cache: KeyValueCache, token_ids: Tensor, *, num_keys: int
) -> TransformerNetwork:
    """Return the network of a CUDA device, with kernels for its layers if that is better.

    `token_ids` [width] are read at places from `width` on, in a cache of one sequence that has
    content before them. Call it in inference mode.
    """
    kernels = make_layer_kernels(network)
    width = token_ids.shape[0]
    if kernels is None or not kernels.has_room(width):
        return network
    positions = torch.arange(width, 2 * width, device=token_ids.device)[None]

    def read_logits(network: TransformerNetwork) -> Tensor:
        return network.compute_logits(network.compute_hidden_states(token_ids[None], positions, cache, num_keys))

    def measure_pass_s(network: TransformerNetwork) -> float:
        return measure_replay_s(lambda: read_logits(network), token_ids.device)

    return choose_faster_network(network, replace(network, kernels=kernels), read_logits, measure_pass_s)


def choose_faster_network(
    network: TransformerNetwork,
    fused: TransformerNetwork,
    read_logits: ReadLogits,
    measure_pass_s: Callable[[TransformerNetwork], float],
) -> TransformerNetwork:
    """Return `fused` if its logits match up to rounding and its passes take less time."""
    expected = read_logits(network)
    try:
        check_logits_match(read_logits(fused).cpu().numpy(), expected, network.dtype)
        times = [(measure_pass_s(network), measure_pass_s(fused)) for _ in range(_NUM_TIMINGS)]
    except torch.OutOfMemoryError:
        raise
    # With another version of Triton or another GPU, kernels may fail.
    except (ModelLoadError, RuntimeError, ValueError, TypeError, AttributeError):
        return network
    return fused if min(fused_s for _, fused_s in times) < min(plain_s for plain_s, _ in times) else network
