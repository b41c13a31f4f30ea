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
for threads in (len(cores) - 1, len(cores)):
    torch.set_num_threads(threads)
    keep_to_own_cores()
    masks = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
    print(sorted(mask[0] for mask in masks if len(mask) == 1) == sorted(cores))
"""


def test_with_a_thread_for_every_core_each_has_its_own() -> None:
    """And with fewer, none."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one core")
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True"], ran.stderr
