"""Nothing is unpickled, evaluated or run that came with a model."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel

import phalanx
from phalanx import LLM, SamplingParams

SOURCES = sorted(Path(phalanx.__file__).parent.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "load_module", "__import__"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_source_can_run_foreign_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "trust_remote_code" not in text
    assert "torch.load" not in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not FORBIDDEN_MODULES & {name.name.split(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS
        if isinstance(node, ast.keyword) and node.arg == "shell":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


def test_code_that_comes_with_a_checkpoint_is_never_run(tiny_llama: Path, tmp_path: Path) -> None:
    """A folder whose config asks for its own classes: loaded and used, its Python file untouched."""
    folder, trace = tmp_path / "model", tmp_path / "it_ran"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    custom = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": custom}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": custom, "tokenizer_class": "EvilTokenizer"}))
    words = {f"w{index}": index for index in range(512)}
    RawTokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass T: pass\nC = M = T\n")
    with LLM(folder, progress=False) as llm:
        assert llm.generate("w5", SamplingParams(temperature=0, max_tokens=3)).text
    assert not trace.exists()
