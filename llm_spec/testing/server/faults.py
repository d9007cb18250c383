"""What a server does wrong, on purpose."""

from __future__ import annotations

from dataclasses import dataclass

from llm_spec.contract.checks import check_number

__all__ = ["ServerFaults"]


@dataclass(frozen=True, kw_only=True)
class ServerFaults:
    """What goes wrong with the first `num_requests` that ask for text (None: with all).

    `status` is answered instead of text, with `retry_after_s` if there is one. After that many frames of a stream the
    connection is dropped, falls silent, or carries a frame that is not valid JSON. Requests to `missing` paths
    ("/tokenize") get a 404, whatever their number.
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
