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
FORBIDDEN_WORDS = ("trust_remote_code", "torch.load")
FORBIDDEN_CALLS = {"eval", "exec", "compile", "load_module", "__import__"}


def dangers(text: str) -> list[str]:
    """What of a source could run code that came with data, each with its line."""
    found = [word for word in FORBIDDEN_WORDS if word in text]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = {name.name.split(".")[0] for name in node.names}
        else:
            modules = {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
        found += [f"line {node.lineno}: imports {name}" for name in sorted(modules & FORBIDDEN_MODULES)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"line {node.lineno}: calls {node.func.id}")
        if isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            found.append(f"line {node.value.lineno}: runs a shell")
    return found


def test_no_source_can_run_foreign_code() -> None:
    assert len(SOURCES) > 200
    assert not {str(path): found for path in SOURCES if (found := dangers(path.read_text(encoding="utf-8")))}


@pytest.mark.parametrize(
    ("line", "danger"),
    [
        ("import json, pickle", "line 1: imports pickle"),
        ("from multiprocessing.pool import Pool", "line 1: imports multiprocessing"),
        ("def f(x):\n    return eval(x)", "line 2: calls eval"),
        ("run('ls', shell=True)", "line 1: runs a shell"),
        ("run('ls', shell=asked)", "line 1: runs a shell"),
        ("torch.load(path)", "torch.load"),
        ("f(trust_remote_code=1)", "trust_remote_code"),
    ],
)
def test_each_danger_would_be_seen(line: str, danger: str) -> None:
    assert dangers(line) == [danger]
    assert dangers("import json\nrun('ls', shell=False)\nmodel.eval()\nfrom . import compile") == []


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
