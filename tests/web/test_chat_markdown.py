"""How text of a model is drawn: the usual Markdown as elements, everything else as the text it is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.web.browser import NewPage
from tests.web.scripted import ScriptedServer

pytestmark = pytest.mark.slow

Draw = Callable[[str], str]

TEXT = {"A", "BLOCKQUOTE", "CODE", "EM", "H3", "H4", "H5", "H6", "HR", "LI", "OL", "P", "PRE", "SPAN", "STRONG", "UL"}
ELEMENTS = TEXT | {"BUTTON", "DIV", "FIGCAPTION", "FIGURE", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR"}

SIMPLE = """element => {
    const simple = node => {
        if (node.nodeType === Node.TEXT_NODE) return node.data.replace(/[<>&]/g, c => `{${c}}`);
        if (node.tagName === "FIGCAPTION" || node.className === "md-address") return "";
        const tag = node.tagName.toLowerCase(), inner = [...node.childNodes].map(simple).join("");
        const note = tag === "a" ? ` ${node.getAttribute("href")}` : tag === "ol" ? ` ${node.start}` : "";
        const isNone = ["figure", "div"].includes(tag) || node.className.startsWith("hl-");
        return isNone ? inner : `<${tag}${note}>${inner}</${tag}>`;
    };
    return [...element.childNodes].map(simple).join("");
}"""


@pytest.fixture
def page(new_page: NewPage, server: ScriptedServer) -> Page:
    page = new_page()
    page.goto(f"{server.url}#/chat")
    return page


ASKED = """async text => {
    const next = () => new Promise(resolve => requestAnimationFrame(resolve));
    const is = name => each => each.ariaLabel === name || each.textContent === name;
    const find = (kind, name) => [...document.querySelectorAll(kind)].find(is(name));
    const key = (where, told) => where.dispatchEvent(new KeyboardEvent("keydown", { bubbles: true, ...told }));
    key(document.body, { code: "KeyN", key: "n", altKey: true });
    while (document.querySelector(".md")) await next();
    const box = find("textarea", "Message");
    box.value = text;
    box.dispatchEvent(new InputEvent("input", { bubbles: true }));
    await next();
    key(box, { code: "Enter", key: "Enter" });
    while (!find("button", "Regenerate")) await next();
}"""
"""Within the page: a driver that looks from outside looks ten times a second at most."""


@pytest.fixture
def draw(page: Page) -> Draw:
    """The elements of an answer that repeats the text, without their attributes."""
    expect(page.get_by_label("Message", exact=True)).to_be_visible()

    def drawn(text: str) -> str:
        page.evaluate(ASKED, text)
        return page.locator(".md").evaluate(SIMPLE)

    return drawn


CASES = {
    "two\nlines": "<p>two\nlines</p>",
    "one\n\ntwo": "<p>one</p><p>two</p>",
    "# Top\ntext": "<h3>Top</h3><p>text</p>",
    "###### Low": "<h6>Low</h6>",
    "#no heading": "<p>#no heading</p>",
    "a **b** c": "<p>a <strong>b</strong> c</p>",
    "a *b* _c_ __d__": "<p>a <em>b</em> <em>c</em> <strong>d</strong></p>",
    "***both***": "<p><strong><em>both</em></strong></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "**open": "<p>**open</p>",
    "*open and `open": "<p>*open and `open</p>",
    r"\*plain\* \`too\`": "<p>*plain* `too`</p>",
    "`a*b*` ``c`d``": "<p><code>a*b*</code> <code>c`d</code></p>",
    "`<b>&amp;</b>`": "<p><code>{<}b{>}{&}amp;{<}/b{>}</code></p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b": "<ol 3><li>a</li><li>b</li></ol>",
    "1. a\n\n2. b\n\nend": "<ol 1><li>a</li><li>b</li></ol><p>end</p>",
    "1. a\n- b": "<ol 1><li>a</li></ol><ul><li>b</li></ul>",
    "- a\n  ```\n  code\n  ```\n- b": "<ul><li>a<pre><code>code</code></pre></li><li>b</li></ul>",
    "> a\n> b\nc": "<blockquote><p>a\nb</p></blockquote><p>c</p>",
    "---": "<hr></hr>",
    "text\n```py\nx = 1 < 2\n\n# no heading\n```\nend": (
        "<p>text</p><pre><code>x = 1 {<} 2\n\n# no heading</code></pre><p>end</p>"
    ),
    "```\nnever ends\n**x**": "<pre><code>never ends\n**x**</code></pre>",
    "~~~\n```\n~~~": "<pre><code>```</code></pre>",
    "````\n```\n````": "<pre><code>```</code></pre>",
    "a | b\n--|--\n1 | 2 | 3": (
        "<table><thead><tr><th>a</th><th>b</th><th></th></tr></thead>"
        "<tbody><tr><td>1</td><td>2</td><td>3</td></tr></tbody></table>"
    ),
    "a | b": "<p>a | b</p>",
    "[a](https://x.test/y) b": "<p><a https://x.test/y>a</a> b</p>",
    "see https://x.test/y.": "<p>see <a https://x.test/y>https://x.test/y</a>.</p>",
    "[https://good.test](https://bad.test)": "<p><a https://bad.test/>https://good.test</a></p>",
    "[a](/relative) [b](mailto:x)": "<p>[a](/relative) [b](mailto:x)</p>",
    "![a](https://x.test/y.png)": "<p>!<a https://x.test/y.png>a</a></p>",
}


def test_marks_are_drawn_as_elements(draw: Draw) -> None:
    assert {text: draw(text) for text in CASES} == CASES


def test_a_link_says_where_it_leads_and_carries_nothing_along(draw: Draw, page: Page) -> None:
    draw("[https://good.test](https://bad.test/path)")
    link = page.locator(".md a")
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert link.get_attribute("target") == "_blank"
    expect(page.locator(".md")).to_contain_text("(https://bad.test/path)")


HOSTILE = [
    "<script>window.__pwned=1</script>",
    "<img src=x onerror=window.__pwned=1>",
    "[x](javascript:window.__pwned=1)",
    "[x](JaVaScRiPt:window.__pwned=1)",
    "[x](java\tscript:window.__pwned=1)",
    "[x](\x01javascript:window.__pwned=1)",
    "[x](data:text/html,<script>window.__pwned=1</script>)",
    "[x](vbscript:x) <javascript:window.__pwned=1>",
    "![x](x:onerror=window.__pwned=1)",
    '[x](https://x.test/"onmouseover="window.__pwned=1)',
    "```html\n<script>window.__pwned=1</script>\n```",
    "<svg onload=window.__pwned=1> <iframe srcdoc='<script>parent.__pwned=1</script>'>",
    "| <b onclick=window.__pwned=1>a | b |\n|---|---|\n| <style>*{display:none}</style> | c |",
]


FOUND = """e => {
    const all = [...e.querySelectorAll("*")];
    const attributes = all.flatMap(each => each.getAttributeNames());
    return [all.map(each => each.tagName), all.flatMap(each => each.href ?? []), attributes, window.__pwned ?? null];
}"""


def test_hostile_text_stays_text(draw: Draw, page: Page) -> None:
    for text in HOSTILE:
        draw(text)
        elements, links, attributes, pwned = page.locator(".md").evaluate(FOUND)
        assert set(elements) <= ELEMENTS, text
        assert all(link.startswith("https://x.test/") for link in links), text
        assert not [name for name in attributes if name.startswith("on") or name == "style"], text
        assert pwned is None, text


def test_no_letter_is_lost_or_doubled_whatever_the_marks(draw: Draw, page: Page) -> None:
    """Random marks around letters that no caption has: as many come out as went in, in their order."""
    chance = random.Random(7)
    marks = [
        "`",
        "```",
        "*",
        "**",
        "_",
        "[",
        "](",
        ")",
        "#",
        "# ",
        ">",
        "> ",
        "- ",
        "1. ",
        "|",
        "-|-",
        "\\",
        "\n",
        "\n\n",
    ]
    for _ in range(60):
        text = "q" + "".join(chance.choice([*marks, "q", "z", " ", "<", "&"]) for _ in range(chance.randint(5, 50)))
        draw(text)
        shown = page.locator(".md").evaluate("e => e.textContent.replaceAll('Copy', '')")
        assert [c for c in shown if c in "qz"] == [c for c in text if c in "qz"], text


def test_text_made_to_be_slow_is_not(draw: Draw) -> None:
    marks = ("*a ", "[", "> ", "- ", "**_", "[](", "`a", "1. ", "|-", "# ", "h")
    codes = (("js", "(x=>"), ("cpp", "a<"), ("xml", "<a "), ("python", "f'{"), ("yaml", "- "), ("sql", "a.("))
    code = [f"```{language}\n{mark * (9_000 // len(mark))}\n```" for language, mark in codes]
    for text in [mark * (20_000 // len(mark)) for mark in marks] + ["`" * 5001 + "a"] + code:
        assert draw(text), text[:10]


def test_code_is_told_apart_by_its_language_and_stays_the_text_it_is(draw: Draw, page: Page) -> None:
    codes = {
        "python": "def f(x):  # <b>\n    return 'é' + str(1)",
        "TS title=a.ts": "const x: number = 1; // no",
        "bash": 'echo "$HOME" | wc -l',
        "json": '{"a": [true, 1.5]}',
        "cuda": "__global__ void f(int *p) { p[0] = 1; }",
        "rust": 'fn main() { println!("{}", 1); }',
    }
    for language, code in codes.items():
        draw(f"```{language}\n{code}\n```")
        assert page.locator(".md pre").evaluate("e => e.textContent") == code
        colours = page.locator(".md pre span").evaluate_all("all => all.map(e => getComputedStyle(e).color)")
        assert len(set(colours)) >= 2, language
    for plain in ("```\ndef f(): pass\n```", "```klingon\ndef f(): pass\n```", "```py\n" + "x = 1; " * 2000 + "\n```"):
        draw(plain)
        assert page.locator(".md pre span").count() == 0


def test_code_can_be_copied(new_page: NewPage, server: ScriptedServer) -> None:
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    page.goto(f"{server.url}#/chat")
    page.get_by_label("Message", exact=True).fill("```py\nprint(1)\n```")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy this code").click()
    expect(page.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)"
