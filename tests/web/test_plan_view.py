"""The plan view in a real browser, against a real studio."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from typer.testing import CliRunner

from phalanx.cli import app
from tests.web.browser import NewPage, check_accessible, check_on_both

pytestmark = pytest.mark.slow


def number(value: float) -> str:
    """As the page writes it: three digits that count."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{int(value + 0.5):,}"
    return f"{float(f'{value:.3g}'):.10f}".rstrip("0").rstrip(".")


def millis(value: float) -> str:
    return f"{number(value / 1000)} s" if value >= 10_000 else f"{number(value)} ms"


def open_plan(page: Page, studio: str, place: str = "#/plan") -> None:
    page.goto(f"{studio}{place}")
    settle(page)


def settle(page: Page) -> None:
    """All answers are there, and they are those to what is asked now."""
    expect(page.locator("#fits")).to_be_visible()
    expect(page.locator(".stale")).to_have_count(0)


def row(page: Page, name: str) -> list[str]:
    """The large numbers of a row of the side-by-side table."""
    cells = page.locator("table.degrees tr", has=page.get_by_role("rowheader", name=name, exact=True)).locator("td")
    return [text.split("\n")[0].strip() for text in cells.all_inner_texts()]


def from_command_line(page: Page) -> dict[str, Any]:
    """What the command that the page shows answers."""
    words = shlex.split(page.get_by_label("plan command", exact=True).inner_text())
    assert words[:2] == ["phalanx", "plan"]
    answer = CliRunner().invoke(app, [*words[1:], "--json"])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


def test_the_page_shows_the_numbers_of_the_command_line(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio)
    page.get_by_label("Runtime").select_option("vllm")
    page.get_by_label("Requests at once", exact=True).fill("24")
    page.get_by_label("Input tokens").fill("2000")
    expect(page.locator("#verdict")).to_contain_text("vLLM")
    expect(page.locator(".verdict")).to_contain_text("24 at once")
    expect(page.locator(".verdict")).to_contain_text("requests of 2256")
    settle(page)
    record = from_command_line(page)
    assert record["workload"]["concurrency"] == 24
    assert record["best"]["engine"] == "vllm"
    degrees = record["side_by_side"]
    assert row(page, "TTFT") == [millis(each["ttft_ms"]["mid"]) for each in degrees]
    assert row(page, "TPOT") == [millis(each["tpot_ms"]["mid"]) for each in degrees]
    assert row(page, "Output tok/s") == [number(each["tokens_per_s"]["mid"]) for each in degrees]
    assert row(page, "tok/s per GPU") == [number(each["tokens_per_s_per_gpu"]) for each in degrees]
    assert row(page, "USD per M tokens") == [f"${each['usd_per_million_tokens']:.2f}" for each in degrees]
    assert row(page, "KV tokens") == [f"{each['kv_tokens']:,}" for each in degrees]
    assert row(page, "Longest context") == [f"{each['longest_context']:,}" for each in degrees]
    ranks = record["fit"]["ranks"]
    sizes = [text.split() for text in page.locator(".memory [role=row]:not(.head)").all_inner_texts()]
    assert [float(size[-5]) for size in sizes] == [
        pytest.approx(rank["weight_bytes"] / 2**30, abs=0.06) for rank in ranks
    ]
    assert [float(size[-4]) for size in sizes] == [pytest.approx(rank["kv_bytes"] / 2**30, abs=0.06) for rank in ranks]
    assert shlex.split(page.get_by_label("launch command", exact=True).inner_text()) == record["command"]
    expect(page.locator(".break-even")).to_contain_text("Owning pays from")


def test_uneven_shards_show(studio: str, new_page: NewPage) -> None:
    """Eight KV heads on three ranks: 3 + 3 + 2."""
    page = new_page()
    open_plan(page, studio, "#/plan?machine=3xH100-SXM&concurrency=4")
    record = from_command_line(page)
    weights = [rank["weight_bytes"] for rank in record["fit"]["ranks"]]
    assert len(weights) == 3
    assert len(set(weights)) > 1
    expect(page.get_by_text("uneven shards")).to_be_visible()
    expect(page.get_by_text(f"Rank {record['fit']['tightest_rank']} is the tightest.")).to_be_visible()


def test_a_bar_has_the_width_of_its_share(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio)
    record = from_command_line(page)
    rank = record["fit"]["ranks"][0]
    track = page.locator(".bar-track").first
    shares = track.evaluate("bar => [...bar.children].map(part => part.clientWidth / bar.clientWidth)")
    card = rank["lines"][0]["bytes"]
    assert shares[0] == pytest.approx(rank["weight_bytes"] / card, abs=0.01)
    assert shares[1] == pytest.approx(rank["kv_bytes"] / card, abs=0.01)
    assert sum(shares) == pytest.approx(1, abs=0.02)


