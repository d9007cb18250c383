"""The page of `llm-spec serve`, in a real browser: what the user sees, and what the page must never do.

The first part is of the server itself, too; the others need answers that go wrong.
"""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any, Final

import pytest

pytest.importorskip("playwright")

from playwright.async_api import Browser, Page, expect

from .browser import Seen
from .page_steps import first_line, number_in, open_page, reply, run, text_of
from .scripted_server import HOSTILE_TEXT, RACE_STREAMS, RECORDING, ScriptedServer, parts_of

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all of them

PAINTED_TEXT: Final = """() => {
  const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) =>
    0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const shown = node.checkVisibility() && !node.closest("script, title");
    if (!walker.currentNode.data.trim() || !shown) continue;
    const inSvg = node.closest("svg");
    const colour = parse(inSvg ? getComputedStyle(node).fill : getComputedStyle(node).color);
    const box = node.classList.contains("lane-label") ? getComputedStyle(node.previousElementSibling).fill : "none";
    const lights = [luminance(colour), luminance(box === "none" ? behind(node) : parse(box))].sort((a, b) => b - a);
    found.push({ text: walker.currentNode.data.slice(0, 40), contrast: (lights[0] + 0.05) / (lights[1] + 0.05) });
  }
  return found;
}"""


FILLS: Final = """(all) => {
  const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((value) => channel(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const card = luminance(getComputedStyle(document.getElementById("race")).backgroundColor);
  const patternOf = (fill) => {
    let pattern = document.querySelector(fill.match(/#[\\w-]+/)[0]);
    while (pattern.getAttribute("href")) pattern = document.querySelector(pattern.getAttribute("href"));
    return pattern;
  };
  return all.map((rect) => {
    const { fill } = getComputedStyle(rect);
    const pattern = fill.startsWith("url") ? patternOf(fill) : null;
    const colour = pattern ? getComputedStyle(pattern.querySelector("rect")).fill : fill;
    const lights = [luminance(colour), card].sort((a, b) => b - a);
    const contrast = (lights[0] + 0.05) / (lights[1] + 0.05);
    const path = pattern?.querySelector("path").getAttribute("d") ?? null;
    return { kind: rect.className.baseVal, colour, contrast, path };
  });
}"""
LOOKS: Final = """(all) => all.map((node) => {
  const style = getComputedStyle(node);
  const line = style.textDecorationLine === "none" ? "none" : style.textDecorationStyle;
  return [node.className, style.backgroundColor, line];
})"""
NO_TINT: Final = "rgba(0, 0, 0, 0)"


async def test_rounds_that_are_told_together_stand_side_by_side(page: Page, scripted: ScriptedServer) -> None:
    """A fast model's rounds arrive in groups; each still has the width of its own time."""
    await page.goto(scripted.url)
    bars = page.locator("#timeline g.round")
    await page.wait_for_function("document.querySelectorAll('#timeline g.round').length > 5")
    await page.get_by_role("button", name="Replay").wait_for()
    boxes = await bars.evaluate_all("nodes => nodes.map(node => node.getBoundingClientRect())")
    assert all(box["width"] >= 1 for box in boxes)
    assert all(left["right"] <= right["left"] + 1 for left, right in pairwise(boxes))


