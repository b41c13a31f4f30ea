"""Errors are data: a stable code, what was found (with the numbers) and what to do about it."""

from __future__ import annotations


class PhalanxError(Exception):
    """Base of every error Phalanx raises on purpose."""

    def __init__(self, code: str, found: str, fix: str) -> None:
        super().__init__(f"{found} {fix}")
        self.code = code
        self.found = found
        self.fix = fix

    def to_dict(self) -> dict[str, str]:
        return {"code": self.code, "found": self.found, "fix": self.fix}


class ModelError(PhalanxError):
    """The model's configuration cannot be served."""


class LayoutError(PhalanxError):
    """The model cannot be dealt to this many ranks."""


class CheckpointError(PhalanxError):
    """The weight files do not hold what the configuration promises."""


class ConfigError(PhalanxError):
    """The engine was asked for something this machine or model cannot do."""


class RequestError(PhalanxError):
    """One request is invalid; the engine and all other requests are unaffected."""


class AdapterError(RequestError):
    """An adapter cannot be loaded or is not there; the model and all other adapters are unaffected."""


class StepMemoryError(PhalanxError):
    """A step ran out of memory: it has no results, and the steps before it are as they were."""


class StepLostError(PhalanxError):
    """The ranks do not agree on a step: it has no results, and it and all later ones are to be computed again."""


class EngineDeadError(PhalanxError):
    """A rank died, raised or disagreed; the engine has stopped."""
