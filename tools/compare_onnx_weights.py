"""Compares the kinds of weights that a published ONNX export has: size, time, agreement with the float32 ones.

python tools/compare_onnx_weights.py path/to/folder        # with model.onnx and model_q4.onnx, …, or onnx/model.onnx, …

Kinds are timed one after another, by the fastest of some passes with one thread, in seconds of that thread's own: other
programs on the machine count little. Agreement is measured as in tools/convert_pair.py, along float32's greedy answers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from convert_pair import PROMPTS, answer_prompts, compare_along_answers
from llm_spec_onnx.model import OnnxModel
from llm_spec_onnx.weights import find_weights_file, list_kinds

_NUM_CONTEXT_TOKENS = 256
_TIMED_WIDTHS = (1, 4, 8)  # tokens a pass: plain decoding, and verifying
_NUM_TIMED = 20


def compare_kinds(folder: Path, kinds: Sequence[str]) -> Iterator[str]:
    """A table, line by line."""
    yield (
        "| weights | MB | "
        + " | ".join(f"{width} tokens, ms" for width in _TIMED_WIDTHS)
        + " | agreement | same text |"
    )
    yield "| --- " * (4 + len(_TIMED_WIDTHS)) + "|"
    answers = answer_prompts(OnnxModel(folder, weights="fp32"), PROMPTS)
    for kind in kinds:
        _, path = find_weights_file(folder, kind)
        size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
        model = OnnxModel(folder, weights=kind)
        times = " | ".join(f"{1e3 * _time_pass(model, width):.1f}" for width in _TIMED_WIDTHS)
        agreement = compare_along_answers(model, answers)
        promise = "yes" if model.same_text else "no"
        del model  # before the next one is loaded
        yield f"| `{kind}` | {size / 1e6:.0f} | {times} | {100 * agreement.share:.1f} % | {promise} |"


def _time_pass(model: OnnxModel, width: int) -> float:
    with closing(model.open()) as session:
        token_ids, times = list(range(_NUM_CONTEXT_TOKENS)), list[float]()
        session.forward(token_ids, num_rows=1)
        for _ in range(_NUM_TIMED):
            started = time.thread_time()
            session.forward(token_ids[:width], num_rows=width)
            times.append(time.thread_time() - started)
            session.truncate(len(token_ids))
        return min(times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare the kinds of weights of an ONNX export.")
    parser.add_argument("folder", type=Path, help="with the tokenizer and model.onnx, model_q4.onnx, …, or onnx/…")
    parser.add_argument("kinds", nargs="*", help="default: all")
    options = parser.parse_args(arguments)
    files = {path.relative_to(options.folder).as_posix() for path in options.folder.rglob("*.onnx")}
    for line in compare_kinds(options.folder, options.kinds or sorted(list_kinds(files))):
        print(line, flush=True)


if __name__ == "__main__":
    main()