class TestAnyServer:
    """Holds for the recorded answers and for a real server with one pair."""

    async def test_answer_figures_and_rounds_agree(self, page: Page, page_server: str, seen: Seen) -> None:
        """As many bars as rounds, counts that add up to the tokens, no word on the console, no request elsewhere."""
        await run(page, page_server)
        assert await text_of(page)
        told = await page.locator("#tokens-a-round small").inner_text()
        assert await page.locator("#timeline g.round").count() == int(told.split()[0])
        counts = [int(await slot.inner_text()) for slot in await page.locator("#legend [data-origin]").all()]
        status = await page.get_by_role("status").inner_text()
        assert sum(counts) == int(re.findall(r"Done: (\d+) token", status)[0])
        assert re.fullmatch(r"\d+ %", await first_line(page, "acceptance"))
        assert await first_line(page, "guarantee") == "tokens"
        assert seen.console == []
        assert all(url.startswith((page_server, "data:")) for url in seen.urls), seen.urls

    async def test_each_origin_has_its_own_look(self, page: Page, page_server: str) -> None:
        """What was accepted is tinted, and each kind has its own line, in the legend as in the text."""
        await run(page, page_server)
        legend = {name: (tint, line) for name, tint, line in await page.locator("#legend b").evaluate_all(LOOKS)}
        assert list(legend) == ["accepted", "correction", "bonus", "plain"]
        none = (NO_TINT, "none")
        assert {name for name, (tint, _) in legend.items() if tint != NO_TINT} == {"accepted"}
        assert {name: line for name, (_, line) in legend.items() if line != "none"} == {
            "accepted": "solid",
            "correction": "wavy",
            "bonus": "double",
        }
        assert legend["plain"] == none
        in_text = {tuple(look) for look in await page.locator("#answer span").evaluate_all(LOOKS)}
        assert in_text <= {(name, *look) for name, look in legend.items()}
        assert len(in_text) >= 2

    async def test_the_race_is_run_unasked(self, page: Page, page_server: str) -> None:
        """The same request once more without the draft: its text, both times, and one large line of what that says."""
        await run(page, page_server)
        headline = page.locator("#headline")
        await expect(headline).to_have_text(re.compile(r"^([\d.]+x (sooner|later)|As soon) in one run, same text$"))
        assert await text_of(page, "of the target alone") == await text_of(page)
        for clock in await page.locator(".clock").all_inner_texts():
            assert re.fullmatch(r"[\d.]+ m?s", clock)
        assert "target alone" in await page.locator("#alone-lane h3").inner_text()
        large = await headline.evaluate("(node) => parseFloat(getComputedStyle(node).fontSize)")
        others = await page.locator("body *:not(#headline, #headline *)").evaluate_all(
            "(all) => Math.max(...all.map((node) => parseFloat(getComputedStyle(node).fontSize)))"
        )
        assert large >= 1.8 * others


async def test_every_token_is_shown_with_its_origin(page: Page, scripted: ScriptedServer) -> None:
    """The whole text, each part marked as it came about; figures as the result tells them."""
    await run(page, scripted.url)
    parts = parts_of(RECORDING["lanes"][0])
    texts = [part for part in parts if "text" in part]
    whole = "".join(part["text"] for part in texts)
    assert await text_of(page) == whole
    select = "getSelection().selectAllChildren(document.getElementById('answer'))"
    assert await page.evaluate(f"({select}, getSelection().toString())") == whole  # what is copied
    for origin in ("accepted", "correction", "bonus"):
        marked = "".join(await page.locator(f"#answer .{origin}").all_inner_texts())
        expected = "".join(part["text"] for part in texts if part["origin"] == origin)
        assert "".join(marked.split()) == "".join(expected.split())
    told = parts[-1]["result"]
    assert await number_in(page, "acceptance") == pytest.approx(100 * told["acceptance_rate"], abs=0.51)
    assert await number_in(page, "tokens-a-round") == pytest.approx(told["metrics"]["mean_acceptance_length"], abs=0.01)
    assert await number_in(page, "first-text") == pytest.approx(1000 * told["timings"]["first_text_s"], abs=0.51)


async def test_tokens_a_second_where_no_price_is_known(page: Page, scripted: ScriptedServer) -> None:
    """A pace for a model without a price, the cost for one that has it."""
    await run(page, scripted.url)
    lane = RECORDING["lanes"][0]
    pace = lane["usage"]["completion_tokens"] / lane["result"]["timings"]["total_s"]
    assert await page.locator("#pace-name").inner_text() == "Tokens a second"
    assert await number_in(page, "pace") == pytest.approx(pace, abs=0.51)
    await run(page, scripted.url, "race")
    assert await page.locator("#pace-name").inner_text() == "Cost"
    assert await first_line(page, "pace") == "0.00127"


async def test_request_is_what_the_fields_say(page: Page, scripted: ScriptedServer) -> None:
    """The body and headers of the wire; an empty seed is left to the server, and the target alone gets the one used."""
    await open_page(page, scripted.url)
    await page.get_by_label("Model").select_option("behind")
    await page.get_by_label("Prompt", exact=True).fill("def push(self):")
    await page.get_by_label("Max tokens").fill("77")
    await page.get_by_label("Temperature").fill("0.7")
    await page.get_by_label("Strategy").select_option("tokens")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    first, second = scripted.asked
    body: dict[str, Any] = {"model": "behind", "stream": True, "stream_options": {"include_usage": True}}
    body |= {"max_tokens": 77, "temperature": 0.7, "messages": [{"role": "user", "content": "def push(self):"}]}
    assert first.body == body
    assert second.body == body | {"seed": 41}
    assert (first.headers["x-llm-spec-trace"], first.headers["x-llm-spec-strategy"]) == ("1", "tokens")
    assert second.strategy == "plain"
    assert "authorization" not in first.headers
    await page.get_by_label("Strategy").select_option("auto")
    await page.get_by_label("Race the target alone").uncheck()
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.locator("#alone-lane")).to_be_hidden()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    assert len(scripted.asked) == 3
    assert "x-llm-spec-strategy" not in scripted.asked[-1].headers


