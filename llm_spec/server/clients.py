"""Clients by API key: what each may do, and what it has used in all workers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from llm_spec.decoder.budget import Budget
from llm_spec.server.apis.fields import Json
from llm_spec.server.config import KeyConfig
from llm_spec.server.problems import HttpProblem
from llm_spec.server.usage_ledger import OPEN_COLUMN, UsageLedger

__all__ = ["ApiClient", "ClientRegistry"]


class _SharedBudget(Budget):
    """A client's budget, spent by all workers."""

    def __init__(self, config: KeyConfig, ledger: UsageLedger, worker: int, client: int) -> None:
        super().__init__(max_tokens=config.max_tokens, max_cost=config.max_cost)
        self._ledger = ledger
        self._worker = worker
        self._client = client

    def _get_counter_total(self, column: int) -> float:
        return self._ledger.sum_over_workers(self._client, column)

    def _add_to_counter(self, column: int, value: float) -> None:
        self._ledger.add_usage(self._worker, self._client, column, value)


class ApiClient:
    """One client in one worker. A client without a config is anonymous and may do everything."""

    def __init__(self, name: str, config: KeyConfig | None, ledger: UsageLedger, worker: int, index: int) -> None:
        self.name = name
        self._config = config
        self._ledger = ledger
        self._worker = worker
        self._index = index
        self._max_concurrent = None if config is None else config.max_concurrent
        budget = None if config is None else _SharedBudget(config, ledger, worker, index)
        self.budget = budget if budget is not None and budget.is_bounded else None

    def can_use_model(self, model: str) -> bool:
        """Return True if the client may use this model."""
        return self._config is None or self._config.models is None or model in self._config.models

    def describe_budget(self) -> Json:
        """What its key has left, as tokens and as money; None for what is not limited."""
        if self.budget is None or self._config is None:
            return {"tokens": None, "cost": None}
        spent, reserved = self.budget.spent_tokens, self.budget.reserved_tokens
        tokens = _describe_limit(self._config.max_tokens, spent, reserved)
        cost = _describe_limit(self._config.max_cost, self.budget.spent_cost, self.budget.reserved_cost)
        return {"tokens": tokens, "cost": cost}

    def begin_client_request(self) -> None:
        """Count a request until `end_request`; raises HttpProblem if there are too many at once."""
        max_concurrent = self._max_concurrent
        if max_concurrent is None:
            return
        # Count before comparing: two workers that admit at once would overlook each other's request
        self._ledger.add_usage(self._worker, self._index, OPEN_COLUMN, 1)
        if self._ledger.sum_over_workers(self._index, OPEN_COLUMN) > max_concurrent:
            self._ledger.add_usage(self._worker, self._index, OPEN_COLUMN, -1)
            raise HttpProblem(
                429, f"this key may have {max_concurrent} requests at once", code="too_many_requests", retry_after_s=1.0
            )

    def end_request(self) -> None:
        """Stop counting a request."""
        if self._max_concurrent is not None:
            self._ledger.add_usage(self._worker, self._index, OPEN_COLUMN, -1)


class ClientRegistry:
    """Finds the client of a request by its API key."""

    def __init__(self, keys: Mapping[str, KeyConfig], ledger: UsageLedger, worker: int) -> None:
        self._anonymous = ApiClient("", None, ledger, worker, 0)
        self._clients_by_hash = [
            (_hash_api_key(config.key), ApiClient(name, config, ledger, worker, index))
            for index, (name, config) in enumerate(keys.items())
        ]

    @property
    def all_clients(self) -> Sequence[ApiClient]:
        """All clients, or the anonymous one if there are no keys."""
        return [client for _, client in self._clients_by_hash] or [self._anonymous]

    def authenticate(self, headers: Mapping[str, str]) -> ApiClient:
        """Return the client whose key is in `Authorization: Bearer` or `x-api-key`.

        If both are sent, one valid key is enough: clients of Anthropic's API may send another login
        as well. Each key is compared with all keys in constant time. Raises HttpProblem if no key
        is valid.
        """
        if not self._clients_by_hash:
            return self._anonymous
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        given_keys = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        digests = [_hash_api_key(api_key) for api_key in given_keys if api_key]
        if not digests:
            raise HttpProblem(
                401, "the API key is missing; send it as Authorization: Bearer or x-api-key", code="missing_api_key"
            )
        found = [
            client
            for digest in digests
            for key_hash, client in self._clients_by_hash
            if hmac.compare_digest(key_hash, digest)
        ]
        if not found:
            raise HttpProblem(401, "the API key is not known to this server", code="invalid_api_key")
        return found[0]


def _describe_limit(limit: float | None, spent: float, reserved: float) -> Json | None:
    """`reserved`: by requests that are being answered."""
    if limit is None:
        return None
    return {"limit": limit, "spent": spent, "reserved": reserved, "left": max(0, limit - spent - reserved)}


def _hash_api_key(key: str) -> bytes:
    """Hash a key. All hashes are equally long, so comparing them reveals nothing of the keys."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
