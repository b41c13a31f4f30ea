"""`/docs`: the routes and the fields of their bodies as one page, made from the description. It fetches nothing."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from phalanx.version import __version__

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.15rem 1rem .15rem 0;vertical-align:top}"
    "code{font-size:.9em}h2{margin-top:2rem}"
)
_MOST_NAMED = 6

Schema = dict[str, Any]


def add_reference(app: FastAPI, schema: Schema) -> None:
    """A page for browsers; it holds nothing that another server of this version would not say."""
    page = _page(schema)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": _POLICY, "x-content-type-options": "nosniff"})


def _page(schema: Schema) -> str:
    routes, bodies = [], {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            body = _body_of(operation)
            if body:
                bodies[body] = schema["components"]["schemas"][body]
            link = f'<a href="#{body}">{body}</a>' if body else ""
            routes.append(f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{link}")
    sections = "".join(_section(name, body) for name, body in bodies.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><link rel="icon" href="/cockpit.svg">'
        f"<title>Phalanx {__version__}: the API</title>"
        f"<style>{_STYLE}</style><h1>Phalanx {__version__}</h1>"
        '<p>For programs: <a href="/openapi.json">openapi.json</a>, which needs the key where keys are set.</p>'
        f"<h2>Routes</h2><table><tr><th>method<th>path<th>body{''.join(routes)}</table>{sections}</html>"
    )


def _body_of(operation: Schema) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]


def _section(name: str, body: Schema) -> str:
    required = body.get("required", [])
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(told))}<td>{'required' if field in required else ''}"
        for field, told in body.get("properties", {}).items()
    )
    return f'<h2 id="{name}">{name}</h2><table><tr><th>field<th>type<th>{rows}</table>'


def _kind(told: Schema) -> str:
    if "$ref" in told:
        return str(told["$ref"]).rpartition("/")[2]
    if "anyOf" in told:
        return " or ".join(dict.fromkeys(_kind(each) for each in told["anyOf"] if each.get("type") != "null"))
    if "const" in told or "enum" in told:
        values = [told["const"]] if "const" in told else told["enum"]
        more = ", ..." if len(values) > _MOST_NAMED else ""
        return ", ".join(repr(value) for value in values[:_MOST_NAMED]) + more
    if told.get("type") == "array":
        return f"list of {_kind(told.get('items', {}))}"
    return str(told.get("type", "any"))
