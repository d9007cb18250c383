"""The served models: their shared providers, and decoders for each client and strategy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import ConfigError, InvalidRequestError, ModelLoadError
from llm_spec.contract.messages import ApiName
from llm_spec.contract.provider import FieldTranslator, LlmProvider
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.entry_points import (
    NamedProvider,
    list_model_specs_of_draft,
    open_draft,
    open_provider,
    strip_address,
)
from llm_spec.drafting.provider_draft import ProviderDraft
from llm_spec.kit.server_addresses import parse_server_address
from llm_spec.server.apis.fields import Json, ParsedRequest, drop_unsafe_fields
from llm_spec.server.clients import ApiClient
from llm_spec.server.config import ModelConfig, ServerConfig
from llm_spec.server.problems import HttpProblem, get_model_folder, get_public_name
from llm_spec.strategies.registry import AUTO, PLAIN, StrategyEntry, get_strategies_by_name

__all__ = ["MAX_CLIENTS", "ServedModel", "ServedModels"]

# Clients of a model whose answers are remembered for drafts; the least recent are forgotten
MAX_CLIENTS: Final = 64
_CREATED_S: Final = 0  # the APIs require a time; there is none
_CREATED_AT: Final = "1970-01-01T00:00:00Z"


class ServedModel:
    """One model as clients see it.

    `target_api`: the API of the target's server, or None if the target runs in this process.
    """

    def __init__(self, name: str, config: ModelConfig, target: LlmProvider, draft: DraftProvider | None) -> None:
        self.name = name
        self.target = target
        self._config = config
        self._has_draft = draft is not None
        self._extra_fields = frozenset(config.extra_fields)
        self._client_decoders: OrderedDict[str, _ClientDecoders] = OrderedDict()  # the latest last
        can = target.capabilities
        self.is_local = can.token_model is not None
        self.target_api: ApiName | None = None if self.is_local else can.api
        self.sees_images = config.images and not self.is_local
        self.decoder = SpeculativeDecoder(target=target, draft=draft, config=config.speculative)

    @property
    def session_header(self) -> str | None:
        """The header that tells the target and the draft a request's conversation."""
        return self._config.speculative.session_header

    def get_decoder(self, client: ApiClient, strategy: str | None) -> SpeculativeDecoder:
        """Return the decoder for a client's request.

        Raises InvalidRequestError if the client may not choose the strategy.
        """
        chosen = self._config.speculative.strategy if strategy is None else strategy
        if strategy is not None and strategy not in self._config.allowed_strategies:
            usable = ", ".join(self._list_usable_strategies())
            raise InvalidRequestError(f"x-llm-spec-strategy is {strategy!r}; {self.name} takes: {usable}")
        decoders = self._client_decoders.get(client.name)
        if decoders is None:
            decoders = self._client_decoders[client.name] = _ClientDecoders(self.decoder.copy_for_new_client(), client)
            if len(self._client_decoders) > MAX_CLIENTS:
                self._client_decoders.popitem(last=False)
        else:
            self._client_decoders.move_to_end(client.name)
        return decoders.get_by_strategy(chosen)

    def import_strategies(self) -> None:
        """Import the strategies now; otherwise the first answer of each would delay all others."""
        for strategy in self._list_suitable_strategies():
            if strategy is PLAIN or self._has_draft or self.is_local:
                strategy.load_prepare_function()

    def to_openai_model(self) -> Json:
        """The model object of OpenAI's API."""
        own = {"id": self.name, "object": "model", "created": _CREATED_S, "owned_by": "llm-spec"}
        return {**own, "llm_spec": self._describe()}

    def to_anthropic_model(self) -> Json:
        """The model object of Anthropic's API."""
        own = {"id": self.name, "type": "model", "display_name": self.name, "created_at": _CREATED_AT}
        return {**own, "lifecycle": "active", "llm_spec": self._describe()}

    def _describe(self) -> Json:
        return {
            "target": get_public_name(self._config.target),
            "draft": None if self._config.draft is None else get_public_name(self._config.draft),
            "strategy": self._config.speculative.strategy,
            "strategies": list(self._list_usable_strategies()),
        }

    def select_fields(
        self, parsed_requests: Sequence[ParsedRequest], *, client_api: ApiName | None
    ) -> tuple[list[ParsedRequest], list[str]]:
        """Keep the fields that the target gets; return the requests and the other fields' names."""
        if not any(one_request.request.extra for one_request in parsed_requests):  # nearly always
            return list(parsed_requests), []
        kept = [
            drop_unsafe_fields(one_request, self._extra_fields, is_local=self.is_local)
            for one_request in parsed_requests
        ]
        if isinstance(self.target, FieldTranslator) and client_api != self.target_api:
            kept = [self._translate_fields(self.target, one_request, names) for one_request, names in kept]
        return [one_request for one_request, _ in kept], kept[0][1]

    def _translate_fields(
        self, target: FieldTranslator, parsed: ParsedRequest, dropped_fields: Sequence[str]
    ) -> tuple[ParsedRequest, list[str]]:
        """Translate a request into its target's fields; those that the operator passes on stay."""
        request, left_out = target.translate_openai_fields(parsed.request)
        passed = {name: parsed.request.extra[name] for name in left_out if name in self._extra_fields}
        request = replace(request, extra={**request.extra, **passed})
        return replace(parsed, request=request), sorted({*dropped_fields, *left_out} - passed.keys())

    def _list_usable_strategies(self) -> tuple[str, ...]:
        """List the allowed strategies that this pair may support, without calling the target."""
        usable = {AUTO, PLAIN.name}
        if self._has_draft:
            usable |= {strategy.name for strategy in self._list_suitable_strategies()}
        return tuple(name for name in self._config.allowed_strategies if name in usable)

    def _list_suitable_strategies(self) -> list[StrategyEntry]:
        """List the strategies that work with this kind of target."""
        wrong = "server" if self.is_local else "local"
        return [strategy for strategy in get_strategies_by_name().values() if strategy.target != wrong]


