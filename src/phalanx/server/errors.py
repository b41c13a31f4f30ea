"""Errors as HTTP answers, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from phalanx.errors import EngineDeadError, PhalanxError, RequestError

_REFUSALS = {"too_many_grammars": 429, "out_of_memory": 503, "not_finite": 500}
"""Requests that are refused for no fault of their own."""
OVERFLOW = "context_length_exceeded"
"""What clients look for before they shorten a conversation, in OpenAI's word and in Anthropic's ("too long")."""
ANTHROPIC_PATH = "/v1/messages"


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
            found = f"The engine stopped ({error.code}) while this request ran; the server's log says why."
            return cls(status, found, error.code)
        if error.code == "prompt_too_long":
            return cls(
                status, f"The prompt is too long: this model's maximum context length is exceeded. {error}", OVERFLOW
            )
        return cls(status, str(error), error.code)


def bad_request(message: str, code: str = "bad_request", param: str | None = None) -> ApiError:
    return ApiError(400, message, code, param=param)


def client_gone() -> ApiError:
    return ApiError(499, "The client has gone.", "client_gone")


def queue_full(why: str, retry_after_s: int) -> ApiError:
    return ApiError(429, why, "queue_full", headers={"retry-after": str(retry_after_s)})


def model_not_found(asked: str, served: str) -> ApiError:
    return ApiError(404, f"The model {asked!r} is not served here; {served!r} is.", "model_not_found", param="model")


def response_not_found(id: str) -> ApiError:
    return ApiError(404, f"No response {id[:100]!r} is kept here for this key.", "response_not_found")


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kinds = {413: "request_too_large", 503: "overloaded_error"}
    status = error.status_code
    kind = kinds.get(status, _kind(status).replace("server_error", "api_error"))
    return {"type": "error", "error": error.body["error"] | {"type": kind}}


def body_for(path: str, error: ApiError) -> dict[str, Any]:
    """An error in the shape that the clients of a path read."""
    return anthropic_error(error) if path.startswith(ANTHROPIC_PATH) else error.body


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
