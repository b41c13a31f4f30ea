"""Machines, runtimes, recipes and scaling on the page, in a real browser, against a real studio."""

from __future__ import annotations

import re

import pytest
import yaml
from playwright.sync_api import Page, expect

from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.compare import compared, record
from phalanx.plan.scaling import scaling_curve
from tests.web.browser import PHONE, NewPage, check_accessible
from tests.web.test_plan_view import asked, from_command_line, millis, number, open_plan, row, settle, told

pytestmark = pytest.mark.slow


def column(page: Page, table: str, machine: int) -> list[str]:
    return page.locator(f"table.{table} tbody tr td:nth-of-type({machine + 1})").all_inner_texts()


def test_machines_side_by_side_are_those_of_the_command_line(studio: str, new_page: NewPage) -> None:
    page = new_page()
    page.goto(f"{studio}#/compare?model=Llama-3.3-70B&engine=&machine=4xH100-SXM,1xRTX4090")
    expect(page.locator("#compared")).to_contain_text("on 2 machines")
    expect(page.locator(".stale")).to_have_count(0)
    for place, name in enumerate(("4xH100-SXM", "1xRTX4090")):
        found = record(compared(ask(PlanQuestion("Llama-3.3-70B", name))))
        cells = column(page, "compared", place)
        assert cells[0] == f"{number(found['memory_gib'])} GiB"
        assert cells[3] == (found["best"] or "does not fit")
        if found["tokens_per_s"]:
            assert cells[4] == number(found["tokens_per_s"])
            assert cells[6] == millis(found["tpot_ms"])
        assert cells[-1] == found["readiness"]
    page.get_by_label("Machines, with commas").fill("4xH100-SXM,8xH200-SXM,4xL40S")
    expect(page.locator("#compared")).to_contain_text("on 3 machines")
    check_accessible(page)
    assert "machine=4xH100-SXM%2C8xH200-SXM%2C4xL40S" in page.url


def test_a_rate_a_prefix_a_degree_and_a_system_are_asked_for(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio, "#/plan?engine=vllm&format=fp8")
    page.get_by_label("Requests/s", exact=True).fill("3")
    page.get_by_label("Shared prefix", exact=True).fill("512")
    page.get_by_label("TP", exact=True).select_option("2")
    page.get_by_label("System", exact=True).select_option("wsl2")
    expect(page.locator(".verdict")).to_contain_text("3 requests/s")
    expect(page.get_by_label("plan command", exact=True)).to_contain_text("--os wsl2")
    settle(page)
    found = from_command_line(page)
    assert found["workload"]["rate"] == 3
    assert found["workload"]["shared_prefix"] == 512
    assert {each["tp"] for each in found["candidates"]} == {2}
    assert row(page, "TTFT p95") == [millis(each["ttft_p95_ms"]) for each in found["side_by_side"]]
    assert row(page, "TPOT p99") == [millis(each["tpot_p99_ms"]) for each in found["side_by_side"]]
    page.get_by_label("Requests/s", exact=True).fill("90000")
    expect(page.locator("#verdict")).to_contain_text("cannot hold this rate")
    other = new_page()
    other.goto(page.url)
    expect(other.locator("#verdict")).to_contain_text("cannot hold this rate")
    assert asked(other) == asked(page)


def test_a_link_of_the_best_of_all_gives_the_same_answer(studio: str, new_page: NewPage) -> None:
    """An empty choice was once left out of the address, and the usual runtime came back."""
    page = new_page()
    open_plan(page, studio, "#/plan?model=Qwen3-32B&machine=2xH100-SXM")
    page.get_by_label("Runtime").select_option("")
    expect(page.get_by_label("plan command", exact=True)).not_to_contain_text("--engine")
    settle(page)
    other = new_page()
    other.goto(page.url)
    settle(other)
    assert told(other) == told(page)
    names = [text.split("\t")[0] for text in page.locator("table.ranking tbody tr").all_inner_texts()]
    assert sorted(names) == sorted(["Phalanx", "vLLM", "SGLang", "TensorRT-LLM"])


def test_recipes_are_the_files_of_the_command_line(studio: str, new_page: NewPage) -> None:
    page = new_page(refused=(400,))
    open_plan(page, studio, "#/plan?engine=vllm&format=fp8")
    page.get_by_role("tab", name="Compose").click()
    text = page.get_by_label("compose.yaml", exact=True)
    expect(text).to_be_visible()
    services = yaml.safe_load(text.inner_text())["services"]
    assert services["replica-0"]["command"][:2] == ["vllm", "serve"]
    page.get_by_role("tab", name="Ray").click()
    expect(page.locator("#recipe")).to_contain_text("needs no Ray")
    check_accessible(page)
    page.get_by_role("tab", name="Command").click()
    expect(page.get_by_label("launch command", exact=True)).to_be_visible()


def test_scaling_is_bound_by_something_and_models_have_a_speed_and_a_filter(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio, "#/plan?engine=vllm&format=fp8&model=Llama-3.1-8B")
    question = PlanQuestion("Llama-3.1-8B", "4xH100-SXM", engines="vllm", formats="fp8", tps="1,2,4")
    shown = [line.split("\t") for line in page.locator("table.scaling tbody tr").all_inner_texts()]
    points = scaling_curve(ask(question))
    assert [cells[1] for cells in shown] == [number(point.tokens_per_s) for point in points]
    assert [cells[3].partition(" (")[0] for cells in shown] == [point.bound for point in points]
    page.get_by_label("Filter").fill("qwen3-")
    names = page.locator("table.fits tbody th").all_inner_texts()
    assert names
    assert all("qwen3-" in name.lower() for name in names)
    page.get_by_role("button", name="tok/s a user, at most").click()
    cells = page.locator("table.fits tbody td:nth-of-type(6)").all_inner_texts()
    speeds = [float(text.replace(",", "")) for text in cells]
    assert speeds == sorted(speeds, reverse=True)


def test_nothing_overflows_and_the_verdict_comes_first_on_a_phone(studio: str, new_page: NewPage) -> None:
    page = new_page()
    page.add_init_script("ResizeObserver.prototype.observe = () => {}")  # Charts stay as wide as they were for a frame.
    open_plan(page, studio)
    for width in (2560, 1280, 1024, 768, 360):
        assert overflow(page, width) <= 0, width
    page.set_viewport_size(PHONE)
    tops = [page.locator(place).bounding_box()["y"] for place in (".verdict", ".plan-form", "#degrees")]  # type: ignore[index]
    assert tops == sorted(tops)
    page.goto(f"{studio}#/compare")
    expect(page.locator("#compared")).to_be_visible()
    for width in (360, 1024, 2560):
        assert overflow(page, width) <= 0, width


def overflow(page: Page, width: int) -> int:
    page.set_viewport_size({"width": width, "height": 900})
    return page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_windows_is_told_what_to_do(studio: str, new_page: NewPage) -> None:
    page = new_page(refused=(400,))
    open_plan(page, studio)
    page.get_by_label("System", exact=True).select_option("windows")
    expect(page.get_by_role("alert")).to_contain_text(re.compile("do not run on Windows"))
    page.get_by_label("System", exact=True).select_option("linux")
    expect(page.get_by_role("alert")).to_be_empty()
