"""`llm-spec run`: answer a prompt, show how it was done, and compare with the target alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llm_spec.cli.answer_figures import ComparedAnswer, describe_time
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
from llm_spec.measure.clock import now
from llm_spec.strategies.registry import AUTO, PLAIN

__all__ = ["answer_beside_plain", "run_prompt_command"]


def run_prompt_command(arguments: argparse.Namespace) -> int:
    """Answer a prompt and print the figures.

    The models are loaded before an event loop runs, because a long load would block it.
    """
    request, config = _build_prompt_request(arguments), _build_config(arguments)
    draft_name = None if config.strategy == PLAIN.name else arguments.draft
    names = strip_credentials(" and ".join(filter(None, (arguments.target, draft_name))))
    with Spinner(f"loading {names}", sys.stderr) as spinner, show_fetches_on(spinner):
        target = open_provider(arguments.target)
        draft = None if draft_name is None else open_draft(draft_name)
    answer = asyncio.run(_answer_and_close(request, config, target, draft, arguments))
    for reason in answer.result.fallbacks:
        _say(f"the draft failed and the target continued alone: {reason}")
    if arguments.json:
        print(json.dumps(answer.to_dict()))
    elif _has_figures(arguments):
        print(f"\n{answer.describe()}", file=sys.stdout if sys.stdout.isatty() else sys.stderr)
    return 0


def _has_figures(arguments: argparse.Namespace) -> bool:
    """Return True if figures are shown; a pipe gets the answer alone."""
    return bool(arguments.json or arguments.compare or sys.stdout.isatty())


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


async def _answer_and_close(
    request: ChatRequest,
    config: SpeculativeConfig,
    target: LlmProvider,
    draft: DraftProvider | None,
    arguments: argparse.Namespace,
) -> ComparedAnswer:
    try:
        decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
        if arguments.compare and not decoder.is_target_local and request.sampling.temperature is None:
            # greedy answers can be compared as texts
            request = replace(request, sampling=replace(request.sampling, temperature=0.0))
        screen = AnswerScreen(sys.stdout, silent=arguments.json)
        return await answer_beside_plain(
            decoder, request, screen, compares=arguments.compare, has_figures=_has_figures(arguments)
        )
    finally:
        await target.aclose()
        if draft is not None:
            await draft.aclose()


async def answer_beside_plain(
    decoder: SpeculativeDecoder, request: ChatRequest, screen: AnswerScreen, *, compares: bool, has_figures: bool
) -> ComparedAnswer:
    """Return the answer, and the target's answer alone if the two are to be compared.

    If figures are shown, a server is discovered and timed alone first, because a decoder does not
    speculate before that. A model in this process is timed while it answers, so there the target
    alone comes last.
    """
    plain, strategy = None, decoder.config.strategy
    if not decoder.is_target_local and strategy != PLAIN.name:
        if has_figures:
            await _discover_and_say_so(decoder)
            plain = await _time_target_alone_and_say_so(decoder, request)
        elif strategy != AUTO:
            with suppress(TransientError):  # the answer reports it
                await decoder.discover()
    result = await _print_answer_as_it_comes(decoder, request, screen)
    if compares and plain is None:
        alone = replace(request, prediction=None, sampling=replace(request.sampling, seed=result.seed))
        with Spinner(f"running {decoder.target.name} alone, to compare", sys.stderr):
            plain = await SpeculativeDecoder(target=decoder.target, draft=None).decode(alone)
    return ComparedAnswer(result=result, plain=plain if compares else None)


async def _discover_and_say_so(decoder: SpeculativeDecoder) -> None:
    name, began_s = decoder.target.name, now()
    try:
        with Spinner(f"finding out what {name} can do", sys.stderr):
            await decoder.discover()
    except TransientError:
        return  # the answer reports it
    _say(f"found out what {name} can do ({now() - began_s:.2f} s)")


async def _time_target_alone_and_say_so(decoder: SpeculativeDecoder, request: ChatRequest) -> SpeculativeResult:
    """Time the target alone, which also tells the decoder its speed.

    A request before it makes the server read the prompt.
    """
    name, alone = decoder.target.name, replace(request, prediction=None)
    with Spinner(f"timing {name} alone", sys.stderr):
        with suppress(InvalidRequestError):  # some servers refuse an answer of one token
            await SpeculativeDecoder(target=decoder.target, draft=None).decode(replace(alone, max_tokens=1))
        plain = await decoder.with_config(replace(decoder.config, strategy=PLAIN.name)).decode(alone)
    _say(f"timed {name} alone, with the prompt read before: {describe_time(plain)}")
    return plain


def _say(line: str) -> None:
    print(f"llm-spec: {line}", file=sys.stderr)


async def _print_answer_as_it_comes(
    decoder: SpeculativeDecoder, request: ChatRequest, screen: AnswerScreen
) -> SpeculativeResult:
    screen.print_colour_legend()
    with Spinner(f"waiting for the first words of {decoder.target.name}", sys.stderr) as spinner:
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
