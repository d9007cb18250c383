"""Hugging Face checkpoints on a CUDA device or a CPU.

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from llm_spec import ConfigError
from llm_spec.contract.entry import ProviderEntry

if TYPE_CHECKING:
    from llm_spec_torch.model import TorchModel
    from llm_spec_torch.options import TorchOptions
    from llm_spec_torch.provider import TorchProvider

__all__ = ["TORCH", "TorchModel", "TorchOptions", "TorchProvider"]

# On Linux the default build is for CUDA. The index of the CPU build:
# https://pytorch.org/get-started/locally
_CPU_BUILD_HINT: Final = (
    "  (for a CPU run before it: pip install torch --index-url https://download.pytorch.org/whl/cpu, which is 200 MB "
    "instead of several GB)"
    if sys.platform == "linux"
    else ""
)


def __getattr__(name: str) -> object:
    if name == "TorchProvider":
        from llm_spec_torch.provider import TorchProvider

        return TorchProvider
    if name == "TorchModel":
        from llm_spec_torch.model import TorchModel

        return TorchModel
    if name == "TorchOptions":
        from llm_spec_torch.options import TorchOptions

        return TorchOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load_torch_provider(model: str, base_url: str | None) -> TorchProvider:
    from llm_spec.kit.model_options import parse_query_options
    from llm_spec.kit.server_addresses import strip_credentials
    from llm_spec_torch.options import TorchOptions
    from llm_spec_torch.provider import TorchProvider

    path, _, query = model.partition("?")
    if base_url is not None or not path:
        raise ConfigError(
            "torch takes a folder or a Hugging Face name, torch:/path/to/model or torch:org/name?dtype=bfloat16, not "
            f"{strip_credentials(base_url or 'nothing')!r}"
        )
    return TorchProvider(path, name=f"torch:{path}", **parse_query_options("torch", query, TorchOptions))


TORCH: Final = ProviderEntry(
    load=_load_torch_provider,
    summary="any Hugging Face checkpoint built like Llama, Mistral, Qwen or Gemma: torch:/path or torch:org/name",
    requires=("torch", "transformers", "tokenizers", "jinja2"),
    install="pip install 'llm-spec[torch]'" + _CPU_BUILD_HINT,
    names_files=True,
    features=lambda _: ("token_model",),
)
