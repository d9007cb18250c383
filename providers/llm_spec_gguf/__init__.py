"""A provider for GGUF files, through llama.cpp. Importing this package does not load llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_spec import ConfigError
from llm_spec.contract.entry import ProviderEntry

if TYPE_CHECKING:
    from llm_spec_gguf.model import GgufModel
    from llm_spec_gguf.options import GgufOptions
    from llm_spec_gguf.provider import GgufProvider

__all__ = ["GGUF", "GgufModel", "GgufOptions", "GgufProvider"]


def __getattr__(name: str) -> object:
    if name == "GgufProvider":
        from llm_spec_gguf.provider import GgufProvider

        return GgufProvider
    if name == "GgufModel":
        from llm_spec_gguf.model import GgufModel

        return GgufModel
    if name == "GgufOptions":
        from llm_spec_gguf.options import GgufOptions

        return GgufOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load_gguf_provider(model: str, base_url: str | None) -> GgufProvider:
    from llm_spec.kit.model_options import parse_query_options
    from llm_spec.kit.server_addresses import strip_credentials
    from llm_spec_gguf.options import GgufOptions
    from llm_spec_gguf.provider import GgufProvider

    path, _, query = model.partition("?")
    if base_url is not None or not path:
        raise ConfigError(
            f"gguf takes a file on this machine, gguf:/path/model.gguf or gguf:/path/model.gguf?threads=1, not "
            f"{strip_credentials(base_url or 'nothing')!r}"
        )
    return GgufProvider(path, name=f"gguf:{path}", **parse_query_options("gguf", query, GgufOptions))


GGUF: Final = ProviderEntry(
    load=_load_gguf_provider,
    summary="a GGUF file, as llama.cpp and Ollama use them: gguf:/path/model.gguf",
    requires=("llama_cpp", "jinja2"),
    install="pip install 'llm-spec[gguf]'",
    names_files=True,
    features=lambda _: ("token_model",),
)
