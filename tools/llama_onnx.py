"""Builds the ONNX graph of a Llama model from named weights: onnx and numpy only, no torch.

Inputs and outputs carry the names of Hugging Face exports (P past, S new and T = P + S positions)::

    input_ids [1, S]  attention_mask [1, T]  position_ids [1, S]  past_key_values.N.key/value [1, kv_heads, P, head_dim]
    logits [1, S, vocab_size]  present.N.key/value

Two ways of keeping the cache:

`shared` uses onnxruntime's GroupQueryAttention. Past and present may be one buffer of fixed length: new keys and
    values are written behind the `sum(attention_mask) - S` valid positions, whatever lies further on is never read,
    and rolling back is a smaller sum. The mask may be as long as the buffer (ones, then zeros), so that no input
    changes its shape.
`concat` is written in plain ONNX operators, and the cache grows by Concat, as in exports made by generic tools.

Weights are compressed in the file only. The casts (and, for int8, the scaling) hang on initializers, so onnxruntime
folds them into float32 matrices when it loads the model, under its default options; it would keep DequantizeLinear.
Nothing is quantised at run time, where a scale taken over a whole activation would make one row depend on others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array: TypeAlias = npt.NDArray[Any]
CacheKind: TypeAlias = Literal["shared", "concat"]
WeightsDtype: TypeAlias = Literal["int8", "fp16", "fp32", "q8", "q4"]

KV_CACHE_KEY = "llm_spec.kv_cache"
"""Key in the model's metadata; the value `shared` says that past and present may be one buffer."""

_OPSET = 17
_IR_VERSION = 8
_CONTRIB = "com.microsoft"
_BLOCK = 32
_IN_BLOCKS = ("q8", "q4")
_MASKED = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The part of a Llama `config.json` that shapes the graph."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 16:
            raise ValueError(f"head_dim={self.head_dim} must be a multiple of 16, as GroupQueryAttention demands")

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a parsed `config.json`; raises ValueError for what the graph below does not express."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        expected = {
            "model_type": (config.get("model_type"), "llama"),
            "hidden_act": (config.get("hidden_act", "silu"), "silu"),
            "attention_bias": (config.get("attention_bias", False), False),
            "mlp_bias": (config.get("mlp_bias", False), False),
            "rope_type": (rope.get("rope_type", "default"), "default"),
        }
        for name, (value, supported) in expected.items():
            if value != supported:
                raise ValueError(f"{name}={value!r} is not supported, only {supported!r}")
        num_heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            max_positions=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
        )


def create_random_weights(config: LlamaConfig, seed: int) -> dict[str, Array]:
    """Random float32 weights under their Hugging Face names, for models that need not make sense."""
    generator = np.random.default_rng(seed)

    def matrix(num_out: int, num_in: int) -> Array:
        return generator.normal(0.0, num_in**-0.5, (num_out, num_in)).astype(np.float32)

    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden)
    for layer in range(config.num_layers):
        weights |= {
            f"model.layers.{layer}.{name}.weight": value
            for name, value in {
                "input_layernorm": np.ones(hidden, np.float32),
                "self_attn.q_proj": matrix(heads, hidden),
                "self_attn.k_proj": matrix(kv_heads, hidden),
                "self_attn.v_proj": matrix(kv_heads, hidden),
                "self_attn.o_proj": matrix(hidden, heads),
                "post_attention_layernorm": np.ones(hidden, np.float32),
                "mlp.gate_proj": matrix(inner, hidden),
                "mlp.up_proj": matrix(inner, hidden),
                "mlp.down_proj": matrix(hidden, inner),
            }.items()
        }
    return weights


def build_onnx(
    config: LlamaConfig,
    weights: Mapping[str, Array],
    *,
    cache: CacheKind = "shared",
    weights_dtype: WeightsDtype = "fp32",
) -> onnx.ModelProto:
    """The model as ONNX; `weights` are named and shaped `[out, in]` as in a Hugging Face checkpoint."""
    builder = (_SharedCache if cache == "shared" else _ConcatCache)(config, weights, weights_dtype)
    return builder.build()


