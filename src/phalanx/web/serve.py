"""`phalanx serve`: the API with the cockpit beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.runtime.config import EngineConfig
from phalanx.server.engine_client import ENGINE_MODULE
from phalanx.server.options import ServeOptions
from phalanx.server.serve import serve as serve_api

if TYPE_CHECKING:
    from phalanx.server.service import Service
    from phalanx.web.served import ServedCockpit


def serve(config: EngineConfig, options: ServeOptions, engine_module: str = ENGINE_MODULE) -> int:
    """Serve until told to stop. Returns the exit code: 0 after SIGTERM or Ctrl-C, 1 when the engine has died."""
    return serve_api(config, options, engine_module, _cockpit)


def _cockpit(service: Service) -> ServedCockpit:
    """Imports what takes long: meanwhile the engine loads."""
    from phalanx.web.served import ServedCockpit

    return ServedCockpit(service)
