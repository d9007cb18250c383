"""A server that any client of OpenAI's or Anthropic's API can point at: `llm-spec serve`."""

from llm_spec.server.config import KeyConfig, ModelConfig, ServerConfig, load_config
from llm_spec.server.serve import Server, serve

__all__ = ["KeyConfig", "ModelConfig", "Server", "ServerConfig", "load_config", "serve"]
