"""Converts transformers' modules into a `TransformerNetwork`.

The supported modules are those of Llama, Mistral, Qwen2, Qwen3 and Gemma 1 to 3, by name.
`model.py` then compares the logits with transformers' own, to find differences that no name shows.
Each module's memory is freed as soon as it has been read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_spec.contract.errors import ModelLoadError
from llm_spec_torch.linear_layers import Linear, make_linear
from llm_spec_torch.network import AttentionShape, FoldedRmsNorm, LayerKind, LayerWeights, RmsNorm, TransformerNetwork

__all__ = ["check_architecture", "convert_module_to_network"]

_LAYER_MODULES: Final = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_GEMMA_LAYER_MODULES: Final = _LAYER_MODULES | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION_MODULES: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP_MODULES: Final = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Other types rotate by the length of the whole text.
_ROPE_TYPES: Final = {"default", "linear", "llama3", "yarn"}
_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu_pytorch_tanh": lambda rows: functional.gelu(rows, approximate="tanh"),
    "gelu": functional.gelu,
}


def check_architecture(module: Any) -> None:
    """Raise ModelLoadError, naming the part, if a `…ForCausalLM` is built differently."""
    _check_submodules("the model", module, {"model", "lm_head"})
    body = _get_text_model(module)
    _check_submodules("the model", body, {"embed_tokens", "layers", "norm", "rotary_emb"})
    for layer in body.layers:
        _check_layer_architecture(layer)


def convert_module_to_network(
    module: Any, *, num_positions: int, fused: bool, embedding: Tensor | None = None
) -> TransformerNetwork:
    """Read a checked module into a network for positions below `num_positions`.

    The module is empty afterwards. `embedding` replaces the module's own table.
    """
    config: Any = module.config.get_text_config()
    body = _get_text_model(module)
    attention = body.layers[0].self_attn
    kinds, kind_of = _read_layer_kinds(body.rotary_emb, config, len(body.layers), num_positions)
    vocab_size = int(module.lm_head.weight.shape[0])
    table = body.embed_tokens.weight.detach()
    if embedding is None and table.device.type == "cpu":
        embedding = table.clone()  # a part of a mapped file keeps all of it in memory
    final_norm, head = _fold_norm_into_linears(body.norm, [module.lm_head])
    scale: Any = getattr(body.embed_tokens, "embed_scale", None)
    return TransformerNetwork(
        embedding=table if embedding is None else embedding,
        dtype=table.dtype,
        embedding_scale=None if scale is None else scale.detach().to(table.dtype),
        layers=tuple(_read_layer_weights(layer, kind_of[index]) for index, layer in enumerate(body.layers)),
        kinds=kinds,
        attention=AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=float(attention.scaling),
            softcap=getattr(config, "attn_logit_softcapping", None),
            fused=fused,
        ),
        final_norm=final_norm,
        head=head,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        activation=_get_activation_function(config),
        vocab_size=vocab_size,
    )


def _get_text_model(module: Any) -> Any:
    """Return the part that reads text: a model may also read images."""
    return getattr(module.model, "language_model", module.model)


def _check_submodules(what: str, module: Any, required: set[str], optional: set[str] | None = None) -> None:
    found = {name for name, _ in module.named_children()}
    odd = sorted((found - required - (optional or set())) | (required - found))
    if odd:
        raise ModelLoadError(
            f"{what} ({type(module).__name__}) is not built like Llama, Mistral, Qwen or Gemma: {', '.join(odd)}; "
            "serve this checkpoint with vLLM or SGLang and use vllm:model@url"
        )


def _check_layer_architecture(layer: Any) -> None:
    has_gemma_norms = hasattr(layer, "pre_feedforward_layernorm")
    _check_submodules("a layer", layer, _GEMMA_LAYER_MODULES if has_gemma_norms else _LAYER_MODULES)
    _check_submodules("an attention", layer.self_attn, _ATTENTION_MODULES, {"q_norm", "k_norm"})
    _check_submodules("a feed-forward part", layer.mlp, _MLP_MODULES)
    if not getattr(layer.self_attn, "use_rope", True):
        raise ModelLoadError("a layer does not rotate by position (use_rope is 0); use vllm:model@url")
    for part in (layer.self_attn, layer.mlp):
        for name, module in part.named_children():
            if name.endswith("_proj") and (type(module) is not nn.Linear or module.weight.dtype.itemsize < 2):
                raise ModelLoadError(
                    f"the weights of {name} are quantised ({type(module).__name__}); give a checkpoint in bfloat16, "
                    "float16 or float32, or serve this one and use vllm:model@url"
                )


def _read_layer_weights(layer: Any, kind: int) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    head_dim = attention.head_dim
    is_gemma = hasattr(layer, "pre_feedforward_layernorm")
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    attention_norm, queries_keys_values = _fold_norm_into_linears(
        layer.input_layernorm, projections, [head_dim, head_dim, None]
    )
    mlp_norm, gate_up = _fold_norm_into_linears(
        layer.pre_feedforward_layernorm if is_gemma else layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]
    )
    return LayerWeights(
        attention_norm=attention_norm,
        queries_keys_values=queries_keys_values,
        query_norm=_read_head_norm(attention, "q_norm", head_dim),
        key_norm=_read_head_norm(attention, "k_norm", head_dim),
        output=_join_linears([attention.o_proj]),
        after_attention_norm=_read_norm_weights(layer.post_attention_layernorm) if is_gemma else None,
        mlp_norm=mlp_norm,
        gate_up=gate_up,
        down=_join_linears([mlp.down_proj]),
        after_mlp_norm=_read_norm_weights(layer.post_feedforward_layernorm) if is_gemma else None,
        kind=kind,
    )


def _fold_norm_into_linears(
    norm_module: Any, modules: Sequence[Any], pairs_of: Sequence[int | None] | None = None
) -> tuple[RmsNorm | FoldedRmsNorm, Linear]:
    """Read a norm and the linear modules after it; fold the norm's weight into them if faster."""
    norm = _read_norm_weights(norm_module)
    if norm.weight.device.type != "cpu" or modules[0].weight.dtype != torch.float32:
        return norm, _join_linears(modules, pairs_of)
    size = norm.weight.shape[0]
    folded = FoldedRmsNorm(size * norm.eps)
    return folded, _join_linears(modules, pairs_of, norm.weight * math.sqrt(size))