async def test_race_shows_concurrent_streams_and_what_went_wrong(page: Page, scripted: ScriptedServer) -> None:
    """Streams that overlap lie in different lanes, cancelled ones look otherwise; fallbacks and retries are told."""
    await run(page, scripted.url, "race")
    assert await page.locator("#timeline .upstream").count() == len(RACE_STREAMS)
    assert await page.locator("#timeline .cancelled").count() == 2
    boxes = await page.locator("#timeline .upstream rect").evaluate_all(
        "(all) => all.map((r) => ['x', 'y', 'width'].map((name) => Number(r.getAttribute(name))))"
    )
    lanes: dict[float, list[tuple[float, float]]] = {}
    for x, y, width in boxes:
        lanes.setdefault(y, []).append((x, x + width))
    assert len(lanes) == 4
    for lane in lanes.values():
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(lane)))
    notices = await page.locator("#notices li").all_inner_texts()
    assert len(notices) == 2
    assert "<b>busy</b>" in notices[0]
    await expect(page.locator("#headline")).to_have_text("2.00x sooner in one run, another text")
    await expect(page.locator("#basis")).to_contain_text(
        "differ from character 14: race does not promise the same text"
    )


async def test_text_is_seen_as_it_comes(browser: Browser, scripted: ScriptedServer) -> None:
    """What takes its time types while it is made, in the first lane; the second waits, and says so."""
    page = await browser.new_page()
    await run(page, scripted.url, "slow", until="Running with the draft.")
    await expect(page.locator("#answer")).to_contain_text("word3")
    await expect(page.locator("#answer")).to_be_visible()
    assert await text_of(page, "of the target alone") == ""
    assert "next" in (await page.locator("#alone-answer").get_attribute("data-empty") or "")
    await page.close()


async def test_text_arrives_while_it_is_made_and_stop_ends_it(page: Page, scripted: ScriptedServer) -> None:
    """Stop closes the connection, keeps what came, and the page can run again."""
    await run(page, scripted.url, "slow", until="Running with the draft.")
    await expect(page.locator("#answer")).to_contain_text("word3")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_role("status")).to_contain_text("Stopped")
    for _ in range(100):
        if not scripted.asked[0].is_open:
            break
        await asyncio.sleep(0.02)
    assert not scripted.asked[0].is_open
    assert "word3" in await text_of(page)
    assert len(scripted.asked) == 1
    await expect(page.get_by_role("alert")).to_be_hidden()
    await page.get_by_label("Model").select_option("builtin")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    assert "word3" not in await text_of(page)


async def test_keyboard_is_enough(page: Page, scripted: ScriptedServer) -> None:
    """Every control is reached by Tab with a visible focus; Ctrl+Enter runs, Esc stops."""
    await open_page(page, scripted.url)
    order = [
        *["BUTTON"] * 4,
        "prompt",
        "model",
        "SUMMARY",
        "system",
        "strategy",
        "max-tokens",
        "temperature",
        "seed",
        "alone",
    ]
    order += ["run", "SUMMARY", "stop", "replay", "answer", "alone-answer"]
    reached = []
    for _ in order:
        await page.keyboard.press("Tab")
        reached.append(await page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        style = "getComputedStyle(document.activeElement)"
        assert await page.evaluate(f"{style}.outlineStyle !== 'none' && parseFloat({style}.outlineWidth) >= 2")
    assert reached == order
    await page.get_by_label("Model").focus()
    await page.keyboard.type("slow")
    await page.get_by_label("Prompt", exact=True).focus()
    await page.keyboard.type("hello")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator("#answer")).to_contain_text("word1")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("status")).to_contain_text("Stopped")
    await page.get_by_label("Model").focus()
    await page.keyboard.type("builtin")
    await page.keyboard.press("Meta+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    await page.get_by_role("button", name="Test a folder").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Prompt", exact=True)).to_have_value("def test_mkdir(self):")


