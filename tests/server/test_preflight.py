"""What the doctor refuses ends the start, and leaves no process behind."""

from __future__ import annotations

from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from phalanx.errors import ConfigError
from phalanx.runtime.config import EngineConfig
from phalanx.server.options import ServeOptions
from phalanx.server.serve import serve


def test_a_refusal_ends_the_server_and_its_engine(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []
    forkserver.ensure_running()  # of all tests, by which the engine is started
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def refuse(tp: int, device: str) -> None:
        asked.append((tp, device))
        raise ConfigError("too_few_gpus", "TP=2, 1 visible.", "Use TP <= 1")

    monkeypatch.setattr("phalanx.server.serve.preflight", refuse)
    with pytest.raises(ConfigError, match="Use TP <= 1"):
        serve(EngineConfig(model=str(tiny_llama), tp=2), ServeOptions(port=0))
    assert asked == [(2, "auto")]
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before
