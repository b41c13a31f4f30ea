"""Processes that may hang: they get a time, then they and theirs are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parents[1]


def run_all(commands: list[list[str]], folder: Path, seconds: float) -> list[str]:
    """Run Python modules side by side, each with its arguments; what each printed, once all have ended well."""
    found = [str(HERE / "src"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(found)}
    outputs = [folder / f"output-{index}" for index in range(len(commands))]
    processes = []
    for command, output in zip(commands, outputs, strict=True):
        with output.open("w") as file:
            line = [sys.executable, "-m", *command]
            processes.append(
                subprocess.Popen(line, env=variables, stdout=file, stderr=file, cwd=HERE, start_new_session=True)
            )
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + 5)  # one has failed: the others wait for it in vain
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    texts = [output.read_text() for output in outputs]
    told = "\n".join(
        f"--- {index}: status {each.returncode}\n{text}"
        for index, (each, text) in enumerate(zip(processes, texts, strict=True))
    )
    assert not any(process.returncode for process in processes), told
    return texts
