"""Errors as HTTP answers, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from phalanx.errors import EngineDeadError, PhalanxError, RequestError

_REFUSALS = {"too_many_grammars": 429, "out_of_memory": 503}
"""Requests that are refused for no fault of their own."""


class ApiError(HTTPException):
    """An answer that is an error: `{"error": {"message", "type", "param", "code"}}` with its status and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        kind: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers or {})
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind or _kind(status), "param": param, "code": code}
        }

    @classmethod
    def of(cls, error: PhalanxError) -> ApiError:
        """What the client hears of an error of the engine or of its own request."""
        status = _REFUSALS.get(error.code, 400) if isinstance(error, RequestError) else 500
        if isinstance(error, EngineDeadError):
            return cls(status, "The engine stopped while this request ran; the server's log says why.", error.code)
        return cls(status, str(error), error.code)


def bad_request(message: str, code: str = "bad_request", param: str | None = None) -> ApiError:
    return ApiError(400, message, code, param=param)


def client_gone() -> ApiError:
    return ApiError(499, "The client has gone.", "client_gone")


def queue_full(why: str) -> ApiError:
    return ApiError(429, why, "queue_full", headers={"retry-after": "1"})


def model_not_found(asked: str, served: str) -> ApiError:
    return ApiError(404, f"The model {asked!r} is not served here; {served!r} is.", "model_not_found", param="model")


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
