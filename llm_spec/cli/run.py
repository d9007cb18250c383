"""`llm-spec run`: answer a prompt, show how, and compare with the target alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llm_spec.cli.screen import AnswerScreen, Spinner
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import ConfigError, InvalidRequestError, TargetError, TransientError
from llm_spec.contract.events import TextDelta
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.entry_points import open_draft, open_provider, strip_address, strip_credentials
from llm_spec.decoder.pricing import parse_price
from llm_spec.decoder.result import SpeculativeFinish, SpeculativeResult
from llm_spec.kit.model_folder.hub import show_fetches_on
from llm_spec.local.lookahead import CostAware, Fixed, LookaheadPolicy
from llm_spec.strategies.registry import AUTO, PLAIN

__all__ = ["run_prompt_command"]


def run_prompt_command(arguments: argparse.Namespace) -> int:
    """Answer, and report; the models are loaded before there is an event loop, which a long load would hold."""
    request, config = _build_prompt_request(arguments), _build_config(arguments)
    draft_name = None if config.strategy == PLAIN.name else arguments.draft
    names = strip_credentials(" and ".join(filter(None, (arguments.target, draft_name))))
    with Spinner(f"loading {names}", sys.stderr) as spinner, show_fetches_on(spinner):
        target = open_provider(arguments.target)
        draft = None if draft_name is None else open_draft(draft_name)
    result, same_text = asyncio.run(_answer_and_compare_with_plain(request, config, target, draft, arguments))
    _print_answer_figures(result, same_text, max_tokens=arguments.max_tokens, as_json=arguments.json)
    return 0


def _build_prompt_request(arguments: argparse.Namespace) -> ChatRequest:
    messages = [{"role": "user", "content": _read_prompt_with_files(arguments.prompt, arguments.file)}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return ChatRequest.create(
        messages,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        prediction=None if arguments.prediction is None else _read_text_file(arguments.prediction, "prediction"),
    )


def _read_prompt_with_files(prompt: str | None, files: list[str]) -> str:
    first = sys.stdin.read() if prompt == "-" else prompt or ""
    text = "\n\n".join(part for part in (first, *(_read_text_file(path, "file") for path in files)) if part)
    if not text.strip():
        raise InvalidRequestError("the prompt is empty; give the user's message, or - and a message on standard input")
    return text


def _read_text_file(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"the {what} {path} cannot be read: {error}") from error


def _build_config(arguments: argparse.Namespace) -> SpeculativeConfig:
    given = {arguments.target: arguments.target_price, arguments.draft: arguments.draft_price}
    return SpeculativeConfig(
        strategy=PLAIN.name if arguments.no_speculation else arguments.strategy,
        lookahead=_parse_lookahead_policy(arguments.lookahead),
        prices={strip_address(name): parse_price(price) for name, price in given.items() if price is not None},
        max_request_cost=arguments.max_cost,
    )


def _parse_lookahead_policy(argument: str) -> LookaheadPolicy:
    if argument == "adaptive":
        return CostAware()
    try:
        return Fixed(int(argument))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"lookahead is {argument!r}; it must be 'adaptive' or an integer from 1 to 32") from error


async def _answer_and_compare_with_plain(
    request: ChatRequest,
    config: SpeculativeConfig,
    target: LlmProvider,
    draft: DraftProvider | None,
    arguments: argparse.Namespace,
) -> tuple[SpeculativeResult, bool | None]:
    """The result and, compared with the target alone, whether its text is the same."""
    try:
        screen = AnswerScreen(sys.stdout, silent=arguments.json)
        decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
        if config.strategy != AUTO:  # it does not need to know for a first answer
            with suppress(TransientError):  # the answer will say so
                await decoder.discover()
        result = await _print_answer_as_it_comes(decoder, target.name, request, screen)
        if not arguments.compare:
            return result, None
        request = replace(request, sampling=replace(request.sampling, seed=result.seed))
        with Spinner(f"running {target.name} alone, to compare", sys.stderr):
            plain = await SpeculativeDecoder(target=target, draft=None).decode(request)
        plain_s = plain.timings.total_s
        basis = "by the clock, one run of each"
        result = replace(result, plain_s=plain_s, plain_range_s=(plain_s, plain_s), speedup_basis=basis)
        return result, plain.content == result.content
    finally:
        await target.aclose()
        if draft is not None:
            await draft.aclose()


async def _print_answer_as_it_comes(
    decoder: SpeculativeDecoder, target: str, request: ChatRequest, screen: AnswerScreen
) -> SpeculativeResult:
    screen.print_colour_legend()
    with Spinner(f"waiting for the first words of {target}", sys.stderr) as spinner:
        async with decoder.stream(request) as events:
            async for event in events:
                match event:
                    case TextDelta():
                        spinner.stop()
                        screen.print_answer_delta(event)
                    case SpeculativeFinish(result=SpeculativeResult() as result):
                        spinner.stop()
                        screen.end_line()
                        return result
                    case _:
                        pass
    raise TargetError(f"{decoder.name} ended without a result")


def _print_answer_figures(result: SpeculativeResult, same_text: bool | None, *, max_tokens: int, as_json: bool) -> None:
    """The figures: on a terminal below the answer; of a comparison on standard error where a pipe gets the answer."""
    for reason in result.fallbacks:
        print(f"llm-spec: the draft failed and the target continued alone: {reason}", file=sys.stderr)
    if as_json:
        extra = {} if same_text is None else {"same_text_as_plain": same_text}
        print(json.dumps(result.to_dict() | extra))
        return
    if not sys.stdout.isatty() and same_text is None:
        return
    out = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(f"\n{result.summary()}", file=out)
    if result.stopped_by == "max_tokens":
        print(f"the answer was cut off, because --max-tokens is {max_tokens}", file=out)
    if same_text is not None:
        texts = "the same text" if same_text else "a different text"
        print(f"the target alone: {result.plain_s:.3f} s, {texts}", file=out)
