"""Who drafts: what a checkpoint offers and what was asked for, settled before weights are loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from phalanx.engine.ngram import NgramDrafter
from phalanx.engine.speculation import RankDrafter, Speculation
from phalanx.errors import ConfigError, LayoutError
from phalanx.runtime.config import SPECULATIONS, EngineConfig
from phalanx.spec import Layout, ModelSpec
from phalanx.spec.invariant import invariant_layout
from phalanx.weights.checkpoint import Checkpoint, locate, model_name

_OTHERWISE = "Use speculate ngram, which needs no weights, or name a small model with the same tokens."


def settle(config: EngineConfig, model_path: Path) -> EngineConfig:
    """The config with a draft model's place in its name's. What cannot draft for this model is refused."""
    if config.speculate in SPECULATIONS:
        open_checkpoint(config, model_path)
        return config
    if config.speculate.lower() in ("", *SPECULATIONS):
        raise ConfigError(
            "bad_option",
            f"speculate is {config.speculate!r}.",
            f"Use one of {', '.join(SPECULATIONS)}, or name a draft model.",
        )
    path = locate(config.speculate)
    settled = msgspec.structs.replace(config, speculate=str(path.absolute()))
    _check_companion(settled, model_path, path)
    return settled


def open_checkpoint(config: EngineConfig, model_path: Path) -> Checkpoint:
    """A checkpoint, its states as they are to be kept, with what drafts for it: its own head, or a companion."""
    checkpoint = Checkpoint(model_path, config.load_format)
    checkpoint.spec = checkpoint.spec.keeping_states_in(config.state_dtype)
    if config.speculate != "off":
        checkpoint.spec = checkpoint.spec.going_back(1 + config.most_drafts)
    if config.speculate == "mtp" and not checkpoint.has_draft_head:
        lacks = "its files lack the tensors" if checkpoint.spec.head else "its config.json tells of none"
        raise ConfigError("no_draft_head", f"{model_name(model_path)} has no head that drafts: {lacks}.", _OTHERWISE)
    if config.speculate in ("mtp", "auto") and checkpoint.has_draft_head:
        checkpoint.spec = checkpoint.spec.with_drafts()
    elif config.speculate not in SPECULATIONS:
        checkpoint.companion = Checkpoint(Path(config.speculate), config.load_format)
        checkpoint.spec = dataclasses.replace(checkpoint.spec, companion=True)
    return checkpoint


def speculation(config: EngineConfig, checkpoint: Checkpoint) -> Speculation | None:
    """What the scheduler needs to know of it."""
    if config.speculate == "off":
        return None
    by_ranks = checkpoint.spec.drafts or checkpoint.companion is not None
    return Speculation(RankDrafter() if by_ranks else NgramDrafter(), config.most_drafts, drafts_stay=by_ranks)


def _check_companion(config: EngineConfig, model_path: Path, path: Path) -> None:
    checkpoint = open_checkpoint(config, model_path)
    assert checkpoint.companion is not None
    spec, name = checkpoint.companion.spec, model_name(path)
    if spec.has_states:
        raise ConfigError(
            "unsupported_draft_model",
            f"{name} keeps recurrent states, which a draft model's wrong guesses would spoil.",
            "Name a draft model whose layers all attend.",
        )
    _check_tokens(checkpoint.spec, spec, model_path, path)
    try:
        (invariant_layout if config.invariant else Layout)(spec, config.tp)
    except (ConfigError, LayoutError) as error:
        raise ConfigError(
            "draft_model_ranks", f"The draft model {name} cannot be dealt to the ranks. {error.found}", error.fix
        ) from None


def _check_tokens(spec: ModelSpec, draft: ModelSpec, model_path: Path, draft_path: Path) -> None:
    """Both mean the same by the same numbers. Models that share their tokens may have more rows for them or fewer."""
    from phalanx.text.tokenizer import Tokenizer  # transformers, which ranks have no other use for

    ours, theirs = Tokenizer.load(model_path), Tokenizer.load(draft_path)
    if ours is None or theirs is None:
        same, told = spec.vocab == draft.vocab, f"{draft.vocab} tokens and the model has {spec.vocab}"
    else:
        words, others = ours.backend.get_vocab(), theirs.backend.get_vocab()
        same = words == others
        differing = sum(words.get(word) != number for word, number in others.items())
        told = f"{len(others)} tokens, of which {differing} are not the model's, which has {len(words)}"
    if not same:
        raise ConfigError(
            "other_vocabulary",
            f"The draft model {model_name(draft_path)} has {told}.",
            "Name one with the same tokens, or use speculate ngram, which needs no weights.",
        )
