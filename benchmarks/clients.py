"""Real clients against a real server: each SDK in an environment of its own, at its newest version.

    python benchmarks/clients.py                     # serves the default model, then asks with all clients
    python benchmarks/clients.py --url http://HOST:PORT --model NAME --only openai,litellm

Needs a package index, and npm for those of it. Prints the table of docs/clients.md. Environments are kept in --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "client_scripts"
CLIENTS: dict[str, tuple[str, list[str]]] = {
    "openai": ("with_openai.py", ["openai"]),
    "anthropic": ("with_anthropic.py", ["anthropic"]),
    "langchain-openai": ("with_langchain.py", ["langchain-openai"]),
    "litellm": ("with_litellm.py", ["litellm", "mcp"]),
    "instructor": ("with_instructor.py", ["instructor"]),
    "pydantic-ai": ("with_pydantic_ai.py", ["pydantic-ai-slim[openai]"]),
    "openai-agents": ("with_agents.py", ["openai-agents"]),
    "ai (AI SDK)": ("with_ai_sdk.mjs", ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"]),
}
_START_S, _CLIENT_S = 300, 600


@dataclass
class Outcome:
    """Of one client: its version, and what went wrong in each check."""

    client: str
    version: str
    problems: dict[str, str | None]

    def row(self) -> str:
        held = [check for check, problem in self.problems.items() if problem is None]
        failed = [f"{check}: {problem}" for check, problem in self.problems.items() if problem is not None]
        counted = f"{len(held)} of {len(self.problems)}"
        return f"| {self.client} {self.version} | {counted} | {', '.join(held) or '-'} | {'; '.join(failed) or '-'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="A server that runs. Default: one of the default model is started.")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--key", default="none")
    parser.add_argument("--only", default="", help="Clients, with commas.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "phalanx-clients")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(CLIENTS)
    for client in chosen:
        if client not in CLIENTS:
            parser.error(f"{client!r} is none of {', '.join(CLIENTS)}")
    with _server(options.url) as url:
        told = os.environ | {"PHALANX_URL": url, "PHALANX_MODEL": options.model, "PHALANX_KEY": options.key}
        print("| client | checks | works | fails |\n|---|---|---|---|", flush=True)
        outcomes = []
        for client in chosen:
            outcomes.append(_ask(client, options.folder, told))
            print(outcomes[-1].row(), flush=True)
    return int(any(problem for outcome in outcomes for problem in outcome.problems.values()))


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        command = [sys.executable, "-m", "phalanx.cli", "serve", "--port", "0"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _address(process, Path(log.name))
        finally:
            process.terminate()
            process.wait(60)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"serves \S+ at (\S+)/v1 ", log.read_text())
        if found:
            return found[1]
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def _ask(client: str, folder: Path, environment: dict[str, str]) -> Outcome:
    script, packages = CLIENTS[client]
    home = folder / re.sub(r"\W+", "-", client).strip("-")
    try:
        if script.endswith(".mjs"):
            command, version = _node(home, script, packages)
        else:
            command, version = _python(home, script, packages)
    except (OSError, subprocess.CalledProcessError) as error:
        return Outcome(client, "", {"install": str(error)[:200]})
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=_CLIENT_S)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    (home / "log").write_text(done.stderr)
    problems = {each["check"]: each["problem"] for each in told}
    if done.returncode:
        problems["the script itself"] = done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else "ended"
    return Outcome(client, version, problems)


def _python(home: Path, script: str, packages: list[str]) -> tuple[list[str], str]:
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--upgrade", *packages], check=True)
    shown = subprocess.run([*pip, "show", packages[0].partition("[")[0]], capture_output=True, text=True, check=True)
    version = re.search(r"^Version: (\S+)", shown.stdout, re.MULTILINE)
    return [str(python), str(SCRIPTS / script)], version[1] if version else ""


def _node(home: Path, script: str, packages: list[str]) -> tuple[list[str], str]:
    """A module finds its packages beside itself: the script is copied there."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "package.json").write_text('{"private": true}')
    subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", *packages], cwd=home, check=True)
    shutil.copy(SCRIPTS / script, home)
    version = json.loads((home / "node_modules" / packages[0] / "package.json").read_text())["version"]
    return ["node", script], str(version)


if __name__ == "__main__":
    sys.exit(main())
