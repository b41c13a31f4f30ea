"""An engine of two ranks that stays until it is ended: `python -m tests.runtime.lasting_engine FOLDER`."""

from __future__ import annotations

import sys
import time

from phalanx import LLM
from phalanx.runtime.executor import Executor

if __name__ == "__main__":
    runner = LLM(sys.argv[1], tp=2, progress=False).engine.runner
    assert isinstance(runner, Executor)
    print(runner.workers.processes[1].pid, flush=True)
    time.sleep(600)
