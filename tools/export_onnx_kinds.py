"""Exports a Hugging Face folder to ONNX as repositories of the hub have it: several kinds of weights in `onnx/`.

python tools/export_onnx_kinds.py path/to/huggingface path/to/repository

Needs an environment of its own: pip install 'optimum-onnx[onnxruntime]' onnxslim
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxslim
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

_ROTARY = "rotary_emb"  # in the names of nodes that stay in float32: positions are too large for float16
_TEXT_SUFFIXES = (".json", ".jinja")


def export(source: Path, destination: Path) -> None:
    """Write the repository: text files beside `onnx/`, which has model.onnx and a file for each other kind."""
    folder = destination / "onnx"
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in _TEXT_SUFFIXES:
            shutil.copyfile(path, destination / path.name)
    with tempfile.TemporaryDirectory() as exported:
        command = ["optimum-cli", "export", "onnx", "--library", "transformers", "--task", "text-generation-with-past"]
        subprocess.run([*command, "--model", str(source), exported], check=True)  # noqa: S603 - the command is ours
        onnx.save(onnxslim.slim(str(Path(exported) / "model.onnx")), folder / "model.onnx")
    for kind, convert in _KINDS.items():
        convert(folder / "model.onnx", folder / f"model_{kind}.onnx")
        print(f"{kind}: {(folder / f'model_{kind}.onnx').stat().st_size / 1e6:.0f} MB", flush=True)


def _write_8_bits(weight_type: QuantType) -> Callable[[Path, Path], None]:
    def convert(source: Path, destination: Path) -> None:
        options = {"EnableSubgraph": True, "MatMulConstBOnly": True}
        quantize_dynamic(source, destination, weight_type=weight_type, extra_options=options)

    return convert


def _write_4_bits(source: Path, destination: Path) -> None:
    onnx.save(_quantize_to_4_bits(source), destination)


def _quantize_to_4_bits(source: Path) -> onnx.ModelProto:
    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True)
    quantizer.process()
    return quantizer.model.model


def _write_bnb4(source: Path, destination: Path) -> None:
    quantizer = MatMulBnb4Quantizer(onnx.load(source), block_size=64, quant_type=MatMulBnb4Quantizer.NF4)
    quantizer.process()
    onnx.save(quantizer.model.model, destination)


def _write_float16(source: Path, destination: Path) -> None:
    onnx.save(_convert_to_float16(onnx.load(source)), destination)


def _write_4_bits_and_float16(source: Path, destination: Path) -> None:
    onnx.save(_convert_to_float16(_quantize_to_4_bits(source)), destination)


def _convert_to_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Everything but the rotary angles and the logits, the cache included."""
    graph = model.graph
    rotary = [node for node in graph.node if _ROTARY in node.name]
    rotary_inputs = {name for node in rotary for name in node.input}
    for tensor in graph.initializer:
        if tensor.name not in rotary_inputs:
            _convert_tensor(tensor)
    angles = {name for node in rotary for name in node.output}
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        nodes.append(node)
        if _ROTARY in node.name:
            nodes += [
                helper.make_node("Cast", [name], [f"{name}.half"], to=TensorProto.FLOAT16) for name in node.output
            ]
            continue
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _convert_tensor(attribute.t)
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
        node.input[:] = [f"{name}.half" if name in angles else name for name in node.input]
        node.output[:] = ["logits.half" if name == "logits" else name for name in node.output]
    nodes.append(helper.make_node("Cast", ["logits.half"], ["logits"], to=TensorProto.FLOAT))
    for value in [*graph.input, *graph.output]:
        if value.name != "logits" and value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del graph.node[:], graph.value_info[:]  # the types of values are inferred anew
    graph.node.extend(nodes)
    return model


def _convert_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        most = np.finfo(np.float16).max
        values = np.clip(numpy_helper.to_array(tensor), -most, most).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


_KINDS: Mapping[str, Callable[[Path, Path], None]] = {
    "quantized": _write_8_bits(QuantType.QInt8),
    "uint8": _write_8_bits(QuantType.QUInt8),
    "q4": _write_4_bits,
    "q4f16": _write_4_bits_and_float16,
    "fp16": _write_float16,
    "bnb4": _write_bnb4,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Export a Hugging Face folder as repositories of the hub have it.")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    options = parser.parse_args(arguments)
    export(options.source, options.destination)


if __name__ == "__main__":
    main()
