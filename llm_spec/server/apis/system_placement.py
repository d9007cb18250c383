"""Places system and developer texts for a target that speaks another API. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llm_spec.contract.messages import ApiName
from llm_spec.contract.system_texts import join_neighbouring_user_messages, place_later_system_texts, place_system_texts
from llm_spec.server.apis.fields import ParsedRequest

__all__ = ["build_changes_header", "place_system_texts_of_request"]

_CHANGE = "system-texts"


def place_system_texts_of_request(parsed: ParsedRequest, target_api: ApiName | None) -> ParsedRequest:
    """Place a request's system texts for a target of another API.

    `target_api`: the target's API, or None for a model in this process.

    The chat template of such a model decides about later system texts. A server's template is not
    known here: later ones become texts of the user, and neighbouring messages of the user are
    joined, because some templates need that. For Anthropic's API, later ones become texts of the
    user too.
    """
    request = parsed.request
    if request.raw:
        return parsed
    if target_api == "messages":
        messages = place_later_system_texts(request.messages, role="user")
    else:
        messages = place_system_texts(request.messages, later_role="system" if target_api is None else "user")
    is_changed = messages is not request.messages
    if target_api == "chat":
        messages = join_neighbouring_user_messages(messages)
    changes = (*parsed.changes, _CHANGE) if is_changed else parsed.changes
    return replace(parsed, request=replace(request, messages=messages), changes=changes)


def build_changes_header(parsed_requests: Sequence[ParsedRequest]) -> Mapping[str, str]:
    """Build the header that tells a client what its target was told in another way."""
    changes = sorted({change for parsed in parsed_requests for change in parsed.changes})
    return {"x-llm-spec-changed": ", ".join(changes)} if changes else {}
