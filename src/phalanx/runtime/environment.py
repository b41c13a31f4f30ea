"""Which environment variables a rank on another machine gets: those named here, and no others.

Whoever starts an engine or a Ray node may hold tokens and cloud keys in the environment; no rank needs them.
"""

from __future__ import annotations

from collections.abc import Mapping

_TUNING = ("NCCL_", "GLOO_", "UCX_", "MKL_", "KMP_", "NVPL_", "DNNL_", "ONEDNN_", "TORCH_", "PYTORCH_")
"""Prefixes of what tunes libraries: taken from the rank's own machine, else from the engine's."""
_SENT = ("OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE")
"""From the engine's machine. Not OMP_NUM_THREADS of the rank's own: Ray sets it to 1."""
_OWN = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR",
)
"""From the rank's own machine."""


def sent(variables: Mapping[str, str]) -> dict[str, str]:
    """What of the engine's environment goes to other machines."""
    return {name: value for name, value in variables.items() if name in _SENT or name.startswith(_TUNING)}


def of_rank(own: Mapping[str, str], received: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment: its machine's word goes before the engine's. What is received is not trusted either."""
    kept = {name: value for name, value in own.items() if name in _OWN or name.startswith(_TUNING)}
    return sent(received) | kept
