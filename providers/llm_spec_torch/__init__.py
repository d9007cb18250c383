"""Hugging Face checkpoints on a CUDA device or a CPU. Importing this loads neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_type_hints
from urllib.parse import parse_qsl

from llm_spec import ConfigError, ProviderEntry

if TYPE_CHECKING:
    from llm_spec_torch.model import TorchModel
    from llm_spec_torch.options import TorchOptions
    from llm_spec_torch.provider import TorchProvider

__all__ = ["TORCH", "TorchModel", "TorchOptions", "TorchProvider"]


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
    from llm_spec_torch.provider import TorchProvider

    path, _, query = model.partition("?")
    if base_url is not None or not path:
        raise ConfigError(
            "torch takes a folder or a Hugging Face name, torch:/path/to/model or torch:org/name?dtype=bfloat16, not "
            f"{base_url or 'nothing'!r}"
        )
    return TorchProvider(path, name=f"torch:{path}", **_parse_query_options(query))


def _parse_query_options(query: str) -> Any:
    """The options after a question mark, each in its type."""
    from llm_spec_torch.options import TorchOptions

    types = get_type_hints(TorchOptions)
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in types:
            raise ConfigError(f"torch has no option {name!r}; it has {', '.join(types)}")
        options[name] = _parse_option_value(name, types[name], text)
    return options


def _parse_option_value(name: str, expected_type: Any, text: str) -> Any:
    if expected_type is bool:
        if text not in {"true", "false"}:
            raise ConfigError(f"{name} is {text!r}; it must be true or false")
        return text == "true"
    if expected_type in {int, float}:
        try:
            return expected_type(text)
        except ValueError as error:
            raise ConfigError(f"{name} is {text!r}; it must be a number") from error
    return text


TORCH: Final = ProviderEntry(
    load=_load_torch_provider,
    summary="any Hugging Face checkpoint built like Llama, Mistral, Qwen or Gemma: torch:/path or torch:org/name",
    requires=("torch", "transformers", "tokenizers", "jinja2"),
    install="pip install 'llm-spec[torch]'",
    features=lambda _: ("token_model",),
)
