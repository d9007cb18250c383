"""`llm-spec serve`: start a server from the arguments."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from llm_spec.contract.errors import MissingExtraError

if TYPE_CHECKING:
    from llm_spec.server.config import ServerConfig

__all__ = ["serve_from_arguments"]


def serve_from_arguments(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the server."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise MissingExtraError(
            "serve needs prometheus_client, which is not installed; run: pip install 'llm-spec[server]'"
        )
    from llm_spec.server.config import ServerConfig, load_config
    from llm_spec.server.launcher import serve

    given = {name: getattr(arguments, name) for name in ("host", "port", "workers")}
    settings = {name: value for name, value in given.items() if value is not None}
    if arguments.config is None:
        config = ServerConfig.builtin(**settings)
    else:
        config = replace(load_config(arguments.config), **settings)
    if arguments.check:
        from llm_spec.server.check import check_config_with_live_calls

        check_config_with_live_calls(config)
        print(f"llm-spec: {len(config.models)} models can be served: {', '.join(config.models)}")
        return 0
    print(f"llm-spec loads {_describe_served_models(config)}", file=sys.stderr, flush=True)
    serve(config, on_ready=lambda line: print(line, flush=True), may_replace_program=True)
    return 0


def _describe_served_models(config: ServerConfig) -> str:
    """Return the names of a config's models, each with its target and draft."""
    from llm_spec.decoder.entry_points import strip_credentials

    made_of = {name: model.target + f" with {model.draft}" * bool(model.draft) for name, model in config.models.items()}
    return strip_credentials(", ".join(f"{name} ({parts})" for name, parts in made_of.items()))
