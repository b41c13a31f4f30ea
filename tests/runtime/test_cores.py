"""Compute threads keep to cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
import torch
from phalanx.runtime.cores import keep_to_own_cores

cores = os.sched_getaffinity(0)
torch.set_num_threads(int({threads}))
keep_to_own_cores()
masks = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
print(sorted(mask[0] for mask in masks if len(mask) == 1) == sorted(cores))
"""


@pytest.mark.parametrize(("threads", "kept"), [("len(cores)", True), ("len(cores) - 1 or 1", False)])
def test_with_a_thread_for_every_core_each_has_its_own(threads: str, kept: bool) -> None:
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one core")
    ran = subprocess.run([sys.executable, "-c", PROGRAM.format(threads=threads)], capture_output=True, text=True)
    assert ran.stdout.strip() == str(kept), ran.stderr
