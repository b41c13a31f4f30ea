"""Routes for operators, in this process: who may ask them, and what they tell."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from phalanx.server.guard import Guard
from phalanx.server.keys import KeyRing
from phalanx.text.tokenizer import Tokenizer
from tests.server.inline import default_model
from tests.server.test_app import Place


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return default_model()[1]


@pytest.fixture
def place(tokenizer: Tokenizer) -> Place:
    return Place(tokenizer)


def test_tokenizer_info_renders_what_the_tokenizer_renders(place: Place, tokenizer: Tokenizer) -> None:
    """As lm_eval does with it: the chat template and the special tokens are all that is needed."""
    from transformers.utils.chat_template_utils import render_jinja_template

    told = place.ask("GET", "/tokenizer_info").json()
    messages = [{"role": "user", "content": "Hello"}]
    specials = {name: text for name, text in told.items() if name.endswith("_token")}
    (text,), _ = render_jinja_template([messages], chat_template=told["chat_template"], **specials)
    assert text == tokenizer.backend.apply_chat_template(messages, tokenize=False)
    assert (told["eos_token"], told["add_bos_token"], told["model_max_length"]) == ("<|im_end|>", False, 8192)


def test_server_info_tells_sizes_and_no_paths(place: Place) -> None:
    told = place.ask("GET", "/server_info").json()
    assert told["models"] == ["tiny"]
    assert told["engine"]["tp"] == 1
    assert told["started"]["max_model_len"] == 64
    assert "model" not in told["engine"]
    assert "/" not in str(told)


class Page(HTMLParser):
    """Every address a page names, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own_icon = tag == "link" and dict(attrs) == {"rel": "icon", "href": "/cockpit.svg"}
        assert own_icon or tag not in ("script", "link", "img", "iframe")
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def test_docs_name_every_route_and_fetch_nothing(place: Place) -> None:
    answer = place.ask("GET", "/docs")
    page = Page(answer.text)
    assert all(address.startswith("#") or address in ("/openapi.json", "/cockpit.svg") for address in page.addresses)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    described = place.ask("GET", "/openapi.json")
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', described.text))
    assert {"ChatRequest", "ResponsesRequest", "MessagesRequest", "DetokenizeRequest"} <= named
    assert named <= described.json()["components"]["schemas"].keys()
    for path, operations in described.json()["paths"].items():
        assert path in page.words
        for operation in operations.values():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                if "$ref" in schema:
                    assert f"#{schema['$ref'].rpartition('/')[2]}" in page.addresses
    for field in ("temperature", "structured_outputs", "previous_response_id", "stop_sequences"):
        assert field in page.words


def test_a_reset_of_the_cache_is_for_the_engine(place: Place) -> None:
    resets: list[bool] = []
    place.engine.reset_prefixes = lambda: resets.append(True)  # type: ignore[attr-defined]
    answer = place.ask("POST", "/reset_prefix_cache")
    assert (answer.status_code, answer.json(), resets) == (200, {"status": "reset"}, [True])
    assert place.ask("GET", "/reset_prefix_cache").status_code == 405


def test_keys_with_priorities_are_served_by_them_and_others_in_equal_parts(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    asked: list[Any] = []
    for lines in ("one\ntwo", "one priority=3\ntwo"):
        file = tmp_path / "keys"
        file.write_text(lines)
        ring = KeyRing([], file)
        place = Place(tokenizer, keys=ring)
        place.app = Guard(place.app, ring, max_body=10_000)
        for key in ("one", "two"):
            body = {"prompt": "a", "priority": -7}
            assert place.ask("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"}).status_code == 200
        asked += [(each.params.priority, bool(each.owner)) for each in place.engine.asked]
    assert asked == [(-7, True), (-7, True), (3, False), (0, False)]
