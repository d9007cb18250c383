"""Records the race that the server's page plays when it is opened: its first example, with the draft and without.

    pip install '.[onnx]' && python tools/record_race.py        # writes llm_spec/server/page/recording.json

Of many races, in which either side is first by turns, the one of the median speedup is kept. Events are lists, times in
milliseconds: `[t, text, origin]`, and with the draft also rounds, as
`[t, index, drafted, accepted, emitted, drafting, verifying]`.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final

from llm_spec import Round, SpeculativeDecoder, SpeculativeFinish, TextDelta

RECORDING: Final = Path(__file__).parents[1] / "llm_spec" / "server" / "page" / "recording.json"
_ORIGINS: Final = ("accepted", "correction", "bonus", "plain")  # as the page has them
_PROMPT: Final = "def getregentry():"
_PAIR: Final = {"draft": "lookup+builtin:draft", "target": "builtin:target"}
_NUM_RACES: Final = 61  # odd: the median is one of them
_FIGURES: Final = (
    *("strategy", "guarantee", "same_text", "seed", "draft_tokens", "accepted_tokens", "acceptance_rate"),
    *("speedup", "speedup_basis", "plain_reason", "plain_text"),
)


async def _record(decoder: SpeculativeDecoder, *, rounds: bool) -> dict[str, Any]:
    events: list[list[Any]] = []
    lane: dict[str, Any] = {"events": events}
    began = time.perf_counter()
    async with decoder.stream(_PROMPT, rounds=rounds, max_tokens=160) as stream:
        async for event in stream:
            t_ms = _to_ms(time.perf_counter() - began)
            if isinstance(event, TextDelta):
                events.append([t_ms, event.text, _ORIGINS.index(event.origin)])
            elif isinstance(event, Round):
                counts = (event.num_draft_tokens, event.num_accepted_tokens, event.num_emitted_tokens)
                events.append([t_ms, event.index, *counts, _to_ms(event.draft_s), _to_ms(event.verify_s)])
            elif isinstance(event, SpeculativeFinish) and event.result is not None:
                result_fields = event.result.to_dict()
                lane["finish_reason"] = result_fields["finish_reason"]
                lane["usage"] = {"completion_tokens": result_fields["usage"]["target"]["output_tokens"]}
                lane["result"] = _select_figures(result_fields)
    return lane


def _to_ms(time_s: float) -> float:
    return round(time_s * 1000, 2)


def _select_figures(result_fields: dict[str, Any]) -> dict[str, Any]:
    """Of a result what the page shows."""
    timings = {name: round(result_fields["timings"][name], 5) for name in ("total_s", "first_text_s")}
    metrics = {name: result_fields["metrics"][name] for name in ("num_rounds", "mean_acceptance_length")}
    figures = {
        name: round(result_fields[name], 4) if isinstance(result_fields[name], float) else result_fields[name]
        for name in _FIGURES
    }
    return {**figures, "metrics": metrics, "timings": timings}


def _get_total_s(lane: dict[str, Any]) -> float:
    return float(lane["result"]["timings"]["total_s"])


def _get_speedup(race: tuple[dict[str, Any], dict[str, Any]]) -> float:
    with_draft, alone = map(_get_total_s, race)
    return alone / with_draft


async def main() -> None:
    async with (
        SpeculativeDecoder(target=_PAIR["target"], draft=_PAIR["draft"]) as decoder,
        SpeculativeDecoder(target=_PAIR["target"], draft=None) as plain,
    ):
        races: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for number in range(_NUM_RACES):
            alone = await _record(plain, rounds=False) if number % 2 else None
            with_draft = await _record(decoder, rounds=True)
            races.append((with_draft, alone or await _record(plain, rounds=False)))
    races.sort(key=_get_speedup)
    lanes = races[_NUM_RACES // 2]
    quartiles = [round(_get_speedup(races[_NUM_RACES * part // 4]), 2) for part in (1, 3)]
    recording = {"prompt": _PROMPT, **_PAIR, "num_races": _NUM_RACES, "quartiles": quartiles, "lanes": lanes}
    text = json.dumps(recording, separators=(",", ":")).replace("<", "\\u003c")  # no end of the element within it
    RECORDING.write_text(f"{text}\n")
    print(f"{' and alone '.join(f'{_get_total_s(lane) * 1000:.0f} ms' for lane in lanes)}; {len(text) / 1000:.1f} kB")


if __name__ == "__main__":
    asyncio.run(main())
