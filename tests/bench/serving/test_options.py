"""A wrong flag is refused before anything is sent, with words that say what to write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from phalanx.bench.serving.options import Options
from phalanx.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"goodput": "foo:1"}, "as ttft:800,tpot:50"),
        ({"goodput": "ttft"}, "as ttft:800,tpot:50"),
        ({"goodput": "ttft:0"}, "as ttft:800,tpot:50"),
        ({"goodput": "ttft:inf"}, "as ttft:800,tpot:50"),
        ({"goodput": "ttft:1,ttft:2"}, "as ttft:800,tpot:50"),
        ({"goodput": ""}, "as ttft:800,tpot:50"),
        ({"percentiles": "50,101"}, "as 50,95,99"),
        ({"percentiles": "0"}, "as 50,95,99"),
        ({"percentiles": "p50"}, "as 50,95,99"),
        ({"url": "localhost:8000"}, "Write http://HOST:PORT"),
        ({"url": "file:///etc/passwd"}, "Write http://HOST:PORT"),
        ({"extra_body": "[1]"}, "--extra-body is no JSON object"),
        ({"extra_body": "{"}, "--extra-body is no JSON object"),
        ({"extra_body": '{"stream": false}'}, "--extra-body sets stream"),
        ({"dataset": "squad"}, "Choose one of random, sharegpt, shared-prefix"),
        ({"endpoint": "embeddings"}, "Choose one of completions, chat"),
        ({"arrival": "uniform"}, "Choose one of poisson, gamma, constant"),
        ({"arrival": "constant", "burstiness": 2.0}, "no effect on constant arrivals"),
        ({"arrival": "poisson", "burstiness": 2.0}, "no effect on poisson arrivals"),
        ({"num_prompts": 0}, "--num-prompts is 0. Use 1 or more"),
        ({"warmup": -1}, "--warmup is -1"),
        ({"input_len": 0}, "--input-len is 0"),
        ({"output_len": 0}, "--output-len is 0"),
        ({"prefix_len": 0}, "--prefix-len is 0"),
        ({"agents": 0}, "--agents is 0"),
        ({"gpus": 0}, "--gpus is 0"),
        ({"max_concurrency": 0}, "is 0. Use 1 or more"),
        ({"vocab_size": 0}, "--vocab-size is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"request_rate": -1.0}, "--request-rate is -1"),
        ({"request_rate": 0.0}, "--request-rate is 0"),
        ({"request_rate": math.nan}, "--request-rate is nan"),
        ({"burstiness": 0.0}, "--burstiness is 0"),
        ({"timeout": 0.0}, "--timeout is 0"),
        ({"timeout": math.inf}, "--timeout inf"),
        ({"temperature": -0.1}, "--temperature is -0.1"),
        ({"range_ratio": 0.0}, "--range-ratio is 0"),
        ({"range_ratio": 1.5}, "--range-ratio is 1.5"),
        ({"dataset": "shared-prefix", "agents": 5, "num_prompts": 4}, "5 agents share 4 requests"),
        ({"dataset": "sharegpt"}, "--dataset-path FILE.json"),
        ({"json_file": Path("nowhere/x.json")}, "--json is nowhere/x.json"),
        ({"json_file": Path("/")}, "Name a file in a folder that exists"),
        ({"plot_file": Path("nowhere/x.png")}, "--save-plot is nowhere/x.png"),
        ({"plot_file": Path("x.bmp")}, "Name a .png file"),
        ({"api_key": "a b"}, "The API key is empty or has blanks"),
        ({"api_key": ""}, "The API key is empty or has blanks"),
        ({"api_key": "a", "api_key_file": Path("f")}, "Both --api-key and --api-key-file"),
        ({"api_key_file": Path("nowhere")}, "--api-key-file cannot be read"),
    ],
)
def test_a_wrong_flag_is_explained(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**flags)
    assert caught.value.code == "bad_option"
    assert words in str(caught.value)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_end_in_v1(url: str) -> None:
    assert Options(url=url).root == "http://h:1"


def test_defaults_follow_each_other() -> None:
    assert Options().requests == 100
    assert Options(max_concurrency=4).requests == 40
    assert Options(max_concurrency=4, num_prompts=7).requests == 7
    assert Options().gap_shape == Options(arrival="gamma").gap_shape == 1.0
    assert Options(burstiness=0.5).gap_shape == 0.5
    assert Options(arrival="constant").gap_shape == math.inf


def test_bounds_and_percentiles_are_parsed() -> None:
    options = Options(goodput="ttft:800, tpot:50.5,e2el:9000", percentiles="50,99.9")
    assert options.bounds == {"ttft": 800, "tpot": 50.5, "e2el": 9000}
    assert options.ranks == (50, 99.9)


def test_a_key_is_sent_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret-1\n")
    for options in (Options(api_key="secret-1"), Options(api_key_file=file)):
        assert options.headers == {"Authorization": "Bearer secret-1"}
        assert "secret" not in repr(options)
    with pytest.raises(ConfigError) as caught:
        Options(api_key="secret-1\n")
    assert "secret" not in str(caught.value)
