"""The share of recorded requests that are answered with speculation: by a model in this process, or at a server.

    python tools/speculating_share.py BODIES.jsonl --model FOLDER
    python tools/speculating_share.py BODIES.jsonl --server

Each line of the file is `{"source": …, "path": "/v1/chat/completions", "body": {…}}`: who sent which body to where. The
path `adapter` stands for the options of a `ChatRequest`. Every one is sent to a server of that model with the draft
`lookup` (an adapter's to a decoder of the same), cut after a few tokens. A request counts that is answered, and by the
strategy `tokens`. FOLDER is a model of the provider `onnx` whose chat template shows tools.

With `--server` nothing is sent: a request counts that may speculate at a server that takes token ids, at one that has a
message parser besides, and at one whose answers reason: there answers in a form may speculate, as far as they reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

import aiohttp

from llm_spec import ChatRequest, LlmSpecError, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.tools import find_constrained_part
from llm_spec.server import ModelConfig, Server, ServerConfig
from llm_spec.server.apis import APIS
from llm_spec.server.problems import HttpProblem
from llm_spec.strategies.base import find_multi_call_refusal

_MAX_TOKENS: Final = 4
_MEDIA_TYPES: Final = frozenset(
    {"audio", "document", "file", "image", "image_url", "input_audio", "input_file", "input_image", "video_url"}
)
_CLIENT_TOOLS: Final = (None, "function", "custom")
_HOSTED_FIELDS: Final = ("audio", "mcp_servers", "web_search_options")
_SERVERS: Final = {
    "token ids alone": {"has_parser": False},
    "with a message parser": {"has_parser": True},
    "with one, and answers that reason": {"reasons": True},
}
Json: TypeAlias = Mapping[str, Any]


class Outcome(NamedTuple):
    """What became of a request; `reason`: why it was refused, or answered plainly."""

    speculates: bool
    reason: str = ""


def needs_more_than_text(body: Json) -> bool:
    """Whether a request is about images, audio or files, or wants tools that a vendor runs."""
    tools: Sequence[Any] = body.get("tools") or ()
    has_hosted = any(isinstance(tool, dict) and cast("Json", tool).get("type") not in _CLIENT_TOOLS for tool in tools)
    is_other_form = "audio" in (body.get("modalities") or ()) or any(body.get(name) for name in _HOSTED_FIELDS)
    messages: Sequence[Any] = [body.get("messages"), body.get("input")]
    return has_hosted or is_other_form or any(kind in _MEDIA_TYPES for kind in _list_types(messages))


def _list_types(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        fields = cast("Json", value)
        yield str(fields.get("type"))
        value = list(fields.values())
    if isinstance(value, list):
        for part in cast("list[Any]", value):
            yield from _list_types(part)


async def send_all(lines: Sequence[Json], folder: Path) -> list[Outcome]:
    """What becomes of each request, one after another."""
    config = SpeculativeConfig(max_total_tokens=_MAX_TOKENS)
    target = f"onnx:{folder}"
    model = ModelConfig(target=target, draft="lookup", speculative=config)
    async with (
        Server(ServerConfig(models={"m": model}, default_model="m", port=0)) as server,
        SpeculativeDecoder(target=target, draft="lookup", config=config) as decoder,
        aiohttp.ClientSession() as session,
    ):
        outcomes: list[Outcome] = []
        for line in lines:
            is_adapter = line["path"] == "adapter"
            outcomes.append(await (_ask(decoder, line) if is_adapter else _post(session, server.url, line)))
        return outcomes


def _read_options(line: Json) -> dict[str, Any]:
    options = dict(line["body"])
    if "logit_bias" in options:  # JSON has no keys but texts
        options["logit_bias"] = {int(token_id): bias for token_id, bias in options["logit_bias"].items()}
    return options


async def _ask(decoder: SpeculativeDecoder, line: Json) -> Outcome:
    options = _read_options(line)
    try:
        result = await decoder.decode(ChatRequest.create(options.pop("messages"), **options))
    except LlmSpecError as error:
        return Outcome(speculates=False, reason=str(error))
    return Outcome(result.strategy == "tokens", result.plain_reason or "")


async def _post(session: aiohttp.ClientSession, url: str, line: Json) -> Outcome:
    async with session.post(f"{url}{line['path']}", json=line["body"]) as response:
        data = await response.read()
        strategy = response.headers.get("x-llm-spec-strategy")
        return Outcome(
            response.ok and strategy == "tokens", "" if response.ok else json.loads(data)["error"]["message"]
        )


def judge_at_server(line: Json, *, has_parser: bool = False, reasons: bool = False) -> Outcome:
    """Whether a request may speculate at a server that takes token ids; one that `reasons` has a parser."""
    has_parser = has_parser or reasons
    try:
        requests = _parse_as_for_server(line)
    except (HttpProblem, LlmSpecError) as error:
        return Outcome(speculates=False, reason=str(error))
    refusals = [_find_refusal(request, has_parser=has_parser, reasons=reasons) for request in requests]
    reason = next(filter(None, refusals), None)
    return Outcome(speculates=reason is None, reason=reason or "")


def _find_refusal(request: ChatRequest, *, has_parser: bool, reasons: bool) -> str | None:
    if has_parser and request.stop and (request.tools or reasons):
        return "stop, and more than text"
    if has_parser and not reasons and find_constrained_part(request) == "answer":
        return "all of the answer is constrained"
    return find_multi_call_refusal(request, writes_raw_text=has_parser, keeps_constraints=has_parser)


def _parse_as_for_server(line: Json) -> list[ChatRequest]:
    if line["path"] == "adapter":
        options = _read_options(line)
        return [ChatRequest.create(options.pop("messages"), **options)]
    return [parsed.request for parsed in APIS[line["path"]].parse(dict(line["body"]), "chat")]


def describe(name: str, outcomes: Sequence[Outcome]) -> str:
    """One line of figures."""
    num_speculating = sum(outcome.speculates for outcome in outcomes)
    share = f"{num_speculating / len(outcomes):.1%}" if outcomes else "none"
    return f"{name}: {num_speculating} of {len(outcomes)} ({share})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bodies", type=Path)
    parser.add_argument("--model", type=Path, help="a folder of the provider onnx")
    parser.add_argument("--server", action="store_true", help="what may speculate at a server")
    arguments = parser.parse_args()
    if (arguments.model is None) != arguments.server:
        parser.error("give either --model or --server")
    lines = [json.loads(line) for line in arguments.bodies.read_text(encoding="utf-8").splitlines()]
    if arguments.server:
        for name, server in _SERVERS.items():
            print(f"-- {name}")
            print_shares(lines, [judge_at_server(line, **server) for line in lines])
    else:
        print_shares(lines, asyncio.run(send_all(lines, arguments.model)))


def print_shares(lines: Sequence[Json], outcomes: Sequence[Outcome]) -> None:
    pairs = list(zip(lines, outcomes, strict=True))
    print(describe("all", outcomes))
    print(
        describe("text and the client's own tools", [o for line, o in pairs if not needs_more_than_text(line["body"])])
    )
    for source in sorted({line["source"] for line in lines}):
        print(describe(f"  {source}", [o for line, o in pairs if line["source"] == source]))
    reasons = Counter(outcome.reason[:100] for outcome in outcomes if not outcome.speculates)
    for reason, count in reasons.most_common(25):
        print(f"  {count:4} {reason}")


if __name__ == "__main__":
    main()