def test_a_shared_address_gives_the_same_page(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio)
    page.get_by_label("Model", exact=True).fill("Qwen3-30B-A3B")
    page.get_by_label("Machine", exact=True).fill("2xRTX5090+1xH100-PCIe")
    page.get_by_label("Weights").select_option("fp8")
    page.get_by_label("TTFT at most, ms").fill("400")
    expect(page.locator(".verdict")).to_contain_text("Qwen3-30B-A3B on 2xRTX5090+1xH100-PCIe")
    expect(page.get_by_label("plan command", exact=True)).to_contain_text("--slo ttft:400")
    settle(page)
    other = new_page()
    other.goto(page.url)
    settle(other)
    assert told(other) == told(page)
    assert asked(other) == asked(page)


def told(page: Page) -> str:
    return re.sub(r"Planned in \S+ ms", "", page.locator(".results").inner_text())


def asked(page: Page) -> list[str]:
    return page.locator(".plan-form").evaluate("form => [...form.elements].map(each => each.value ?? '')")


@pytest.mark.parametrize(
    ("field", "text", "words", "good"),
    [
        ("Machine", "4xH100-SX", "No GPU is called 'H100-SX'", "8xH100-SXM"),
        ("Model", "Lama-3.3-7B", "is not in the catalog", "Qwen3-8B"),
        ("Requests at once", "0", "A whole number", "64"),
    ],
)
def test_a_wrong_word_is_told_and_nothing_is_lost(
    studio: str, new_page: NewPage, field: str, text: str, words: str, good: str
) -> None:
    page = new_page(refused=(400,))
    open_plan(page, studio)
    before = page.locator(".verdict").inner_text()
    box = page.get_by_label(field, exact=True)
    box.fill(text)
    expect(page.get_by_role("alert")).to_contain_text(words)
    expect(box).to_have_attribute("aria-invalid", "true")
    expect(box).to_have_value(text)
    assert page.locator(".verdict").inner_text() == before
    box.fill(good)
    expect(page.get_by_role("alert")).to_be_empty()
    settle(page)
    assert page.locator(".verdict").inner_text() != before


def test_what_does_not_fit_is_told_in_numbers(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio, "#/plan?model=Llama-3.1-405B&machine=2xL4&engine=vllm")
    expect(page.locator("#verdict")).to_contain_text("does not fit")
    expect(page.locator(".refusals")).to_contain_text("GiB short")


def test_text_in_an_address_is_never_markup(studio: str, new_page: NewPage) -> None:
    page = new_page(refused=(400,))
    attack = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
    for field in ("model", "machine", "engine", "format", "kv", "input", "ttft"):
        page.goto(f"{studio}#/plan?{field}={attack}")
        expect(page.get_by_role("alert")).not_to_be_empty()
        assert page.evaluate("window.hit") is None, field
        assert page.locator("main img, main script").count() == 0, field
        page.goto("about:blank")


def test_it_is_accessible_with_an_answer_and_without(studio: str, new_page: NewPage) -> None:
    page = new_page(refused=(400,))
    open_plan(page, studio)
    check_on_both(page)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.get_by_label("Machine", exact=True).fill("nothing")
    expect(page.get_by_role("alert")).not_to_be_empty()
    check_accessible(page)


def tab_to(page: Page, name: str) -> None:
    for _ in range(80):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "() => document.activeElement.labels?.[0]?.textContent ?? document.activeElement.getAttribute('aria-label')"
        )
        if focused == name:
            return
    pytest.fail(f"{name} cannot be reached")


def test_a_keyboard_is_enough(studio: str, new_page: NewPage) -> None:
    page = new_page(refused=(400,), permissions=["clipboard-read", "clipboard-write"])
    open_plan(page, studio)
    tab_to(page, "Model")
    page.keyboard.press("Control+a")
    page.keyboard.type("qwen3-1")
    expect(page.get_by_role("listbox").get_by_role("option")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".verdict")).to_contain_text("Qwen3-14B")
    settle(page)
    tab_to(page, "Copy launch command")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Copy launch command")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.get_by_label("launch command", exact=True).inner_text()
    assert "Qwen3-14B" in copied


def test_nothing_moves_while_an_answer_comes(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio)
    places = "() => ['memory', 'degrees', 'launch'].map(id => document.getElementById(id).getBoundingClientRect().top)"
    before = page.evaluate(places)
    page.get_by_label("Requests at once", exact=True).fill("40")
    expect(page.locator(".verdict")).to_contain_text("40 at once")
    settle(page)
    assert page.evaluate(places) == before


def test_the_list_of_models_sorts_and_puts_one_into_the_question(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio)
    names = page.locator("table.fits tbody th")
    page.get_by_role("button", name="Model", exact=True).click()
    found = names.all_inner_texts()
    assert found == sorted(found, key=str.lower)
    page.get_by_label("Show those that do not").check()
    assert names.count() > len(found)
    page.get_by_role("button", name="Qwen3-8B", exact=True).click()
    expect(page.locator(".verdict")).to_contain_text("Qwen3-8B on")


def test_the_question_is_still_there_after_a_look_at_another_view(studio: str, new_page: NewPage) -> None:
    page = new_page()
    open_plan(page, studio, "#/plan?model=Qwen3-14B")
    page.get_by_role("link", name="Layout").click()
    page.get_by_role("link", name="Plan").click()
    expect(page.locator(".verdict")).to_contain_text("Qwen3-14B on")
