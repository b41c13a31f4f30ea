"""What single kernels reach: `python benchmarks/kernel_shares.py DATA` fits the shares of `cost/kernels.toml`.

DATA holds tables of kernel times (GEMM, attention, experts) of several cards. An operation's time is a constant, and
what it reads or multiplies at a share of the data sheet; of experts that multiply, also the activations of their
tokens, passed on so many times. Rows far off count less.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from phalanx.spec.machine import Gpu

CARDS = {
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200-SXM",
    "b200_sxm": "B200",
    "rtx_pro_6000_server": "RTX-PRO-6000",
    "a100_sxm": "A100-SXM-80GB",
    "l40s": "L40S",
}
LINEAR = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
"""Of block FP8 the tables time the conversion of inputs on the host: it says nothing about reading."""
EXPERTS = {"bfloat16": "bf16", "fp8_block": "fp8", "int4_wo": "int4", "nvfp4": "nvfp4", "w4a16_mxfp4": "mxfp4"}
BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625, "int4": 0.516, "mxfp4": 0.53}
WIDENED = ("int4", "mxfp4")
Row = dict[str, str]
TOKENS_TO_MULTIPLY = 256
"""For an expert, from which on it is held by its products and not by reading its weights."""
Sample = tuple[float, ...]
"""Seconds at the data sheet's limit (or limits, where there are two), and as measured."""


def main() -> None:
    folder = Path(sys.argv[1])
    for prefix, name in CARDS.items():
        gpu = Gpu.named(name)
        print(name)
        gemms = list(read(folder, prefix, "gemm"))
        for dtype, number_format in LINEAR.items():
            of_format = [row for row in gemms if row["gemm_dtype"] == dtype]
            say(f"linear_read {number_format}", linear(of_format, number_format, gpu, (1, 128), 2**22))
            say(f"linear_compute {number_format}", linear(of_format, number_format, gpu, (1024, 8192), 2**20))
        experts = list(read(folder, prefix, "moe"))
        for dtype, number_format in EXPERTS.items():
            of_format = [row for row in experts if row["moe_dtype"] == dtype]
            say(f"expert_read {number_format}", expert_reads(of_format, number_format, gpu))
            say(f"expert_compute {number_format}", expert_products(of_format, number_format, gpu))
        say("cache_read", cache_reads(read(folder, prefix, "generation_attention"), gpu))
        say("prompt_attention", prompts(read(folder, prefix, "context_attention"), gpu))


def read(folder: Path, prefix: str, table: str) -> Iterator[Row]:
    found = [
        *folder.glob(f"kernels/{prefix}_vllm*_{table}.csv.gz"),
        *folder.glob(f"{prefix}_vllm*_{table}_perf.csv.gz"),
    ]
    if found:
        with gzip.open(found[0], "rt") as lines:
            yield from csv.DictReader(lines)


def say(what: str, samples: Iterator[Sample]) -> None:
    taken = np.array(list(samples))
    if len(taken):
        constant, slopes, off = fit(taken[:, :-1], taken[:, -1])
        passes = "".join(f", {slope:.2f} passes" for slope in slopes[1:])
        told = f"{1 / slopes[0]:5.2f} of the limit after {1e6 * constant:6.1f} us{passes}"
        print(f"  {what:24s} {told} (median error {off:.0%})")


def fit(limits: np.ndarray, seconds: np.ndarray) -> tuple[float, np.ndarray, float]:
    """(constant, slopes, median error) of seconds = constant + limits x slopes, by relative errors."""
    columns, weight = np.column_stack([np.ones_like(seconds), limits]), 1 / seconds
    for _ in range(30):
        found, *_ = np.linalg.lstsq(columns * weight[:, None], seconds * weight, rcond=None)
        off = (columns @ found - seconds) / seconds
        weight = 1 / seconds / np.sqrt(1 + (off / 0.15) ** 2)
    return found[0], found[1:], float(np.median(np.abs(off)))


