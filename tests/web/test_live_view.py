"""The live view of an engine that never was: its range, its spikes, its legends, its GPUs, and how it fits."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.server.running import eventually
from tests.web.browser import NewPage, check_accessible, shown_as
from tests.web.made_up import event, gpu_sample, sample
from tests.web.scripted import ScriptedServer
from tests.web.test_chat import STICKING_OUT
from tests.web.test_live import card, drawn, figure

pytestmark = pytest.mark.slow


def opened(page: Page, server: ScriptedServer, *events: dict[str, Any]) -> Page:
    server.live.extend(events)
    page.goto(server.url + "#/live")
    expect(page.get_by_label("State of the engine")).to_contain_text("Ready")
    return page


def test_the_range_is_chosen_asked_for_and_kept_for_the_tab(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, event([sample(ago) for ago in range(3590, 0, -1)]))
    slider = page.get_by_label("Figures of")
    assert server.live_asked == [{"seconds": "900"}]
    expect(slider).to_have_attribute("max", "899")
    page.get_by_label("5 min", exact=True).check()
    expect(slider).to_have_attribute("max", "299")
    assert len(server.live_asked) == 1, "what is known needs no asking"
    page.get_by_label("5 min", exact=True).press("ArrowRight")
    page.get_by_label("15 min").press("ArrowRight")
    expect(slider).to_have_attribute("max", "3589")
    assert eventually(lambda: server.live_asked[-1] == {"seconds": "3600"}, 60)
    expect(page.get_by_text("in the last 60 minutes")).to_be_visible()
    page.reload()
    expect(page.get_by_label("60 min")).to_be_checked()
    page.get_by_label("1 min", exact=True).check()
    expect(slider).to_have_attribute("max", "59")
    expect(page.get_by_text("in the last minute.")).to_be_visible()


def test_a_spike_is_cut_and_its_true_height_said(new_page: NewPage, server: ScriptedServer) -> None:
    """A few seconds of 40 would flatten ten minutes of 0.2."""
    calm = [sample(ago, ttft=[100, 150, 200.0]) for ago in range(600, 0, -1)]
    page = opened(new_page(), server, event(calm))
    first = card(page, "Time to first token")
    expect(first.locator(".peak")).to_have_text("")
    height = drawn(page, "Time to first token")
    server.reset()
    spiky = [*calm[:300], *(sample(ago, ttft=[100, 150, 40_000.0]) for ago in range(300, 295, -1)), *calm[305:]]
    opened(page, server, event(spiky)).reload()
    expect(first.locator(".peak")).to_have_text(re.compile(r"▲ up to 40 s at \d+:\d\d:\d\d"))
    assert drawn(page, "Time to first token") > 0.8 * height, "the usual lines are drawn as before"
    expect(card(page, "Time between tokens").locator(".peak")).to_have_text("")


def test_the_band_has_a_legend(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, event([sample(ago) for ago in range(60, 0, -1)]))
    expect(card(page, "Time between tokens").locator(".band")).to_have_text(re.compile("9 in 10 of plan"))
    expect(page.locator(".band")).to_have_count(1)


def test_gpus_are_shown_where_there_are_some(new_page: NewPage, server: ScriptedServer) -> None:
    told = [sample(ago, gpus=[gpu_sample(index, ago) for index in range(8)]) for ago in range(60, 0, -1)]
    page = opened(new_page(), server, event(told, 8))
    assert figure(page, "GPU memory", "fullest") == 77.5
    assert figure(page, "GPU temperature", "hottest") == 71
    assert 8 * 580 < figure(page, "GPU power", "together") < 8 * 640
    assert drawn(page, "GPU power") > 100
    rows = page.get_by_role("group", name="GPUs").get_by_role("row")
    expect(rows).to_have_count(9)
    expect(rows.nth(1)).to_contain_text("70.5 of 79.6 GiB")
    expect(rows.nth(1)).to_contain_text("of 700 W")
    expect(rows.nth(1)).to_contain_text("64 °C")
    page.get_by_label("Figures of").press("Home")
    expect(rows.nth(2)).to_contain_text("71.5 of 79.6 GiB")
    server.reset()
    opened(page, server, event([sample(0)])).reload()
    expect(card(page, "Output")).to_be_visible()
    expect(page.get_by_text(re.compile("^GPU"))).to_have_count(0)


def test_notes_stand_in_the_view(new_page: NewPage, server: ScriptedServer) -> None:
    noted = event([sample(0)])
    note = {"level": "warning", "code": "slow_rank", "title": "Rank 1 is slower", "found": "30 % <b>more</b>"}
    noted["state"]["notes"] = [note | {"why": "All wait.", "fix": "Look at its card."}]
    findings = opened(new_page(), server, noted).get_by_role("region", name="Findings")
    expect(findings).to_contain_text("Rank 1 is slower: 30 % <b>more</b>. All wait. Look at its card.")


def test_the_keyboard_looks_back_and_returns_to_now(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, event([sample(ago) for ago in range(60, 0, -1)]))
    slider, shown = page.get_by_label("Figures of"), page.locator(".live-moment output")
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    expect(shown).to_have_text(re.compile(r"\d+:\d+:\d+"))
    page.get_by_role("button", name="Back to now").click()
    expect(shown).to_have_text("now")


def test_it_is_accessible_and_fits_its_screen(new_page: NewPage, server: ScriptedServer) -> None:
    told = [sample(ago, gpus=[gpu_sample(index, ago) for index in range(8)]) for ago in range(60, 0, -1)]
    page = opened(new_page(), server, event(told, 8))
    for width, scheme in ((360, "light"), (390, "dark"), (1280, "dark"), (2560, "light")):
        shown_as(page, scheme, width)
        expect(page.get_by_role("heading", name="GPUs")).to_be_visible()
        check_accessible(page)
        assert page.evaluate(STICKING_OUT) == [], width
