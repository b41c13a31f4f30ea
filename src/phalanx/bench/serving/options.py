"""What `phalanx bench serve` was asked to do, checked before anything is sent."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from phalanx.errors import ConfigError

DATASETS = ("random", "sharegpt", "shared-prefix")
ENDPOINTS = ("completions", "chat")
ARRIVALS = ("poisson", "gamma", "constant")
BOUNDED = ("ttft", "tpot", "e2el")
_OWN_FIELDS = {"stream", "stream_options", "n"}
_DEFAULT_OUTPUT_LEN = 128


@dataclass(frozen=True)
class Options:
    """Every flag of the command. What needs parsing is a property; all of it has been parsed once on creation."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: str = "completions"
    dataset: str = "random"
    dataset_path: Path | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    input_len: int = 1024
    output_len: int | None = None
    range_ratio: float = 1.0
    prefix_len: int = 1024
    agents: int = 8
    num_prompts: int | None = None
    warmup: int = 0
    request_rate: float = math.inf
    arrival: str | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    goodput: str | None = None
    percentiles: str = "50,95,99"
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    timeout: float = 3600.0
    gpus: int = 1
    seed: int = 0
    json_file: Path | None = None
    plot_file: Path | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_files()
        _ = self.root, self.bounds, self.ranks, self.extra_fields, self.headers

    @property
    def requests(self) -> int:
        """How many are measured."""
        if self.num_prompts is not None:
            return self.num_prompts
        return 100 if self.max_concurrency is None else 10 * self.max_concurrency

    @property
    def answer_len(self) -> int:
        """Tokens out, where the dataset does not say."""
        return _DEFAULT_OUTPUT_LEN if self.output_len is None else self.output_len

    @property
    def gap_shape(self) -> float:
        """Of the gamma distribution of the gaps between requests."""
        if self.arrival == "constant":
            return math.inf
        return 1.0 if self.burstiness is None else self.burstiness

    @cached_property
    def root(self) -> str:
        """The server's address without the `/v1` that clients of OpenAI write."""
        if not re.fullmatch(r"https?://[^/\s].*", self.url):
            raise _bad(f"--url is {self.url!r}.", "Write http://HOST:PORT.")
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Milliseconds by name: what a request must meet to count as good."""
        if self.goodput is None:
            return {}
        parts = [part.partition(":") for part in self.goodput.split(",")]
        bounds = {name.strip(): _number(value) for name, _, value in parts}
        if len(bounds) < len(parts) or not all(name in BOUNDED and 0 < ms < math.inf for name, ms in bounds.items()):
            raise _bad(
                f"--goodput is {self.goodput!r}.", "Write bounds in ms on ttft, tpot, e2el, as ttft:800,tpot:50."
            )
        return bounds

    @cached_property
    def ranks(self) -> tuple[float, ...]:
        """The percentiles to tell."""
        ranks = tuple(_number(part) for part in self.percentiles.split(","))
        if not all(0 < rank <= 100 for rank in ranks):
            raise _bad(f"--percentiles is {self.percentiles!r}.", "Write numbers over 0 and up to 100, as 50,95,99.")
        return ranks

    @cached_property
    def extra_fields(self) -> dict[str, Any]:
        """Fields for the body of every request."""
        try:
            fields = msgspec.json.decode(self.extra_body or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise _bad(f"--extra-body is no JSON object: {error}.", """Write it as '{"top_k": 5}'.""") from None
        if taken := _OWN_FIELDS & fields.keys():
            raise _bad(
                f"--extra-body sets {', '.join(sorted(taken))}.", "Leave that field out: measuring depends on it."
            )
        return fields

    @cached_property
    def headers(self) -> dict[str, str]:
        key = self.api_key
        if self.api_key_file is not None:
            if key is not None:
                raise _bad("Both --api-key and --api-key-file are given.", "Give one.")
            try:
                key = self.api_key_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise _bad(f"--api-key-file cannot be read: {error}.", "Name a text file with the key.") from None
        if key is None:
            return {}
        if not re.fullmatch(r"[!-~]+", key):
            raise _bad("The API key is empty or has blanks or control characters.", "Check how it was copied.")
        return {"Authorization": f"Bearer {key}"}

    def _check_choices(self) -> None:
        for flag, value, choices in (
            ("--dataset", self.dataset, DATASETS),
            ("--endpoint", self.endpoint, ENDPOINTS),
            ("--arrival", self.arrival or ARRIVALS[0], ARRIVALS),
        ):
            if value not in choices:
                raise _bad(f"{flag} is {value!r}.", f"Choose one of {', '.join(choices)}.")
        if self.burstiness is not None and self.arrival in ("poisson", "constant"):
            raise _bad(
                f"--burstiness has no effect on {self.arrival} arrivals.", "Use --arrival gamma, or leave it out."
            )

    def _check_numbers(self) -> None:
        for flag, number, least in (
            ("--num-prompts", self.requests, 1),
            ("--warmup", self.warmup, 0),
            ("--input-len", self.input_len, 1),
            ("--output-len", self.answer_len, 1),
            ("--prefix-len", self.prefix_len, 1),
            ("--agents", self.agents, 1),
            ("--gpus", self.gpus, 1),
            ("--max-concurrency", self.max_concurrency, 1),
            ("--vocab-size", self.vocab_size, 1),
            ("--seed", self.seed, 0),
        ):
            if number is not None and number < least:
                raise _bad(f"{flag} is {number}.", f"Use {least} or more.")
        for flag, value in (
            ("--request-rate", self.request_rate),
            ("--burstiness", self.burstiness),
            ("--timeout", self.timeout),
        ):
            if value is not None and not value > 0:
                raise _bad(f"{flag} is {value:g}.", "Use a number over 0.")
        if not 0 <= self.temperature < math.inf or self.timeout == math.inf:
            found = f"--temperature is {self.temperature:g}, --timeout {self.timeout:g}."
            raise _bad(found, "Use numbers that are not negative and not infinite.")
        if not 0 < self.range_ratio <= 1:
            raise _bad(f"--range-ratio is {self.range_ratio:g}.", "Use a number over 0 and up to 1.")
        if self.dataset == "shared-prefix" and self.agents > self.requests:
            raise _bad(
                f"{self.agents} agents share {self.requests} requests.",
                "Lower --agents or raise --num-prompts: each agent sends at least one.",
            )

    def _check_files(self) -> None:
        if self.dataset == "sharegpt" and self.dataset_path is None:
            raise _bad("--dataset sharegpt has no file.", "Name it with --dataset-path FILE.json.")
        for flag, path in (("--json", self.json_file), ("--save-plot", self.plot_file)):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise _bad(f"{flag} is {path}.", "Name a file in a folder that exists.")
        if self.plot_file is None:
            return
        if self.plot_file.suffix != ".png":
            raise _bad(f"--save-plot is {self.plot_file}.", "Name a .png file.")
        if find_spec("matplotlib") is None:
            raise _bad("--save-plot needs matplotlib.", "pip install matplotlib")


def _bad(found: str, fix: str) -> ConfigError:
    return ConfigError("bad_option", found, fix)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
