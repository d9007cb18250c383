"""The models that are served: their providers, opened once and shared, and decoders for each client and strategy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final, cast, get_args
from urllib.parse import urlsplit

from llm_spec.chat import ApiName
from llm_spec.config import SpeculativeConfig, StrategyName
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.drafting.model import ProviderDraft
from llm_spec.errors import ConfigError, InvalidRequestError, ModelLoadError
from llm_spec.provider import DraftProvider, LlmProvider
from llm_spec.registry import NamedProvider, open_draft, open_provider
from llm_spec.server.bodies import Asked, Json
from llm_spec.server.clients import Client
from llm_spec.server.config import ModelConfig, ServerConfig
from llm_spec.server.fields import leave_out
from llm_spec.server.problems import Problem, folder_in, shown_name

__all__ = ["MAX_CLIENTS", "ServedModel", "ServedModels"]

MAX_CLIENTS: Final = 64  # of a model, whose answers are remembered for drafts; those of longest ago are forgotten
_CREATED: Final = 0  # a time that the API wants, and nobody knows


class ServedModel:
    """One model as clients see it."""

    def __init__(self, name: str, config: ModelConfig, target: LlmProvider, draft: DraftProvider | None) -> None:
        self.name = name
        self.target = target
        self._config = config
        self._has_draft = draft is not None
        self._extra_fields = frozenset(config.extra_fields)
        self._clients: OrderedDict[str, _ClientDecoders] = OrderedDict()  # the latest last
        self.decoder = SpeculativeDecoder(draft, target, config.speculative)

    @property
    def is_local(self) -> bool:
        """Whether its target runs in this process."""
        return self.target.capabilities.token_model is not None

    @property
    def speaks(self) -> ApiName | None:
        """The API of its target's server; None: it runs in this process."""
        return None if self.is_local else self.target.capabilities.api

    def decoder_for(self, client: Client, strategy: str | None) -> SpeculativeDecoder:
        """The decoder of a client's request; raises InvalidRequestError for a strategy that it may not choose."""
        chosen = self._config.speculative.strategy if strategy is None else strategy
        if strategy is not None and strategy not in self._config.allowed_strategies:
            usable = ", ".join(self._usable())
            raise InvalidRequestError(f"x-llm-spec-strategy is {strategy!r}; {self.name} takes: {usable}")
        known = self._clients.pop(client.name, None) or _ClientDecoders(self.decoder.for_client(), client)
        self._clients[client.name] = known
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return known.find(cast("StrategyName", chosen))

    def describe(self) -> Json:
        """The model object of OpenAI's API."""
        told = {
            "target": shown_name(self._config.target),
            "draft": None if self._config.draft is None else shown_name(self._config.draft),
            "strategy": self._config.speculative.strategy,
            "strategies": list(self._usable()),
        }
        return {"id": self.name, "object": "model", "created": _CREATED, "owned_by": "llm-spec", "llm_spec": told}

    def leave_out(self, asked: Sequence[Asked]) -> tuple[list[Asked], list[str]]:
        """Requests of one body without the fields that their target is not sent, and the names of those."""
        kept = [leave_out(each, self._extra_fields) for each in asked]
        return [each for each, _ in kept], kept[0][1]

    def _usable(self) -> tuple[str, ...]:
        """The strategies that requests may choose and this pair may support, as far as can be usable without asking."""
        usable: tuple[str, ...] = tuple(name for name in get_args(StrategyName) if name != "tokens")
        if not self._has_draft:
            usable = ("auto", "plain")
        elif self.is_local:
            usable = ("auto", "plain", "tokens", "judge", "regenerate")
        return tuple(name for name in self._config.allowed_strategies if name in usable)


class _ClientDecoders:
    """One client's decoders: they share what its draft remembers."""

    def __init__(self, decoder: SpeculativeDecoder, client: Client) -> None:
        self._decoder = decoder
        self._client = client
        self._by_strategy: dict[StrategyName, SpeculativeDecoder] = {}

    def find(self, strategy: StrategyName) -> SpeculativeDecoder:
        if strategy not in self._by_strategy:
            config: SpeculativeConfig = replace(self._decoder.config, strategy=strategy, budget=self._client.budget)
            self._by_strategy[strategy] = self._decoder.using(config)
        return self._by_strategy[strategy]


class ServedModels:
    """All models of a config. Targets and drafts that are written alike are opened once."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._targets: dict[str, LlmProvider] = {}
        self._drafts: dict[str, DraftProvider] = {}
        self._models: dict[str, ServedModel] = {}

    def open(self, clients: Sequence[Client]) -> None:
        """Open the providers, and check the budgets of all clients; raises ConfigError, naming the model."""
        for name, model in self._config.models.items():
            try:
                target = self._target(model.target)
                draft = None if model.draft is None else self._draft(model.draft)
                self._models[name] = ServedModel(name, model, target, draft)
                self._stack.push_async_callback(self._models[name].decoder.aclose)
                for client in clients:
                    if client.may_use(name):
                        self._models[name].decoder_for(client, None)
            except (ConfigError, ModelLoadError) as error:
                raise ConfigError(f"models.{name}: {error}") from error

    def find(self, name: str, client: Client) -> ServedModel:
        """The model of that name, or the default one; raises Problem where there is none for this client."""
        known = name if name in self._models else self._config.default_model
        if known is None or not client.may_use(known):
            told = f"the model {name[:200]!r} does not exist here, or this key may not use it"
            raise Problem(404, told, code="model_not_found", param="model")
        return self._models[known]

    def all_for(self, client: Client) -> list[ServedModel]:
        """What a client may ask for."""
        return [model for name, model in self._models.items() if client.may_use(name)]

    @property
    def targets(self) -> Mapping[str, LlmProvider]:
        """What is open, by its provider string."""
        return self._targets

    @property
    def drafts(self) -> Mapping[str, DraftProvider]:
        """As `targets`."""
        return self._drafts

    @property
    def all(self) -> list[ServedModel]:
        return list(self._models.values())

    @property
    def hidden(self) -> tuple[str, ...]:
        """Where the servers and files behind are: nobody's business."""
        texts = [text for model in self._config.models.values() for text in (model.target, model.draft) if text]
        written = [text.partition("@")[2] for text in texts]
        addresses = {*written, *(p.base_url for p in self._config.providers.values() if p.base_url)} - {""}
        parts = [urlsplit(address) for address in addresses]
        hosts = {part.netloc for part in parts} | {
            part.hostname or "" for part in parts if "." in (part.hostname or "")
        }
        found = {address.rstrip("/") for address in addresses} | hosts | set(map(folder_in, texts))
        return tuple(sorted(found - {""}, key=len, reverse=True))

    async def aclose(self) -> None:
        """Close what was opened."""
        await self._stack.aclose()

    def _target(self, text: str) -> LlmProvider:
        if text not in self._targets:
            self._targets[text] = open_provider(text, self._named)
            self._stack.push_async_callback(self._targets[text].aclose)
        return self._targets[text]

    def _draft(self, text: str) -> DraftProvider:
        """A draft; where a target of the same text is open, its weights are read once."""
        if text not in self._drafts:
            if text in self._targets:
                self._drafts[text] = ProviderDraft(self._targets[text])
            else:
                self._drafts[text] = open_draft(text, self._named)
                self._stack.push_async_callback(self._drafts[text].aclose)
        return self._drafts[text]

    @property
    def _named(self) -> Mapping[str, NamedProvider]:
        return self._config.providers