class _Graph:
    """Collects nodes and initializers; every method returns the name of a value."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def add_op(self, op_type: str, *inputs: str, domain: str = "", name: str = "", **attributes: Any) -> str:
        """Adds a node with one output, called `name` if one is given."""
        output = name or f"{op_type}_{len(self.nodes)}"
        return self.add_multi_output_op(op_type, *inputs, outputs=(output,), domain=domain, **attributes)[0]

    def add_multi_output_op(
        self, op_type: str, *inputs: str, outputs: tuple[str, ...], domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """Adds a node with the given outputs; an empty name is an output that is not wanted."""
        node_name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=node_name, domain=domain, **attributes))
        return outputs

    def add_constant(self, name: str, value: Array) -> str:
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(value, name)
        return name

    def add_ints(self, *values: int) -> str:
        """A one-dimensional int64 constant."""
        return self.add_constant("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def add_scalar(self, value: int) -> str:
        return self.add_constant(f"int_{value}", np.array(value, np.int64))

    def add_float(self, value: float) -> str:
        return self.add_constant(f"float_{value}", np.array(value, np.float32))


class _Llama(_Graph):
    """What both kinds of cache have in common; subclasses say how to normalise and how to attend."""

    metadata: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Array], weights_dtype: WeightsDtype) -> None:
        super().__init__()
        self.config = config
        self.weights = weights
        self.weights_dtype = weights_dtype

    # To be said by subclasses.

    def prepare(self) -> None:
        """Adds what is computed once for all layers."""
        raise NotImplementedError

    def add_and_normalize(self, residual: str, update: str | None, name: str) -> tuple[str, str]:
        """Returns (normalised sum, sum) of the residual stream and a layer's update to it."""
        raise NotImplementedError

    def attend(self, hidden: str, layer: int) -> str:
        """Queries, keys, values, cache and attention, before the output projection."""
        raise NotImplementedError

    # Weights.

    def _store_matrix(self, name: str, matrix: Array, scale_axis: int) -> tuple[str, str | None]:
        """Stores a matrix in the file's dtype; returns its name and, for int8, that of its scales.

        int8 is symmetric with one scale for each index along `scale_axis`.
        """
        if self.weights_dtype in ("fp16", "fp32"):
            dtype = np.float16 if self.weights_dtype == "fp16" else np.float32
            return self.add_constant(name, matrix.astype(dtype)), None
        values = matrix.astype(np.float32)
        scale = np.abs(values).max(axis=1 - scale_axis, keepdims=True) / np.float32(127)
        scale = np.where(scale == 0, np.float32(1), scale)
        return self.add_constant(name, np.rint(values / scale).astype(np.int8)), self.add_constant(
            f"{name}.scale", scale
        )

    def _to_float(self, stored: str, scale: str | None, name: str) -> str:
        if self.weights_dtype == "fp32":
            return stored
        floats = self.add_op("Cast", stored, to=TensorProto.FLOAT, name=f"{name}.float")
        return self.add_op("Mul", floats, scale, name=f"{name}.scaled") if scale else floats

    def add_linear(self, hidden: str, prefix: str, *names: str) -> str:
        """One MatMul by the named projections side by side."""
        rows = np.concatenate([self.weights[f"{prefix}.{name}.weight"] for name in names])
        full_name = f"{prefix}.{'_'.join(names)}.weight"
        if self.weights_dtype in _IN_BLOCKS:
            return self._add_blockwise_linear(hidden, rows, full_name, bits=4 if self.weights_dtype == "q4" else 8)
        stored, scale = self._store_matrix(full_name, rows.T, scale_axis=1)
        return self.add_op("MatMul", hidden, self._to_float(stored, scale, full_name))

    def _add_blockwise_linear(
        self, hidden: str, matrix: Array, name: str, *, bits: Literal[8, 4] = 8, output: str = ""
    ) -> str:
        """MatMulNBits by `matrix` [out, in]: weights with a scale for every 32, and activations likewise in 8 bits."""
        num_out, num_in = matrix.shape
        stored = self._store_in_blocks(name, matrix) if bits == 8 else self._store_in_half_bytes(name, matrix)
        return self.add_op(
            "MatMulNBits",
            *(hidden, *stored),
            domain=_CONTRIB,
            name=output,
            K=num_in,
            N=num_out,
            bits=bits,
            block_size=_BLOCK,
            accuracy_level=4,
        )

    def _store_in_blocks(self, name: str, matrix: Array) -> tuple[str, str]:
        """Stores `matrix` [out, in] in 8 bits: levels [out, in / 32, 32], of which 128 is zero, and their scales."""
        blocks = self._split_into_blocks(name, matrix)
        scales = np.abs(blocks).max(axis=-1) / np.float32(127)
        scales = np.where(scales == 0, np.float32(1), scales)
        levels = (np.rint(blocks / scales[..., None]) + 128).astype(np.uint8)
        return self.add_constant(f"{name}.levels", levels), self.add_constant(f"{name}.scales", scales)

    def _store_in_half_bytes(self, name: str, matrix: Array) -> tuple[str, str]:
        """The same in 4 bits, two levels a byte, of which 8 is zero. The largest value of a block is level 0."""
        blocks = self._split_into_blocks(name, matrix)
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)[..., 0]
        scales = np.where(largest == 0, np.float32(1), largest / np.float32(-8))
        levels = np.clip(np.rint(blocks / scales[..., None]) + 8, 0, 15).astype(np.uint8)
        pairs = levels[..., 0::2] | levels[..., 1::2] << 4
        return self.add_constant(f"{name}.levels", pairs), self.add_constant(f"{name}.scales", scales)

    def _split_into_blocks(self, name: str, matrix: Array) -> Array:
        """A matrix [out, in] as [out, in / 32, 32] in float32."""
        num_out, num_in = matrix.shape
        if num_in % _BLOCK:
            raise ValueError(f"{name} has {num_in} columns; {self.weights_dtype} needs a multiple of {_BLOCK}")
        return matrix.astype(np.float32).reshape(num_out, num_in // _BLOCK, _BLOCK)

    def add_vector(self, name: str) -> str:
        return self.add_constant(name, self.weights[name].astype(np.float32))

    def embed(self) -> str:
        """Looks rows up in the stored dtype, so that the float32 table exists once, as the output matrix."""
        name = "model.embed_tokens.weight"
        if self.weights_dtype in _IN_BLOCKS:
            return self._embed_from_blocks(name)
        table, scale = self._store_matrix(name, self.weights[name], scale_axis=0)
        rows = self.add_op("Gather", table, "input_ids", axis=0)
        row_scales = self.add_op("Gather", scale, "input_ids", axis=0) if scale else None
        return self._to_float(rows, row_scales, "embedded")

    def _embed_from_blocks(self, name: str) -> str:
        """The same table as that of a tied output matrix."""
        levels, scales = self._store_in_blocks(name, self.weights[name])
        rows = self.add_op("Cast", self.add_op("Gather", levels, "input_ids", axis=0), to=TensorProto.FLOAT)
        row_scales = self.add_op("Unsqueeze", self.add_op("Gather", scales, "input_ids", axis=0), self.add_ints(-1))
        scaled = self.add_op("Mul", self.add_op("Sub", rows, self.add_float(128.0)), row_scales)
        return self.add_op("Reshape", scaled, self.add_ints(1, -1, self.config.hidden_size), name="embedded")

    def project_to_vocabulary(self, hidden: str) -> None:
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        if self.weights_dtype in _IN_BLOCKS:
            self._add_blockwise_linear(hidden, self.weights[name], name, output="logits")
            return
        table, scale = self._store_matrix(name, self.weights[name], scale_axis=0)
        matrix = self.add_op("Transpose", self._to_float(table, scale, name), perm=(1, 0))
        self.add_op("MatMul", hidden, matrix, name="logits")

    def add_rotary_tables(self) -> tuple[str, str]:
        """Cosines and sines `[max_positions, head_dim / 2]`, folded at load: a megabyte if stored."""
        half = np.arange(0, self.config.head_dim, 2, dtype=np.float32) / np.float32(self.config.head_dim)
        frequencies = (1.0 / np.float32(self.config.rope_theta) ** half).astype(np.float32)
        positions = self.add_op(
            "Range", self.add_scalar(0), self.add_scalar(self.config.max_positions), self.add_scalar(1)
        )
        column = self.add_op("Unsqueeze", self.add_op("Cast", positions, to=TensorProto.FLOAT), self.add_ints(1))
        angles = self.add_op("Mul", column, self.add_constant("rotary_frequencies", frequencies[None, :]))
        return self.add_op("Cos", angles, name="cos_table"), self.add_op("Sin", angles, name="sin_table")

    # The model.

    def build(self) -> onnx.ModelProto:
        self.prepare()
        residual, update = self.embed(), None
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}"
            hidden, residual = self.add_and_normalize(residual, update, f"{prefix}.input_layernorm.weight")
            update = self.add_linear(self.attend(hidden, layer), prefix, "self_attn.o_proj")
            hidden, residual = self.add_and_normalize(residual, update, f"{prefix}.post_attention_layernorm.weight")
            update = self.feed_forward(hidden, prefix)
        hidden, _ = self.add_and_normalize(residual, update, "model.norm.weight")
        self.project_to_vocabulary(hidden)
        return self._create_model()

    def feed_forward(self, hidden: str, prefix: str) -> str:
        gate = self.add_linear(hidden, prefix, "mlp.gate_proj")
        up = self.add_linear(hidden, prefix, "mlp.up_proj")
        activated = self.add_op("Mul", gate, self.add_op("Sigmoid", gate))
        return self.add_linear(self.add_op("Mul", activated, up), prefix, "mlp.down_proj")

    def _create_model(self) -> onnx.ModelProto:
        cache = (1, self.config.num_kv_heads, "past_length", self.config.head_dim)
        present = (1, self.config.num_kv_heads, "present_length", self.config.head_dim)
        kinds = [(layer, kind) for layer in range(self.config.num_layers) for kind in ("key", "value")]
        info = helper.make_tensor_value_info
        inputs = [
            info("input_ids", TensorProto.INT64, (1, "length")),
            info("attention_mask", TensorProto.INT64, (1, "total_length")),
            info("position_ids", TensorProto.INT64, (1, "length")),
            *(info(f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, cache) for layer, kind in kinds),
        ]
        outputs = [
            info("logits", TensorProto.FLOAT, (1, "length", self.config.vocab_size)),
            *(info(f"present.{layer}.{kind}", TensorProto.FLOAT, present) for layer, kind in kinds),
        ]
        graph = helper.make_graph(self.nodes, "llama", inputs, outputs, list(self.initializers.values()))
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="llm_spec")
        helper.set_model_props(model, dict(self.metadata))
        return model