def _join_linears(
    modules: Sequence[Any], pairs_of: Sequence[int | None] | None = None, factors: Tensor | None = None
) -> Linear:
    """Join linear modules that read the same rows.

    `pairs_of` has the head size of outputs that are rotated, and None for others. `factors`, [in],
    multiply the rows first.
    """
    sizes = pairs_of or [None] * len(modules)
    weights = [_reorder_rotated_pairs(m.weight.detach(), size) for m, size in zip(modules, sizes, strict=True)]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    biases = [_copy_bias_or_none(m) for m in modules]
    bias = None
    if any(b is not None for b in biases):
        filled = [weight.new_zeros(m.weight.shape[0]) if b is None else b for m, b in zip(modules, biases, strict=True)]
        bias = torch.cat([_reorder_rotated_pairs(b, size) for b, size in zip(filled, sizes, strict=True)])
    if factors is not None:
        weight = weight * factors
    for module in modules:
        module.weight = None  # frees memory: the copy is enough
    return make_linear(weight, bias)


def _reorder_rotated_pairs(rows: Tensor, head_dim: int | None) -> Tensor:
    """Reorder rows of heads so that rotated pairs, i and i + head_dim / 2, are neighbours."""
    if head_dim is None:
        return rows
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _copy_bias_or_none(module: Any) -> Tensor | None:
    return None if module.bias is None else module.bias.detach()


def _read_norm_weights(module: Any) -> RmsNorm:
    weight: Tensor = module.weight.detach().clone()  # cloned like the embedding
    eps = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)
    if "Gemma" in type(module).__name__:  # (1 + weight), in float32
        weight = 1.0 + weight.float()
    return RmsNorm(weight, eps)


def _read_head_norm(attention: Any, name: str, head_dim: int) -> RmsNorm | None:
    module = getattr(attention, name, None)
    if module is None:
        return None
    norm = _read_norm_weights(module)
    if norm.weight.shape != (head_dim,):
        raise ModelLoadError(f"{name} is a norm of {tuple(norm.weight.shape)}; it must be of one head, {head_dim}")
    return RmsNorm(_reorder_rotated_pairs(norm.weight, head_dim), norm.eps)


def _get_activation_function(config: Any) -> Callable[[Tensor], Tensor]:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"the activation is {name!r}; it must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _read_layer_kinds(
    rotary: Any, config: Any, num_layers: int, length: int
) -> tuple[tuple[LayerKind, ...], list[int]]:
    """Return the kinds of layers, and each layer's index into them."""
    types: list[str | None] = [*(getattr(config, "layer_types", None) or [None] * num_layers)][:num_layers]
    names = sorted(set(types), key=str)
    return tuple(_read_layer_kind(rotary, config, name, length) for name in names), [
        names.index(name) for name in types
    ]


def _read_layer_kind(rotary: Any, config: Any, layer_type: str | None, length: int) -> LayerKind:
    if layer_type not in {None, "full_attention", "sliding_attention"}:
        raise ModelLoadError(f"a layer is of type {layer_type!r}; it must be full_attention or sliding_attention")
    # In Gemma 3, each type of layers has its own rotary embedding.
    by_type = hasattr(rotary, f"{layer_type}_inv_freq")
    prefix = f"{layer_type}_" if by_type else ""
    rope_type: Any = rotary.rope_type[layer_type] if by_type else rotary.rope_type
    if rope_type not in _ROPE_TYPES:
        raise ModelLoadError(f"rope_type is {rope_type!r}; it must be one of {', '.join(sorted(_ROPE_TYPES))}")
    inverse: Tensor = getattr(rotary, f"{prefix}inv_freq").float()
    scaling = float(getattr(rotary, f"{prefix}attention_scaling"))
    angles = torch.arange(length, dtype=torch.float32, device=inverse.device)[:, None] * inverse
    rotation = torch.polar(torch.full_like(angles, scaling), angles)[:, None]
    window: int | None = getattr(config, "sliding_window", None) if layer_type != "full_attention" else None
    return LayerKind(None if window is None or math.isinf(window) else int(window), rotation)
