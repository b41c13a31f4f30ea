"""Where checkpoints are found, and how little memory it takes to load a share of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from phalanx.errors import ModelError
from phalanx.models import read_config
from phalanx.weights.checkpoint import Checkpoint, locate
from phalanx.weights.gguf_reader import GgufReader
from phalanx.weights.reader import DummyReader
from phalanx.weights.views import ViewReader
from tests.weights.conftest import COMMON, CONFIGS, random_tensors, save_folder

STATUS = Path("/proc/self/status")


def test_without_a_name_it_is_the_default_model() -> None:
    path = locate(None)
    assert path.suffix == ".gguf"
    spec = Checkpoint(path).spec
    assert (len(spec.layers), spec.hidden, spec.heads, spec.kv_heads, spec.vocab) == (30, 576, 9, 3, 49152)
    assert spec.tied_embeddings
    assert isinstance(Checkpoint(path).open_reader(torch.device("cpu")), GgufReader)


def test_folders_and_files_are_found_by_their_paths(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert locate(tmp_path) == locate(str(tmp_path)) == tmp_path
    assert locate(file) == locate(str(file)) == file


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "/no/such/folder", "{tmp}/notes.txt", "{tmp}/missing.gguf"])
def test_a_name_that_means_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    name = name.format(tmp=tmp_path)
    with pytest.raises(ModelError) as error:
        locate(name)
    assert error.value.code == "no_model"
    assert name in error.value.found


@pytest.mark.parametrize("name", ["nobody/nothing-of-the-kind", "../up", "spa ce/x"])
def test_a_hugging_face_id_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as error:
        locate(name)
    assert error.value.code == "no_model"
    assert name in error.value.found


@pytest.mark.parametrize(
    ("generation", "ends"), [({}, (2,)), ({"eos_token_id": 7}, (2, 7)), ({"eos_token_id": [2, 9, 7]}, (2, 9, 7))]
)
def test_end_tokens_of_the_generation_config_are_added(
    tmp_path: Path, generation: dict[str, object], ends: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    assert Checkpoint(tmp_path).spec.eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Checkpoint(tmp_path).spec.eos_token_ids == ends


def test_the_load_format_chooses_the_reader(tmp_path: Path) -> None:
    save_folder(tmp_path, CONFIGS["llama"], random_tensors(read_config(CONFIGS["llama"])))
    assert isinstance(Checkpoint(tmp_path).open_reader(torch.device("cpu")), ViewReader)
    assert isinstance(Checkpoint(tmp_path, "dummy").open_reader(torch.device("cpu")), DummyReader)


LOAD_A_SHARE = """
import sys, threading, time
from pathlib import Path
import torch
from phalanx.fabric.group import GlooGroup
from phalanx.layers.place import Place
from phalanx.layers.decoder import Decoder
from phalanx.spec import Layout
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import load_weights

def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

torch.zeros(1000, 1000).float().add_(1)
checkpoint, before, peak, done = Checkpoint(Path(sys.argv[1])), anonymous(), 0, threading.Event()

def watch() -> None:
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
model = Decoder(Place(Layout(checkpoint.spec, 4), GlooGroup(1, 4), torch.float32, torch.device("cpu")))
load_weights(model, checkpoint.open_reader(torch.device("cpu")), lambda done, total: None)
done.set()
watcher.join()
print(sum(part.nbytes for _, part in model.parts()), max(peak, anonymous()) - before)
"""


@pytest.mark.skipif(not STATUS.exists() or "RssAnon" not in STATUS.read_text(), reason="no RssAnon to watch")
def test_loading_a_share_takes_little_more_than_the_share(tmp_path: Path) -> None:
    """A quarter of 200 MB: never half as much again, so neither the whole nor a second copy is ever in memory."""
    config = COMMON | {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 14000,
    }
    spec = read_config(config)
    assert 190e6 < spec.weight_bytes("fp32") < 230e6
    save_folder(tmp_path, config, random_tensors(spec))
    out = subprocess.run(
        [sys.executable, "-c", LOAD_A_SHARE, str(tmp_path)], capture_output=True, check=True, text=True
    )
    share, growth = map(int, out.stdout.split())
    assert share == pytest.approx(spec.weight_bytes("fp32") / 4, rel=0.02)
    assert share * 0.9 < growth < share * 1.5