async def test_every_field_has_a_name_and_what_is_missing_is_said(page: Page, scripted: ScriptedServer) -> None:
    """No control without an accessible name; an empty prompt or a wrong number sends nothing."""
    await open_page(page, scripted.url)
    for field in await page.locator("input, select, textarea").all():
        assert await field.evaluate("(field) => field.labels.length") == 1
    await page.get_by_label("Prompt", exact=True).fill("")
    await page.keyboard.press("Control+Enter")
    assert await page.evaluate("document.activeElement.id") == "prompt"
    await page.get_by_label("Prompt", exact=True).fill("hello")
    await page.get_by_label("Max tokens").fill("0")
    await page.keyboard.press("Control+Enter")
    assert await page.evaluate("document.activeElement.id") == "max-tokens"
    assert scripted.asked == []


async def test_status_is_not_read_out_with_every_token(page: Page, scripted: ScriptedServer) -> None:
    """A screen reader hears that it runs and that it is done; the answer itself is no live region."""
    await open_page(page, scripted.url)
    await page.evaluate(
        "window.said = []; new MutationObserver(() => said.push(document.getElementById('status').textContent))"
        ".observe(document.getElementById('status'), { childList: true, characterData: true, subtree: true })"
    )
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    said = await page.evaluate("said")
    assert said[:2] == ["Running with the draft.", "Running the target alone."]
    assert re.match(
        r"Done: 59 tokens in \d+ ms\. [\d.]+x sooner in one run, same text\. \d+ ms with the draft", said[2]
    )
    assert len(said) == 3
    live = await page.locator("[aria-live], [role=status], [role=alert], [role=log]").evaluate_all(
        "(all) => all.map((node) => node.id)"
    )
    assert sorted(live) == ["alert", "status"]


