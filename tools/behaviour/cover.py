"""What happened in a recorded case, request by request: so that a recording's coverage can be counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["things_of"]


def things_of(case: dict[str, Any]) -> Iterator[str]:
    """What each request of a case has had."""
    faults = sum(num for _, num in case.get("target", {}).get("faults", ())) or case.get("faults", 0)
    for request in case["requests"]:
        yield "requests"
        yield from _things_of_request(request)
    if faults:
        yield "cases with faults"


def _things_of_request(request: dict[str, Any]) -> Iterator[str]:
    kinds = [event[1] for event in request["events"]]
    yield from (kind for kind in ("fallback", "retry", "weakened", "target stream") if kind in kinds)
    if request["error"] is not None:
        yield "errors"
    if request.get("has left") or request.get("was cancelled"):
        yield "left or cancelled"
    result = request["result"]
    if kinds and kinds[-1] == "finish with result":
        result = request["events"][-1][2][4]
    if result is not None:
        yield "answers"
        yield from _things_of_result(result)


def _things_of_result(result: dict[str, Any]) -> Iterator[str]:
    drafted, accepted = result["stats"]["drafted"], result["stats"]["accepted"]
    happened = {"drafted": drafted, "accepted": accepted, "rejected": accepted < drafted}
    yield from (thing for thing, has in happened.items() if has)
    if result["stopped by"] is not None:
        yield f"by {result['stopped by']}"
