"""The server behind `llm-spec serve`, for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_spec.contract._lazy import make_lazy_exports

if TYPE_CHECKING:
    from llm_spec.server.app import Server as Server
    from llm_spec.server.config import KeyConfig as KeyConfig
    from llm_spec.server.config import ModelConfig as ModelConfig
    from llm_spec.server.config import ServerConfig as ServerConfig
    from llm_spec.server.config import load_config as load_config
    from llm_spec.server.launcher import serve as serve

# The module of each name; the imports above are for type checkers
_NAMES_BY_MODULE: Final = {
    "llm_spec.server.app": "Server",
    "llm_spec.server.config": "KeyConfig ModelConfig ServerConfig load_config",
    "llm_spec.server.launcher": "serve",
}
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = make_lazy_exports(__name__, _NAMES_BY_MODULE)