def seconds_of(row: Row) -> float:
    return 1e-3 * float(row["latency"])


def linear(rows: list[Row], number_format: str, gpu: Gpu, span: tuple[int, int], least: int) -> Iterator[Sample]:
    """Few rows: bytes at the bandwidth; many: FLOPs at the peak."""
    peak = gpu.peak("fp4" if number_format == "nvfp4" else number_format)
    for row in rows:
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        if span[0] <= m <= span[1] and n * k >= least and min(n, k) >= 1024 and max(n, k) < 30000:
            size = n * k * BYTES[number_format] + m * k * BYTES[number_format] + 2 * m * n
            yield (size / gpu.bandwidth if span[1] < 1024 else 2 * m * n * k / peak), seconds_of(row)


def expert_rows(rows: list[Row], wanted: Callable[[int], bool]) -> Iterator[tuple[Row, int, int, int, float]]:
    """(row, tokens, experts, chosen, weights of an expert) where experts are not dealt whole."""
    for row in rows:
        tokens, experts, chosen = int(row["num_tokens"]), int(row["num_experts"]), int(row["topk"])
        is_dealt = row["moe_ep_size"] != "1" or row["distribution"] != "power_law_1.01"
        if wanted(tokens) and not is_dealt:
            yield (
                row,
                tokens,
                experts,
                chosen,
                3.0 * int(row["hidden_size"]) * int(row["inter_size"]) / int(row["moe_tp_size"]),
            )


def expert_reads(rows: list[Row], number_format: str, gpu: Gpu) -> Iterator[Sample]:
    for row, tokens, experts, chosen, weights in expert_rows(rows, lambda tokens: tokens <= 128):
        if experts < 32:
            continue
        touched = experts * (1 - (1 - chosen / experts) ** tokens)
        yield touched * weights * BYTES[number_format] / gpu.bandwidth, seconds_of(row)


def expert_products(rows: list[Row], number_format: str, gpu: Gpu) -> Iterator[Sample]:
    compute = "bf16" if number_format in WIDENED else "fp4" if number_format == "nvfp4" else number_format
    for row, tokens, experts, chosen, weights in expert_rows(rows, lambda tokens: tokens >= 2048):
        if tokens * chosen >= TOKENS_TO_MULTIPLY * experts:
            width = int(row["inter_size"]) / int(row["moe_tp_size"])
            passed_on = 2 * 3 * tokens * chosen * (int(row["hidden_size"]) + width)
            products = 2 * weights * tokens * chosen / gpu.peak(compute)
            yield products, passed_on / gpu.bandwidth, seconds_of(row)


def cache_reads(rows: Iterator[Row], gpu: Gpu) -> Iterator[Sample]:
    for row in rows:
        size = 4 * 128 * int(row["batch_size"]) * (int(row["step"]) + 1) * int(row["num_key_value_heads"])
        is_plain = (
            row["kv_cache_dtype"] == "bfloat16" and row.get("window_size", "0") == "0" and row["head_dim"] == "128"
        )
        is_usual = int(row["num_key_value_heads"]) <= 8 and int(row["batch_size"]) <= 512 and int(row["step"]) >= 256
        if is_plain and is_usual and size > 1e6:
            yield size / gpu.bandwidth, seconds_of(row)


def prompts(rows: Iterator[Row], gpu: Gpu) -> Iterator[Sample]:
    for row in rows:
        batch, length = int(row["batch_size"]), int(row["isl"])
        is_plain = (
            row["kv_cache_dtype"] == "bfloat16" and row.get("window_size", "0") == "0" and row["head_dim"] == "128"
        )
        if is_plain and 512 <= length <= 16384 and batch * length <= 32768:
            yield 2.0 * batch * int(row["num_heads"]) * length**2 * 128 / gpu.peak("bf16"), seconds_of(row)


if __name__ == "__main__":
    main()