class _SharedCache(_Llama):
    metadata: ClassVar[Mapping[str, str]] = {KV_CACHE_KEY: "shared"}

    def prepare(self) -> None:
        self.cos, self.sin = self.add_rotary_tables()
        num_valid = self.add_op("ReduceSum", "attention_mask", self.add_ints(1), keepdims=0)
        last_valid = self.add_op("Sub", num_valid, self.add_scalar(1))
        self.last_valid = self.add_op("Cast", last_valid, to=TensorProto.INT32)
        mask_length = self.add_op("Gather", self.add_op("Shape", "attention_mask"), self.add_scalar(1), axis=0)
        self.mask_length = self.add_op("Cast", mask_length, to=TensorProto.INT32)

    def add_and_normalize(self, residual: str, update: str | None, name: str) -> tuple[str, str]:
        weight, epsilon = self.add_vector(name), self.config.rms_norm_eps
        if update is None:
            return self.add_op("SimplifiedLayerNormalization", residual, weight, epsilon=epsilon, axis=-1), residual
        normalized, _, _, total = self.add_multi_output_op(
            "SkipSimplifiedLayerNormalization",
            *(residual, update, weight),
            outputs=(f"{name}.normalized", "", "", f"{name}.residual"),
            domain=_CONTRIB,
            epsilon=epsilon,
        )
        return normalized, total

    def attend(self, hidden: str, layer: int) -> str:
        packed = self.add_linear(
            hidden, f"model.layers.{layer}", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        )
        past, present = f"past_key_values.{layer}", f"present.{layer}"
        attended, _, _ = self.add_multi_output_op(
            "GroupQueryAttention",
            *(packed, "", "", f"{past}.key", f"{past}.value", self.last_valid, self.mask_length, self.cos, self.sin),
            "position_ids",
            outputs=(f"attended_{layer}", f"{present}.key", f"{present}.value"),
            domain=_CONTRIB,
            num_heads=self.config.num_heads,
            kv_num_heads=self.config.num_kv_heads,
            do_rotary=1,
        )
        return attended


