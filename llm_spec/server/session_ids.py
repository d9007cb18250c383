"""Conversation ids for the session-affinity header, the same in all workers. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from llm_spec.decoder.session import derive_session_id, hash_texts
from llm_spec.server.apis.fields import ParsedRequest
from llm_spec.server.clients import ApiClient

__all__ = ["add_session_id"]


def add_session_id(parsed: ParsedRequest, given_id: str | None, client: ApiClient, key: bytes) -> ParsedRequest:
    """Add a conversation's id to a request: the client's own, or one derived from its beginning.

    Without keys, the client's own id is used as it is. With keys, it is hashed together with the
    client's name, so that ids of different clients differ. Raises InvalidRequestError if the
    client's own id cannot be used as it is.
    """
    if given_id and not client.name:
        return _set_session_id(parsed, given_id)
    client_key = hashlib.blake2b(client.name.encode(), key=key).digest()
    if given_id:
        return _set_session_id(parsed, hash_texts([given_id], client_key))
    return _set_session_id(parsed, derive_session_id(parsed.request, client_key))


def _set_session_id(parsed: ParsedRequest, session_id: str) -> ParsedRequest:
    return replace(parsed, request=replace(parsed.request, session_id=session_id))
