"""Deliberate faults of the server."""

from __future__ import annotations

from dataclasses import dataclass

from llm_spec.contract.checks import check_number

__all__ = ["ServerFaults"]


@dataclass(frozen=True, kw_only=True)
class ServerFaults:
    """The faults of the first `num_requests` requests for text (of all, if None).

    `status` is sent in place of text, with `retry_after_s` if it is set. After so many frames of a
    stream the connection is dropped (`drop_after`), falls silent (`stall_after`), or carries a
    frame that is not valid JSON (`malformed_after`). All requests to `missing` paths ("/tokenize")
    get a 404.
    """

    num_requests: int | None = None
    status: int | None = None
    retry_after_s: float | None = None
    drop_after: int | None = None
    stall_after: int | None = None
    malformed_after: int | None = None
    missing: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_number(ValueError, "num_requests", self.num_requests, 0, integer=True)
        check_number(ValueError, "status", self.status, 400, 599, integer=True)
        check_number(ValueError, "retry_after_s", self.retry_after_s, 0)
        for name in ("drop_after", "stall_after", "malformed_after"):
            check_number(ValueError, name, getattr(self, name), 0, integer=True)