class _ClientDecoders:
    """One client's decoders, which share what the client's draft remembers."""

    def __init__(self, decoder: SpeculativeDecoder, client: ApiClient) -> None:
        self._decoder = decoder
        self._client = client
        self._by_strategy: dict[str, SpeculativeDecoder] = {}

    def get_by_strategy(self, strategy: str) -> SpeculativeDecoder:
        if strategy not in self._by_strategy:
            config: SpeculativeConfig = replace(self._decoder.config, strategy=strategy, budget=self._client.budget)
            self._by_strategy[strategy] = self._decoder.with_config(config)
        return self._by_strategy[strategy]


class ServedModels:
    """All models of a config. Targets and drafts with equal provider strings are opened once."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._targets: dict[str, LlmProvider] = {}
        self._drafts: dict[str, DraftProvider] = {}
        self._models: dict[str, ServedModel] = {}

    def open_providers(self, clients: Sequence[ApiClient]) -> None:
        """Open the providers, and check the budgets of all clients.

        Raises ConfigError, which names the model.
        """
        for name, model in self._config.models.items():
            try:
                target = self._open_target_once(model.target)
                draft = None if model.draft is None else self._open_draft_once(model.draft)
                self._models[name] = ServedModel(name, model, target, draft)
                self._stack.push_async_callback(self._models[name].decoder.aclose)
                self._models[name].import_strategies()
                for client in clients:
                    if client.can_use_model(name):
                        self._models[name].get_decoder(client, None)
            except (ConfigError, ModelLoadError) as error:
                raise ConfigError(f"models.{name}: {error}") from error

    def find_for_client(self, name: str, client: ApiClient) -> ServedModel:
        """Return the model of that name, or the default model.

        Raises HttpProblem if there is none, or if the client may not use it.
        """
        served_name = name if name in self._models else self._config.default_model
        if served_name is None or not client.can_use_model(served_name):
            message = f"the model {name[:200]!r} does not exist here, or this key may not use it"
            raise HttpProblem(404, message, code="model_not_found", param="model")
        return self._models[served_name]

    def list_for_client(self, client: ApiClient) -> list[ServedModel]:
        """List the models that a client may use."""
        return [model for name, model in self._models.items() if client.can_use_model(name)]

    @property
    def targets_by_spec(self) -> Mapping[str, LlmProvider]:
        """The open targets by provider string."""
        return self._targets

    @property
    def drafts_by_spec(self) -> Mapping[str, DraftProvider]:
        """The open drafts by provider string."""
        return self._drafts

    @property
    def all_models(self) -> list[ServedModel]:
        return list(self._models.values())

    @property
    def secret_texts(self) -> tuple[str, ...]:
        """The addresses of upstream servers and the paths of files, which no client may see."""
        texts = [text for model in self._config.models.values() for text in (model.target, model.draft) if text]
        parts = [part for text in texts for part in list_model_specs_of_draft(text)]
        written = [part.removeprefix(strip_address(part)).removeprefix("@") for part in parts]
        configured = [*written, *(p.base_url for p in self._config.providers.values() if p.base_url)]
        addresses = [parse_server_address(address) for address in configured if address]
        urls = [urlsplit(address.url) for address in addresses]
        hosts = {url.netloc for url in urls} | {url.hostname or "" for url in urls if "." in (url.hostname or "")}
        found = {address.url for address in addresses} | hosts | set(map(get_model_folder, texts))
        return tuple(sorted(found - {""}, key=len, reverse=True))

    async def aclose(self) -> None:
        """Close what was opened."""
        await self._stack.aclose()

    def _open_target_once(self, text: str) -> LlmProvider:
        if text not in self._targets:
            self._targets[text] = open_provider(text, self._named_providers)
            self._stack.push_async_callback(self._targets[text].aclose)
        return self._targets[text]

    def _open_draft_once(self, text: str) -> DraftProvider:
        """Open a draft; it shares the weights of an open target with the same provider string."""
        if text not in self._drafts:
            if text in self._targets:
                self._drafts[text] = ProviderDraft(self._targets[text])
            else:
                self._drafts[text] = open_draft(text, self._named_providers)
                self._stack.push_async_callback(self._drafts[text].aclose)
        return self._drafts[text]

    @property
    def _named_providers(self) -> Mapping[str, NamedProvider]:
        return self._config.providers
