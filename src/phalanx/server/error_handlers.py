"""Errors in OpenAI's shape, whatever raised them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from phalanx.errors import PhalanxError
from phalanx.server.access_log import note
from phalanx.server.errors import ApiError, bad_request, body_for
from phalanx.server.incoming import id_header


def add_error_handlers(app: FastAPI) -> None:
    """Tell every error of this application in one shape."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _told(request, _as_api_error(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return _told(request, error)
        message, code = error.detail, "bad_request"
        if error.status_code in (404, 405):
            message, code = f"{request.method} {request.url.path} is not served here.", "not_found"
        return _told(request, ApiError(error.status_code, message, code, headers=dict(error.headers or {})))

    @app.exception_handler(PhalanxError)
    async def wrong(request: Request, error: PhalanxError) -> Response:
        return _told(request, ApiError.of(error))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _told(request, ApiError(500, "The server made a mistake; its log has the details.", "internal_error"))


def _told(request: Request, error: ApiError) -> Response:
    note(reason=error.body["error"]["code"])
    headers = id_header(request) | dict(error.headers or {})
    return JSONResponse(body_for(request.url.path, error), error.status_code, headers=headers)


def _as_api_error(error: RequestValidationError) -> ApiError:
    """The first complaint by name; a union's many complaints are about one field."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not JSON: {first['ctx']['error']}, at character {path[0]}.", "bad_json")
    if not path:
        return bad_request("The body must be a JSON object, sent as 'content-type: application/json'.", "bad_body")
    return bad_request(f"{'.'.join(path)[:200]}: {first['msg']}.", "bad_parameter", param=path[0][:64])
