"""Checks a config: opens its models, and calls each target and draft on a server once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

from llm_spec.contract.draft import DraftProvider, get_draft_capabilities
from llm_spec.contract.errors import ConfigError, LlmSpecError
from llm_spec.contract.request import ChatRequest
from llm_spec.server.clients import ClientRegistry
from llm_spec.server.config import ServerConfig
from llm_spec.server.models import ServedModels
from llm_spec.server.usage_ledger import UsageLedger

__all__ = ["check_config_with_live_calls"]

_NUM_TOKENS: Final = 16  # some servers refuse fewer
_PROBE_REQUEST: Final = ChatRequest.create("Say yes.", max_tokens=_NUM_TOKENS)
_TIMEOUT_S: Final = 30.0  # until the first piece of an answer


def check_config_with_live_calls(config: ServerConfig) -> None:
    """Open all models of a config, call each target and draft on a server once, and close them.

    Raises ConfigError if the config cannot be served, naming each model that could not be called.
    """
    config.check_address_is_protected()
    asyncio.run(_call_each_provider_once(config))


async def _call_each_provider_once(config: ServerConfig) -> None:
    clients = ClientRegistry(config.keys, UsageLedger(1, len(config.keys)), 0)
    models = ServedModels(config)
    try:
        models.open_providers(clients.all_clients)
        drafts = {
            text: draft.draft(_PROBE_REQUEST, _NUM_TOKENS)
            for text, draft in models.drafts_by_spec.items()
            if _is_remote_draft(draft)
        }
        targets = {
            text: target.stream(_PROBE_REQUEST)
            for text, target in models.targets_by_spec.items()
            if target.capabilities.token_model is None
        }
        streams = drafts | targets  # a model that is both is called once
        problems = await asyncio.gather(*map(_try_call_and_find_failure, streams.values()))
    finally:
        await models.aclose()
    failed = [
        _format_call_failure(config, text, fault)
        for text, fault in zip(streams, problems, strict=True)
        if fault is not None
    ]
    if failed:
        raise ConfigError("; ".join(failed))


def _is_remote_draft(draft: DraftProvider) -> bool:
    """Return True if a draft may call a server; a local model was read when it was opened."""
    can = get_draft_capabilities(draft)
    return not can.is_free and (can.token_model is None or bool(can.drafts))


async def _try_call_and_find_failure(opened: AbstractAsyncContextManager[AsyncIterator[object]]) -> str | None:
    """Return why a call fails, or None if it begins to answer."""
    try:
        async with asyncio.timeout(_TIMEOUT_S), opened as events:
            async for _ in events:
                return None
    except LlmSpecError as error:
        return str(error)
    except TimeoutError:
        return f"it sent nothing for {_TIMEOUT_S:g} s"
    return "it sent an empty answer"


def _format_call_failure(config: ServerConfig, text: str, problem: str) -> str:
    """Name a model that cannot be called, and the config's models that need it."""
    needed_by = [name for name, model in config.models.items() if text in (model.target, model.draft)]
    return f"models.{', models.'.join(needed_by)}: {text.partition('@')[0]} cannot answer: {problem}"
