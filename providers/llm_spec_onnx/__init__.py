"""Local decoder-only models through onnxruntime, and the built-in pair. Importing this loads neither."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_spec import ConfigError, ProviderEntry

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
    from llm_spec_onnx.provider import OnnxProvider

    if base_url is not None or not model:
        raise ConfigError(f"onnx takes a folder on this machine, onnx:/path/to/model, not {base_url or 'nothing'!r}")
    return OnnxProvider(model)


def _load_builtin_provider(model: str, base_url: str | None) -> OnnxProvider:
    from llm_spec_onnx.provider import OnnxProvider

    if base_url is not None or model not in ("target", "draft"):
        raise ConfigError(f"builtin model is {model!r}; there are builtin:target and builtin:draft")
    return OnnxProvider(_BUILTIN_FOLDER / model, name=f"builtin:{model}")


ONNX: Final = ProviderEntry(
    load=_load_onnx_provider,
    summary="any Hugging Face ONNX export with a key-value cache: onnx:/path/to/folder",
    requires=_REQUIRES,
    install=_INSTALL,
    features=lambda _: ("token_model",),
)
BUILTIN: Final = ProviderEntry(
    load=_load_builtin_provider,
    summary="the built-in pair, small models of Python code: builtin:target, builtin:draft",
    requires=_REQUIRES,
    install=_INSTALL,
    features=lambda _: ("token_model",),
)
