"""Races: medians, replays, the recording; and conversations, in which each answer can be raced."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright.async_api import Browser, Page, expect

from .browser import Seen
from .page_steps import open_page, reply, run, text_of
from .scripted_server import RECORDING, ScriptedServer, parts_of

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all of them


async def test_a_draft_that_costs_time_is_said_to(page: Page, scripted: ScriptedServer) -> None:
    """Later is called later; without a race it is what the server has measured, and against what."""
    await run(page, scripted.url, "behind")
    await expect(page.locator("#headline")).to_have_text("1.50x later in one run, same text")
    await expect(page.locator("#headline")).to_have_class("later")
    await expect(page.locator("#basis")).to_contain_text("1.50 s with the draft, 1.00 s alone")
    await page.get_by_label("Race the target alone").uncheck()
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.locator("#headline")).to_have_text("0.70x to 0.90x as fast")
    await expect(page.locator("#basis")).to_have_text("Against the target alone: measured on 7 of its own tokens.")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("measured", "Why: this answer measures the target without a draft. Run it again."),
        ("alone", "Why: there is no draft. Give this model a draft in the server\u2019s config."),
    ],
)
async def test_what_is_plain_says_why(page: Page, scripted: ScriptedServer, model: str, reason: str) -> None:
    """Where nothing was speculated there is nothing to race: the reason stands there instead, and what to do."""
    await run(page, scripted.url, model)
    await expect(page.locator("#headline")).to_have_text("No speculation")
    await expect(page.locator("#basis")).to_have_text(reason)
    await expect(page.locator("#alone-lane")).to_be_hidden()
    assert await page.locator("#draft-lane h3").inner_text() == "The target alone"
    assert len(scripted.asked) == 1


async def test_the_lanes_run_one_after_the_other(page: Page, scripted: ScriptedServer) -> None:
    """At once they would slow each other: the target alone is asked when the other answer has ended."""
    were_open: list[list[bool]] = []
    play = scripted.scripts["builtin"]

    def noting(asked: Any) -> Any:
        were_open.append([other.is_open for other in scripted.asked if other is not asked])
        return play(asked)

    scripted.scripts["builtin"] = noting
    await run(page, scripted.url)
    assert were_open == [[], [False]]


async def test_a_recorded_race_plays_on_opening(browser: Browser, scripted: ScriptedServer, seen: Seen) -> None:
    """It types both lanes on one clock, slowed down as its title says, is called a recording, and asks no model."""
    page = await browser.new_page()
    page.on("pageerror", lambda error: seen.console.append(str(error)))
    await page.clock.install(time=0)
    await page.clock.pause_at(1)  # nothing moves unless it is told to
    await open_page(page, scripted.url)
    with_draft, alone = (parts_of(lane) for lane in RECORDING["lanes"])
    await expect(page.get_by_text("Recording", exact=True)).to_be_visible()
    await expect(page.get_by_role("status")).to_contain_text("recorded on")
    await expect(page.locator("#headline")).to_have_text(re.compile(r"x sooner, median of 61, same text$"))
    slowdown = int(re.findall(r"Race, (\d+) times slower", await page.locator("#race-title").inner_text())[0])
    middle_s = with_draft[-1]["result"]["timings"]["total_s"] / 2
    await page.clock.run_for(int(middle_s * 1000 * slowdown))
    drawn = await text_of(page), await text_of(page, "of the target alone")
    whole = tuple("".join(part.get("text", "") for part in parts) for parts in (with_draft, alone))
    assert whole[0] == whole[1]
    assert 0 < len(drawn[1]) < len(drawn[0]) < len(whole[0])
    assert [text for text in drawn if not whole[0].startswith(text)] == []
    await page.clock.run_for(20_000)
    assert (await text_of(page), await text_of(page, "of the target alone")) == whole
    assert await page.locator("#race-title").inner_text() == "Race"
    assert (scripted.asked, seen.console) == ([], [])
    await page.close()


async def test_a_replay_is_ended_and_begun_again(browser: Browser, scripted: ScriptedServer) -> None:
    """Escape shows the end at once, Replay begins anew, and a run of one's own is replayed if it was too quick."""
    page = await browser.new_page()
    await page.clock.install(time=0)
    await page.clock.pause_at(1)
    await open_page(page, scripted.url)
    assert await text_of(page) == ""
    await page.keyboard.press("Escape")
    whole = await text_of(page)
    assert whole
    assert await page.get_by_role("button", name="Stop").get_attribute("aria-disabled") == "true"
    await page.get_by_role("button", name="Replay").click()
    assert await text_of(page) == ""
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    assert await page.locator("#badge").is_hidden()
    assert "times slower" in await page.locator("#race-title").inner_text()
    assert await text_of(page) == ""
    await page.clock.run_for(20_000)
    assert await text_of(page) == whole
    await page.close()


async def test_what_could_be_watched_is_not_replayed(browser: Browser, scripted: ScriptedServer) -> None:
    """Answers of seconds were seen as they came; Replay shows them at their own pace."""
    page = await browser.new_page()
    await page.clock.install(time=0)
    await page.clock.pause_at(1)
    await run(page, scripted.url, "race")
    whole = await text_of(page)
    assert whole.startswith("One two three.")
    await page.get_by_role("button", name="Replay").click()
    assert await page.locator("#race-title").inner_text() == "Race"
    assert await text_of(page) == ""
    await page.clock.run_for(1500)
    clock = await page.locator("#draft-lane .clock").inner_text()
    assert float(clock.removesuffix(" s")) == pytest.approx(1.5, abs=0.05)  # a frame or two less
    await page.close()