class _ConcatCache(_Llama):
    def prepare(self) -> None:
        cos, sin = self.add_rotary_tables()
        self.cos, self.sin = (  # [1, 1, S, head_dim / 2]
            self.add_op("Unsqueeze", self.add_op("Gather", table, "position_ids", axis=0), self.add_ints(1))
            for table in (cos, sin)
        )
        num_new = self.add_op("Gather", self.add_op("Shape", "input_ids"), self.add_scalar(1), axis=0)
        num_total = self.add_op("Gather", self.add_op("Shape", "attention_mask"), self.add_scalar(1), axis=0)
        columns = self.add_op("Range", self.add_scalar(0), num_total, self.add_scalar(1))
        rows = self.add_op("Range", self.add_op("Sub", num_total, num_new), num_total, self.add_scalar(1))
        causal = self.add_op("LessOrEqual", columns, self.add_op("Unsqueeze", rows, self.add_ints(1)))  # [S, T]
        present = self.add_op(
            "Unsqueeze", self.add_op("Cast", "attention_mask", to=TensorProto.BOOL), self.add_ints(1, 2)
        )
        allowed = self.add_op("And", causal, present)  # [1, 1, S, T]
        self.bias = self.add_op("Where", allowed, self.add_float(0.0), self.add_float(_MASKED))

    def add_and_normalize(self, residual: str, update: str | None, name: str) -> tuple[str, str]:
        total = self.add_op("Add", residual, update) if update else residual
        square = self.add_op("Pow", total, self.add_float(2.0))
        mean = self.add_op(
            "Add", self.add_op("ReduceMean", square, axes=(-1,)), self.add_float(self.config.rms_norm_eps)
        )
        return self.add_op("Mul", self.add_op("Div", total, self.add_op("Sqrt", mean)), self.add_vector(name)), total

    def attend(self, hidden: str, layer: int) -> str:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        query = self._apply_rope(self._project_heads(hidden, f"{prefix}.q_proj", config.num_heads))
        key = self._apply_rope(self._project_heads(hidden, f"{prefix}.k_proj", config.num_kv_heads))
        value = self._project_heads(hidden, f"{prefix}.v_proj", config.num_kv_heads)
        key, value = (
            self.add_op("Concat", f"past_key_values.{layer}.{kind}", new, axis=2, name=f"present.{layer}.{kind}")
            for kind, new in (("key", key), ("value", value))
        )
        scale = self.add_float(config.head_dim**-0.5)
        scores = self.add_op("MatMul", query, self.add_op("Transpose", self._repeat_kv_heads(key), perm=(0, 1, 3, 2)))
        scores = self.add_op("Add", self.add_op("Mul", scores, scale), self.bias)
        attended = self.add_op("MatMul", self.add_op("Softmax", scores, axis=-1), self._repeat_kv_heads(value))
        rows = self.add_op("Transpose", attended, perm=(0, 2, 1, 3))
        return self.add_op("Reshape", rows, self.add_ints(1, -1, config.num_heads * config.head_dim))

    def _project_heads(self, hidden: str, projection: str, num_heads: int) -> str:
        """Projects to `[1, num_heads, S, head_dim]`."""
        prefix, _, name = projection.rpartition(".")
        split = self.add_op(
            "Reshape", self.add_linear(hidden, prefix, name), self.add_ints(1, -1, num_heads, self.config.head_dim)
        )
        return self.add_op("Transpose", split, perm=(0, 2, 1, 3))

    def _apply_rope(self, heads: str) -> str:
        """Turns the pairs (i, i + head_dim / 2) by their position's angle."""
        half = self.config.head_dim // 2
        index = len(self.nodes)
        low, high = self.add_multi_output_op(
            "Split", heads, self.add_ints(half, half), outputs=(f"low_{index}", f"high_{index}"), axis=-1
        )
        turned_low = self.add_op("Sub", self.add_op("Mul", low, self.cos), self.add_op("Mul", high, self.sin))
        turned_high = self.add_op("Add", self.add_op("Mul", high, self.cos), self.add_op("Mul", low, self.sin))
        return self.add_op("Concat", turned_low, turned_high, axis=-1)

    def _repeat_kv_heads(self, heads: str) -> str:
        """Repeats each of the key or value heads for the query heads that share it."""
        config = self.config
        num_sharing = config.num_heads // config.num_kv_heads
        if num_sharing == 1:
            return heads
        apart = self.add_op("Unsqueeze", heads, self.add_ints(2))  # [1, kv_heads, 1, T, head_dim]
        repeated = self.add_op("Expand", apart, self.add_ints(1, 1, num_sharing, 1, 1))
        return self.add_op("Reshape", repeated, self.add_ints(1, config.num_heads, -1, config.head_dim))
