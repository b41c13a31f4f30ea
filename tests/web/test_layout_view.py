# ruff: noqa: RUF001, RUF002  (the page writes ranges with a dash and shapes with a times sign)
"""The picture of a split: the same numbers as `Layout`, stepped through by key and by button."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from phalanx.models import catalog
from phalanx.spec import Layout
from tests.web.browser import NewPage, check_accessible, check_on_both
from tests.web.scripted import ScriptedServer, scripted_server

pytestmark = pytest.mark.slow

LAST = 11


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server("house-model") as started:
        yield started


def opened(page: Page, server: ScriptedServer, query: str) -> Page:
    page.goto("about:blank")
    page.goto(f"{server.url}#/layout?{query}")
    expect(page.get_by_role("heading", name="What every rank holds")).to_be_visible()
    return page


def held(page: Page, kind: str) -> list[str]:
    """A column of the table, as `6 (0–5)`."""
    return page.locator(f"td[data-dealt={kind}]").all_inner_texts()


def expected(layout: Layout, kind: str) -> list[str]:
    def told(part: range) -> str:
        last = f"–{part.stop - 1:,}" if len(part) > 1 else ""
        return f"{len(part):,} ({part.start:,}{last})"

    return [told(getattr(shard, kind)) for shard in layout.shards]


def step(page: Page) -> Locator:
    return page.locator("[aria-current=step]")


@pytest.mark.parametrize(
    ("model", "tp", "number_format", "marked"),
    [
        ("SmolLM2-135M", 2, "bf16", ["uneven", "uneven"]),
        ("Qwen2.5-72B", 4, "fp8", ["uneven"]),
        ("gpt-oss-120b", 8, "mxfp4", ["uneven"]),
        ("Qwen3-30B-A3B", 8, "bf16", ["copied"]),
    ],
)
def test_shown_is_what_layout_deals(
    new_page: NewPage, server: ScriptedServer, model: str, tp: int, number_format: str, marked: list[str]
) -> None:
    page = opened(new_page(), server, f"model={model}&tp={tp}&format={number_format}")
    layout = Layout(catalog.model(model).in_format(number_format), tp)
    kinds = ["query_heads", "kv_heads", "vocab", "expert_ffn" if layout.spec.moe else "ffn"]
    assert {kind: held(page, kind) for kind in kinds} == {kind: expected(layout, kind) for kind in kinds}
    assert page.locator("thead .tag").all_inner_texts() == marked


def test_uneven_heads_and_blocks_are_drawn_and_marked_in_words(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, "model=SmolLM2-135M&tp=2")
    heads = page.locator("[data-stage=qkv] .cell")
    assert [cell.locator(".head-cell.q").count() for cell in heads.all()] == [6, 3]
    assert [cell.locator(".head-cell.kv").count() for cell in heads.all()] == [2, 1]
    expect(heads.nth(0)).to_contain_text("Q 0–5 · KV 0–1")
    expect(heads.nth(0)).to_contain_text("uneven: more")
    expect(heads.nth(1)).to_contain_text("Q 6–8 · KV 2")
    expect(heads.nth(1)).to_contain_text("uneven: less")

    opened(page, server, "model=Qwen2.5-72B&tp=4&format=fp8")
    columns = page.locator("[data-stage=gate_up] .cell")
    assert [text.split(" =")[0] for text in columns.all_inner_texts()] == ["58 blocks"] * 3 + ["57 blocks"]
    widths = columns.locator(".slab").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert widths[3] / widths[0] == pytest.approx(57 / 58, abs=0.01)


def test_a_rank_and_its_neighbours_are_in_sight_where_there_are_many(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, "model=Qwen3-30B-A3B&tp=8&rank=5")
    ranks = page.get_by_role("group", name="Rank to look at").get_by_role("button")
    assert [text.split()[1] for text in ranks.all_inner_texts()] == ["4", "5", "6", "7"]
    expect(page.locator("[data-stage=qkv] .cell").nth(1)).to_contain_text("KV also on rank 4")
    page.locator("tbody").get_by_role("button", name="Rank 0").click()
    expect(ranks.first).to_contain_text("Rank 0")
    expect(page.locator("[data-stage=gate_up] .cell").first).to_contain_text("of each of 128 experts")
    assert page.locator("[data-stage=gate_up] .cell").first.locator(".expert").count() == 64


def test_the_layer_is_stepped_through_by_keys_and_buttons(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, "model=Llama-3.3-70B&tp=4&tokens=64")
    expect(page.locator(".stage")).to_have_count(LAST)
    expect(step(page)).to_have_count(0)
    page.keyboard.press("ArrowRight")
    expect(step(page)).to_contain_text("Input and norm")
    page.keyboard.press("ArrowRight")
    expect(step(page)).to_contain_text("Column-parallel QKV")
    detail = page.locator(".step-detail")
    expect(detail).to_contain_text("8,192 × 8,192 → 2,048 × 8,192")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(step(page)).to_contain_text("All-reduce")
    expect(detail).to_contain_text("1 MiB (64 × 8,192 × bf16)")
    expect(detail).to_contain_text("160 all-reduces")
    page.keyboard.press("ArrowLeft")
    expect(step(page)).to_contain_text("Row-parallel O")
    assert "step=3" in page.url
    page.get_by_role("button", name="Next", exact=True).click()
    expect(step(page)).to_contain_text("All-reduce")
    page.locator("[data-stage=next]").get_by_role("button").click()
    expect(page.get_by_role("button", name="Next", exact=True)).to_be_disabled()
    page.keyboard.press("ArrowRight")
    expect(step(page)).to_contain_text("To layer 1")


def test_it_plays_to_the_end_on_its_own_and_pauses(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(reduced_motion="no-preference"), server, "model=SmolLM2-135M&tp=2&step=8")
    page.get_by_label("Speed").select_option("4")
    page.get_by_role("button", name="Play").click()
    expect(step(page)).to_contain_text("To layer 1")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.get_by_role("button", name="Play").click()
    expect(step(page)).not_to_contain_text("To layer 1")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_nothing_moves_for_those_who_asked_for_that(new_page: NewPage, server: ScriptedServer) -> None:
    moving = "() => document.getAnimations().length"
    for asked, still in (("reduce", True), ("no-preference", False)):
        page = opened(new_page(reduced_motion=asked), server, "model=SmolLM2-135M&tp=2&step=4")
        assert (page.evaluate(moving) == 0) is still


def test_the_address_carries_all_that_is_shown(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, "")
    page.get_by_label("Model", exact=True).select_option("DeepSeek-V3")
    expect(page.get_by_role("heading", name="Layer 0 of DeepSeek-V3")).to_be_visible()
    page.get_by_role("radio", name="8", exact=True).check()
    page.get_by_label("GPU", exact=True).select_option("B200")
    page.get_by_label("Tokens in the step").fill("8")
    page.get_by_label("Layer:").fill("10")
    page.keyboard.press("Escape")
    page.locator("[data-stage=sum1]").get_by_role("button").click()
    expect(page.locator(".step-detail")).to_contain_text("3.5 MiB (256 × 7,168 × bf16)")
    other = opened(new_page(), server, page.url.split("?", 1)[1])
    for place in (".step-detail", ".picture", "table"):
        assert other.locator(place).inner_text() == page.locator(place).inner_text()
    expect(other.get_by_role("heading", name="Layer 10 of DeepSeek-V3")).to_be_visible()


def test_the_served_model_comes_first(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, "")
    expect(page.get_by_label("Model", exact=True)).to_have_value("house-model")
    expect(page.get_by_role("radio", name="2", exact=True)).to_be_checked()
    assert held(page, "query_heads") == expected(Layout(catalog.model("SmolLM2-135M"), 2), "query_heads")


def test_a_degree_that_cannot_be_says_why(new_page: NewPage, server: ScriptedServer) -> None:
    page = opened(new_page(), server, "model=SmolLM2-135M&tp=2")
    page.get_by_role("radio", name="16 (not for this model)").check()
    expect(page.get_by_role("alert")).to_have_text("TP=16, but the model has 9 query heads to deal. Use TP <= 9.")
    page.get_by_role("radio", name="3", exact=True).check()
    expect(page.get_by_role("alert")).to_have_count(0)
    assert held(page, "kv_heads") == ["1 (0)", "1 (1)", "1 (2)"]


@pytest.mark.parametrize("model", ["Qwen3-Next-80B-A3B", "DeepSeek-V3", "gpt-oss-20b", "Mixtral-8x7B", "Llama-4-Scout"])
def test_every_kind_of_layer_can_be_stepped_through(new_page: NewPage, server: ScriptedServer, model: str) -> None:
    page = opened(new_page(), server, f"model={model}&tp=4&layer=3")
    for number in range(1, LAST + 1):
        page.keyboard.press("ArrowRight")
        expect(page.locator(".step-detail")).to_contain_text(f"Step {number} of {LAST}")
        assert not {"NaN", "undefined", "Infinity", "–∞"} & set(page.locator(".step-detail").inner_text().split())


def test_the_studio_shows_layouts_too(new_page: NewPage, studio: str) -> None:
    page = new_page()
    page.goto(f"{studio}#/layout?model=SmolLM2-135M&tp=2")
    expect(page.locator("td[data-dealt=kv_heads]").first).to_have_text("2 (0–1)")


def test_axe_finds_nothing_serious(new_page: NewPage, server: ScriptedServer) -> None:
    page = new_page()
    for query in ("model=SmolLM2-135M&tp=2", "model=DeepSeek-V3&tp=8&step=6&layer=9", "model=Qwen2.5-72B&tp=4&step=1"):
        opened(page, server, query)
        check_on_both(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out sideways"
    page.goto("about:blank")
    page.goto(f"{server.url}#/layout?model=SmolLM2-135M&tp=16")
    expect(page.get_by_role("alert")).to_be_visible()
    check_on_both(page)


def test_a_rank_that_does_not_fit_and_replicas_show(server: ScriptedServer, new_page: NewPage) -> None:
    page = opened(new_page(), server, "model=Llama-3.3-70B&tp=1&format=bf16")
    expect(page.get_by_role("alert")).to_contain_text("No rank fits: rank 0 holds")
    page.get_by_label("Format").select_option("awq")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_label("GPUs in all").select_option("4")
    expect(page.get_by_label("Replicas").locator("li")).to_have_count(4)
    check_accessible(page)
