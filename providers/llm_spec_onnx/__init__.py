"""Local decoder-only models through onnxruntime, and the built-in pair.

Importing this package loads neither onnxruntime nor a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_spec import ConfigError
from llm_spec.contract.entry import ProviderEntry

if TYPE_CHECKING:
    from llm_spec_onnx.provider import OnnxProvider

__all__ = ["BUILTIN", "ONNX", "OnnxProvider"]

_BUILTIN_FOLDER: Final = Path(__file__).parent / "builtin"
_REQUIRES: Final = ("onnxruntime", "tokenizers", "jinja2")
_INSTALL: Final = "pip install 'llm-spec[onnx]'"


def __getattr__(name: str) -> object:
    if name == "OnnxProvider":
        from llm_spec_onnx.provider import OnnxProvider

        return OnnxProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load_onnx_provider(model: str, base_url: str | None) -> OnnxProvider:
    from llm_spec.kit.server_addresses import strip_credentials

    path, _, query = model.partition("?")
    if base_url is not None or not path:
        raise ConfigError(
            "onnx takes a folder or a Hugging Face name, onnx:/path/to/model or onnx:org/name?weights=fp32, not "
            f"{strip_credentials(base_url or 'nothing')!r}"
        )
    return _open_provider(path, f"onnx:{path}", query)


def _load_builtin_provider(model: str, base_url: str | None) -> OnnxProvider:
    name, _, query = model.partition("?")
    if base_url is not None or name not in ("target", "draft"):
        raise ConfigError(f"builtin model is {name!r}; give builtin:target or builtin:draft")
    return _open_provider(_BUILTIN_FOLDER / name, f"builtin:{name}", query)


def _open_provider(model: str | Path, name: str, query: str) -> OnnxProvider:
    from llm_spec.kit.model_options import parse_query_options
    from llm_spec_onnx.options import OnnxOptions
    from llm_spec_onnx.provider import OnnxProvider

    return OnnxProvider(model, name=name, **parse_query_options("onnx", query, OnnxOptions))


ONNX: Final = ProviderEntry(
    load=_load_onnx_provider,
    summary="any Hugging Face ONNX export with a key-value cache: onnx:/path or onnx:org/name",
    requires=(*_REQUIRES, "huggingface_hub"),
    install=_INSTALL,
    names_files=True,
    features=lambda _: ("token_model",),
)
BUILTIN: Final = ProviderEntry(
    load=_load_builtin_provider,
    summary="the built-in pair, small models of Python code: builtin:target, builtin:draft",
    requires=_REQUIRES,
    install=_INSTALL,
    features=lambda _: ("token_model",),
)
