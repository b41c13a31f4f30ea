from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Reference
    from tests.heads import HeadReference


@pytest.fixture(scope="session")
def heads(
    references: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], HeadReference]:
    """A family's checkpoint with a head that drafts, made when first asked for."""
    from tests.heads import HeadReference

    return cache(lambda name: HeadReference(references(name), tmp_path_factory.mktemp(f"{name}_head")))


@pytest.fixture(scope="session")
def companion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, with the tokens of most tiny models."""
    from transformers import AutoModelForCausalLM

    from tests.conftest import fill_randomly, tiny_config

    folder = tmp_path_factory.mktemp("companion")
    model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=1)).eval()
    fill_randomly(model)
    model.save_pretrained(folder)
    return folder