@pytest.mark.parametrize("model", ["builtin", "race"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_contrast_in_both_themes(
    browser: Browser, scripted: ScriptedServer, scheme: Any, model: str
) -> None:
    """Every text that is shown stands out by at least 4.5 : 1, errors and disabled buttons too."""
    page = await browser.new_page(color_scheme=scheme, reduced_motion="reduce")
    await open_page(page, scripted.url)
    painted = await page.evaluate(PAINTED_TEXT)
    await run(page, scripted.url, model)
    await reply(page, "go on")
    await page.evaluate("document.getElementById('key-box').open = true")
    painted += await page.evaluate(PAINTED_TEXT)
    await run(page, scripted.url, "broken", until="Failed.")
    painted += await page.evaluate(PAINTED_TEXT)
    assert len(painted) > 60
    assert [text for text in painted if text["contrast"] < 4.5] == []
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    await page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_kinds_of_tokens_and_of_work_look_different(
    browser: Browser, scripted: ScriptedServer, scheme: Any
) -> None:
    """In the timeline and its key: by colour, each with contrast to the card; and by pattern, without colour."""
    page = await browser.new_page(color_scheme=scheme, reduced_motion="reduce")
    await run(page, scripted.url)
    kinds = {"accepted", "correction", "bonus", "plain", "draft", "verify"}
    swatches = await page.locator("#key-rounds rect:not(.rejected)").evaluate_all(FILLS)
    assert {look["kind"] for look in swatches} == kinds
    assert len({look["colour"] for look in swatches}) == len(kinds)
    assert [look for look in swatches if look["contrast"] < 3] == []
    for group in ({"accepted", "correction", "bonus", "plain"}, {"draft", "verify"}):  # which stand side by side
        assert len({look["path"] for look in swatches if look["kind"] in group}) == len(group)
    drawn = await page.locator("#timeline rect:not(.rejected)").evaluate_all(FILLS)
    assert {"accepted", "correction", "bonus", "plain", "draft", "verify"} == {look["kind"] for look in drawn}
    by_kind = {look["kind"]: look for look in swatches}
    assert [look for look in drawn if look != by_kind[look["kind"]]] == []
    await page.close()


async def test_what_a_model_writes_stays_text(page: Page, scripted: ScriptedServer, seen: Seen) -> None:
    """Markup in the text, the reasoning, names and reasons is shown and never parsed."""
    await run(page, scripted.url, "hostile")
    assert await text_of(page) == HOSTILE_TEXT * 2
    assert await page.locator("#reasoning pre").text_content() == HOSTILE_TEXT
    assert HOSTILE_TEXT in await page.locator("#notices").inner_text()
    assert await page.locator("#results img, #results script, #answer b").count() == 0
    assert await page.title() == "llm_spec"
    assert await page.locator("#answer span").evaluate_all("(all) => all.map((s) => s.className)") == [
        "correction",
        "plain",
    ]
    assert seen.console == []


@pytest.mark.parametrize("model", ["builtin", "race", "hostile", "long"])
async def test_a_narrow_screen_does_not_scroll_sideways(browser: Browser, scripted: ScriptedServer, model: str) -> None:
    """360 pixels are enough, with both lanes and the settings."""
    page = await browser.new_page(viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    await run(page, scripted.url, model)
    await reply(page, "w" * 200)
    await page.locator("#settings summary").click()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 360
    drawn = await page.locator("#timeline").evaluate("(node) => [node.clientWidth, node.parentElement.clientWidth]")
    assert drawn[0] <= drawn[1]
    await page.close()


async def test_a_long_answer_stays_responsive(page: Page, scripted: ScriptedServer) -> None:
    """5,000 tokens in 1,000 rounds: drawn at most once a frame, no long pause, and the page answers meanwhile."""
    await open_page(page, scripted.url)
    await page.evaluate(
        """() => {
          window.longest_ms = window.numFrames = window.numDrawn = 0;
          window.began_ms = performance.now();
          let last = performance.now();
          const frame = (now) => {
            longest_ms = Math.max(longest_ms, now - last);
            last = now;
            numFrames++;
            requestAnimationFrame(frame);
          };
          requestAnimationFrame(frame);
          new MutationObserver(() => numDrawn++).observe(document.getElementById('answer'),
            { childList: true, subtree: true, characterData: true });
        }"""
    )
    await page.get_by_label("Model").select_option("long")
    await page.get_by_label("Prompt", exact=True).fill("hello")
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Done: 5000 tokens")
    await expect(page.locator("#headline")).to_contain_text("another text")
    assert len((await text_of(page)).split()) == 5000
    assert await page.locator("#timeline g.round").count() == 1000
    figures = "[longest_ms, performance.now() - began_ms, numFrames, numDrawn]"
    longest_ms, all_ms, num_frames, num_drawn = await page.evaluate(figures)
    assert num_drawn <= num_frames + 2
    assert longest_ms < all_ms / 4
    at_end = await page.locator("#answer").evaluate("(node) => node.scrollHeight - node.scrollTop - node.clientHeight")
    assert at_end < 40


async def test_odd_but_legal_events_are_read(page: Page, scripted: ScriptedServer) -> None:
    """Comments, ids, carriage returns, a character and a line end cut in two."""
    await run(page, scripted.url, "lines")
    assert await text_of(page) == "caf\u00e9 \u2192 \U0001f40d"


async def test_models_bring_their_strategies(page: Page, scripted: ScriptedServer) -> None:
    """The strategies offered, and the pair shown, are those of the chosen model."""
    await open_page(page, scripted.url)
    await page.get_by_label("Model").select_option("race")
    assert await page.get_by_label("Strategy").locator("option").all_inner_texts() == ["auto", "plain", "race"]
    await expect(page.locator("#pair")).to_have_text("scripted:draft → scripted:target")


async def test_examples_fill_the_form(page: Page, scripted: ScriptedServer) -> None:
    """Three or four a kind of model, with the settings that their answers were chosen with; one's own text stays."""
    await open_page(page, scripted.url)
    examples = page.get_by_role("group", name="Examples").get_by_role("button")
    assert await examples.count() == 4
    prompts = set()
    for example in await examples.all():
        await example.click()
        assert await example.get_attribute("aria-pressed") == "true"
        prompts.add(await page.get_by_label("Prompt", exact=True).input_value())
    assert len(prompts) == 4
    assert await page.get_by_label("Seed").input_value() != ""
    await examples.first.click()
    assert await page.get_by_label("Seed").input_value() == ""
    await expect(page.get_by_text("too small to chat")).to_be_visible()
    await page.get_by_label("Model").select_option("race")
    await expect(page.get_by_text("too small to chat")).to_be_hidden()
    assert await examples.count() == 3
    assert "planets" not in await page.get_by_label("Prompt", exact=True).input_value()
    await page.get_by_label("Prompt", exact=True).fill("my own")
    assert await page.locator("#examples [aria-pressed=true]").count() == 0
    await page.get_by_label("Model").select_option("builtin")
    assert await page.get_by_label("Prompt", exact=True).input_value() == "my own"


async def test_an_examples_sampling_ends_with_its_prompt(page: Page, scripted: ScriptedServer) -> None:
    """One's own prompt has one's own settings, which an example does not change, and a reply has them, too."""
    await open_page(page, scripted.url)
    prompt, temperature, seed = (page.get_by_label(name, exact=True) for name in ("Prompt", "Temperature", "Seed"))
    example = page.get_by_role("button", name="Test a folder")
    await example.click()
    assert (await temperature.input_value(), await seed.input_value()) == ("0.7", "8")
    await prompt.fill("Hello, who are you?")
    assert (await temperature.input_value(), await seed.input_value()) == ("0", "")
    await temperature.fill("1.1")
    await example.click()
    assert await temperature.input_value() == "0.7"
    await seed.fill("5")
    await prompt.press("End")
    await prompt.press_sequentially("x")
    assert (await temperature.input_value(), await seed.input_value()) == ("1.1", "5")
    await example.click()
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    await reply(page, "go on")
    sent = [(asked.body["temperature"], asked.body["seed"]) for asked in scripted.asked]
    assert sent == [(0.7, 8)] * 2 + [(1.1, 5)] * 2


async def test_the_examples_have_answers_that_end_and_read_well(page: Page, real: str) -> None:
    """Those of the built-in pair are Python, end by themselves, and say no line twice.

    Not all of them have to: on another CPU logits are rounded otherwise, and a text may leave its way at a near tie.
    """
    await open_page(page, real)
    examples = await page.get_by_role("group", name="Examples").get_by_role("button").all()
    num_good = 0
    for example in examples:
        await example.click()
        await page.get_by_role("button", name="Run", exact=True).click()
        await expect(page.get_by_role("status")).to_contain_text("Done:")
        has_ended = "max tokens" not in await page.get_by_role("status").inner_text()
        num_good += has_ended and is_good(
            await page.get_by_label("Prompt", exact=True).input_value(), await text_of(page)
        )
    assert num_good >= len(examples) / 2


def is_good(prompt: str, answer: str) -> bool:
    """Whether it goes on with the prompt as Python, in several lines that differ."""
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    try:
        compile(f"{prompt}\n{answer}", "the answer", "exec")
    except SyntaxError:
        return False
    return len(lines) >= 3 and len(lines) == len(set(lines))


async def test_a_phone_is_shown_the_answer(browser: Browser, scripted: ScriptedServer) -> None:
    """The answer's card comes into view when it is asked for, and so does an error, which is in it."""
    page = await browser.new_page(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    for model, until in (("builtin", "Done:"), ("refused", "Refused.")):
        await run(page, scripted.url, model, until=until)
        top = await page.locator("#race").evaluate("(card) => card.getBoundingClientRect().top")
        assert 0 <= top < 80
    await expect(page.get_by_role("alert")).to_be_in_viewport()
    await page.close()


async def test_a_strategy_is_asked_for_where_it_is_not_the_models_own(page: Page, scripted: ScriptedServer) -> None:
    """A model's own is chosen with it and goes without a header; another one, auto too, is asked for by name."""
    await run(page, scripted.url, "race")
    await expect(page.get_by_label("Strategy")).to_have_value("race")
    await page.get_by_label("Strategy").select_option("auto")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")
    told = [asked.headers.get("x-llm-spec-strategy") for asked in scripted.asked]
    assert told == [None, "plain", "auto", "plain"]


async def test_motion_is_left_out_where_it_is_not_wanted(browser: Browser, scripted: ScriptedServer) -> None:
    """With prefers-reduced-motion nothing has a transition or an animation."""
    page = await browser.new_page(reduced_motion="reduce")
    await open_page(page, scripted.url)
    moving = await page.evaluate(
        "[...document.querySelectorAll('*')].filter((node) => { const style = getComputedStyle(node);"
        " return style.transitionDuration !== '0s' || style.animationName !== 'none'; }).length"
    )
    assert moving == 0
    await page.close()
