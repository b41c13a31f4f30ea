"""What the documents show exists: every command with its options, every file and heading that they link to."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from phalanx.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_COMMAND = re.compile(r"^(?:\$ |[A-Z_]+=\S+ |sudo |nohup |\S*/bin/)*phalanx (.*)$")
_CODE = re.compile(r"^```[^\n]*\n(.*?)^```|^((?: {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ENDS = ("|", "&", "&&", ">", "2>", ";", "<")


def commands(text: str) -> list[str]:
    """Command lines of the code blocks, each on one line, without prompts, comments and what they are piped into."""
    found = []
    for fenced, indented in _CODE.findall(text):
        joined = (fenced or indented).replace("\\\n", " ")
        for line in joined.splitlines():
            matched = _COMMAND.match(line.strip())
            if matched:
                found.append(matched[1])
    return found


def words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    taken = []
    for word in lexer:
        if word in _ENDS:
            break
        taken.append(word)
    return taken


@cache
def phalanx() -> Any:
    """The command with all of its parts, whose making takes 40 ms."""
    return typer.main.get_command(app)


def check(line: str) -> None:
    """The command and its options exist; what the values mean is not looked at."""
    command = phalanx()
    given = words(line)
    while hasattr(command, "commands") and given and not given[0].startswith("-"):
        name = given.pop(0)
        assert name in command.commands, f"phalanx has no {name!r}"
        command = command.commands[name]
    if command.name == "show":
        command = phalanx().commands["serve"]  # takes serve's options
    known = {"--help"}.union(*([*each.opts, *each.secondary_opts] for each in command.params))
    for word in given:
        option = word.partition("=")[0]
        assert not re.match("--[a-z]", option) or option in known, f"{command.name} has no {option}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_links_of_a_document_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for line in commands(text):
        try:
            check(line)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{document.name}: phalanx {line}: {error}")
    for link in _LINK.findall(text):
        if "://" not in link and not link.startswith("mailto:"):
            file, _, heading = link.partition("#")
            target = (document.parent / file).resolve() if file else document
            assert target.exists(), f"{document.name} links to {link}"
            assert not heading or heading in headings(target), f"{document.name} links to {link}"


def headings(document: Path) -> set[str]:
    """As the hub makes anchors of them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_what_does_not_exist_is_found() -> None:
    assert commands("    $ phalanx serve --tp 2 \\\n        --port 8000 | tee log\n") == [
        "serve --tp 2          --port 8000 | tee log"
    ]
    check("serve --tp 2 --port 8000 | tee log")
    with pytest.raises(AssertionError, match="--no-such"):
        check("serve --no-such")
    with pytest.raises(AssertionError, match="sirve"):
        check("sirve")
