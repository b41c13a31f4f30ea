"""What is wrong with a request, in words for whoever sent it."""

from __future__ import annotations

import re

from pydantic import ValidationError

from phalanx.server.errors import ApiError, bad_request
from phalanx.server.prepared import Problem

_INTERNAL = re.compile(r"\[|^(str|TextPart|Body)$")
"""Parts of a path that name how a field is checked, not a field."""


def problem_of(error: ApiError) -> Problem:
    told = error.body["error"]
    return Problem(error.status_code, told["message"], told["code"], told["param"])


def complaint_of(error: ValidationError) -> ApiError:
    """One complaint by name: of a union's many about one field, the first of those that looked into it furthest."""
    first = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
    path = [str(part) for part in first["loc"] if not _INTERNAL.search(str(part))]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not JSON: {first['ctx']['error']}.", "bad_json")
    if first["type"] == "model_type" and not path:
        return bad_request("The body must be a JSON object, sent as 'content-type: application/json'.", "bad_body")
    where = ".".join(path)[:200] or "body"
    return bad_request(f"{where}: {first['msg']}.", "bad_parameter", param=path[0][:64] if path else None)