async def test_three_races_have_a_median(page: Page, scripted: ScriptedServer) -> None:
    """One race says that it is one; two more, with the other side first by turns, make the headline a median."""
    await run(page, scripted.url, "uneven")
    await expect(page.locator("#headline")).to_have_text("2.00x sooner in one run, same text")
    await page.get_by_role("button", name="Race twice more", exact=True).click()
    await expect(page.locator("#headline")).to_have_text("1.50x sooner, median of 3, same text")
    await expect(page.locator("#basis")).to_contain_text(
        "The races: 1.00x, 1.50x, 2.00x. Shown is the middle one: 1.00 s"
    )
    sides = [asked.strategy for asked in scripted.asked]
    assert sides == ["auto", "plain", "plain", "auto", "auto", "plain"]
    assert await page.locator("#alone-lane .clock").inner_text() == "1.50 s"


async def test_a_race_that_is_stopped_leaves_the_median_of_the_others(page: Page, scripted: ScriptedServer) -> None:
    """What was raced before stays in large."""
    await run(page, scripted.url, "uneven")
    scripted.scripts["uneven"] = scripted.scripts["slow"]
    await page.get_by_role("button", name="Race twice more", exact=True).click()
    await expect(page.get_by_role("status")).to_have_text("Race 1 of 2: running the target alone.")
    await expect(page.locator("#alone-answer")).to_contain_text("word1")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("status")).to_contain_text("Stopped after")
    await expect(page.locator("#headline")).to_have_text("2.00x sooner in one run, same text")
    assert await text_of(page) == "Text."


async def test_a_conversation_sends_what_was_said(page: Page, scripted: ScriptedServer, seen: Seen) -> None:
    """The system prompt, then each prompt and its answer; markup stays text; a run of the form begins anew."""
    await open_page(page, scripted.url)
    await page.get_by_label("System prompt").fill("Be <b>short</b>.")
    await page.get_by_label("Model").select_option("echo")
    await page.get_by_label("Prompt", exact=True).fill("one")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    await reply(page, "two")
    system = {"role": "system", "content": "Be <b>short</b>."}
    first = {"role": "assistant", "content": "[system: Be <b>short</b>. | user: one]"}
    messages = [system, {"role": "user", "content": "one"}, first, {"role": "user", "content": "two"}]
    assert [asked.body["messages"] for asked in scripted.asked] == [[*messages[:2]]] * 2 + [messages] * 2
    assert [asked.strategy for asked in scripted.asked] == ["auto", "plain"] * 2
    assert await page.get_by_label("Reply").input_value() == ""
    said = await page.locator("#turns .said span").all_inner_texts()
    assert said[:3] == ["one", first["content"], "two"]
    assert await page.locator("#turns b").all_inner_texts() == ["You", "Answer"] * 2
    await page.get_by_label("Reply").fill("three")
    await page.get_by_label("Reply").press("Control+Enter")
    await expect(page.locator("#turns li")).to_have_count(3)
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.locator("#turns li")).to_have_count(1)
    assert scripted.asked[-1].body["messages"] == messages[:2]
    assert seen.console == []


async def test_each_answer_of_a_conversation_can_be_raced(page: Page, scripted: ScriptedServer) -> None:
    """Later, too: the first answer's own request, both sides with one seed, side by side above."""
    await open_page(page, scripted.url)
    await page.get_by_label("Model").select_option("echo")
    await page.get_by_label("Race the target alone").uncheck()
    for label, text in (("Prompt", "one"), ("Reply", "two")):
        await page.get_by_label(label, exact=True).fill(text)
        await page.get_by_label(label, exact=True).press("Control+Enter")
        await expect(page.get_by_role("status")).to_contain_text("Done:")
        await expect(page.locator("#race code")).to_have_text(text)
    assert len(scripted.asked) == 2
    await expect(page.locator("#alone-lane")).to_be_hidden()
    await page.get_by_role("button", name="Race this answer: answer 1").click()
    await expect(page.locator("#race code")).to_have_text("one")
    await expect(page.locator("#headline")).to_have_text("As soon in one run, same text")
    assert await text_of(page, "of the target alone") == await text_of(page) == "[user: one]"
    assert scripted.asked[-1].body == scripted.asked[0].body | {"seed": 7}
    assert scripted.asked[-1].strategy == "plain"
    outcomes = await page.locator("#turns .muted").all_inner_texts()
    assert outcomes == ["As soon in one run, same text", "1.00 s"]
    assert await page.locator("#turns [aria-current]").count() == 1
    await page.get_by_role("button", name="Show: answer 2").click()
    await expect(page.locator("#race code")).to_have_text("two")
    await expect(page.locator("#alone-lane")).to_be_hidden()


async def test_a_reply_that_fails_stays_to_be_sent_again(page: Page, scripted: ScriptedServer) -> None:
    """The conversation is what it was, and so is the text."""
    await run(page, scripted.url, "echo")
    await page.get_by_label("Model").select_option("refused")
    await page.get_by_label("Reply").fill("two")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_role("status")).to_have_text("Refused.")
    assert await page.get_by_label("Reply").input_value() == "two"
    await page.get_by_label("Model").select_option("echo")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator("#turns li")).to_have_count(2)
    assert len(scripted.asked[-1].body["messages"]) == 3
