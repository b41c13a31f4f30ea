"""What a client may ask of an answer's form, and the one format it all becomes: an xgrammar structural tag."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from phalanx.errors import RequestError
from phalanx.server.grammar.pythonic import PythonicCalls
from phalanx.server.grammar.regex import to_xgrammar as regex_to_xgrammar
from phalanx.server.grammar.schema import MOST_DEPTH
from phalanx.server.grammar.schema import to_xgrammar as schema_to_xgrammar
from phalanx.server.markup import END_THINK

MOST_BYTES = 64 * 2**10
_MOST_WHITESPACE = 20

TagFormat = dict[str, Any]
ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "structural_tag", "choice"]


class Constraint(msgspec.Struct, frozen=True):
    """An answer must be of this form.

    `source` is, as `kind` says, a JSON schema, a regular expression, an EBNF grammar, a structural tag of xgrammar or a
    JSON list of texts to choose from; it is empty for any JSON object.

    Keywords of schemas that cannot be enforced are refused, or ignored if it, or the tag they are in, is `tolerant`.
    """

    kind: ConstraintKind
    source: str = ""
    tolerant: bool = False

    def check_size(self) -> None:
        size = len(self.source.encode())
        if size > MOST_BYTES:
            raise RequestError(
                "grammar_too_large",
                f"The description of the answer's form has {size} bytes.",
                f"Use at most {MOST_BYTES} bytes.",
            )


def to_xgrammar(constraint: Constraint) -> str:
    """The constraint as a structural tag for `Grammars.pack`. What xgrammar would get wrong is refused."""
    return _tag(_checked(_format_of(constraint), constraint.tolerant, 0))


def after_thinking(constraint: Constraint) -> Constraint:
    """For a model that is thinking when its answer begins: any text to the end of its thoughts, then the constraint."""
    constraint.check_size()
    thoughts: TagFormat = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": END_THINK}
    gap = {"type": "regex", "pattern": r"\n{0,2}"}
    return sequence([thoughts, gap, _format_of(constraint)], constraint.tolerant)


def sequence(elements: list[TagFormat], tolerant: bool) -> Constraint:
    """One format of xgrammar after the other."""
    return Constraint("structural_tag", _tag({"type": "sequence", "elements": elements}), tolerant)


def sequence_or(elements: list[TagFormat], form: Constraint) -> Constraint:
    """One format of xgrammar after the other, or else another form."""
    form.check_size()
    ways = [{"type": "sequence", "elements": elements}, _format_of(form)]
    return Constraint("structural_tag", _tag({"type": "or", "elements": ways}), form.tolerant)


def _tag(content: TagFormat) -> str:
    return msgspec.json.encode({"type": "structural_tag", "format": content}).decode()


def _format_of(constraint: Constraint) -> TagFormat:
    source = constraint.source
    if constraint.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.kind == "json_schema":
        return {"type": "json_schema", "json_schema": _decoded(source, "schema")}
    if constraint.kind == "regex":
        return {"type": "regex", "pattern": source}
    if constraint.kind == "grammar":
        return {"type": "grammar", "grammar": source}
    if constraint.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in _texts(source)]}
    tag = _decoded(source, "structural tag")
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise RequestError("bad_grammar", "The structural tag has no format.", 'It is {"format": {"type": ...}}.')
    return dict(tag["format"])


def _texts(source: str) -> list[str]:
    texts = _decoded(source, "choice")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError("bad_grammar", "The choice is not a list of texts.", "Give at least one text.")
    return texts


def _decoded(source: str, what: str) -> Any:
    try:
        return msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError("bad_json", f"The {what} is no JSON that can be read: {error}.", "Correct it.") from None


def _checked(part: Any, tolerant: bool, depth: int) -> Any:
    """A structural tag whose schemas and regular expressions xgrammar reads as they are meant."""
    if depth > 2 * MOST_DEPTH:
        raise RequestError(
            "grammar_too_large", f"The structural tag is more than {depth} levels deep.", "Nest less deeply."
        )
    if isinstance(part, list):
        return [_checked(item, tolerant, depth + 1) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema":
        return _checked_schema(part, tolerant)
    if part.get("type") == "qwen_xml_parameter":
        return _checked_schema(part | {"type": "json_schema", "style": "qwen_xml"}, tolerant)
    if part.get("type") == "pythonic_calls":
        return {"type": "grammar", "grammar": _pythonic_calls(part).to_ebnf()}
    if part.get("type") == "regex" and isinstance(part.get("pattern"), str):
        pattern = regex_to_xgrammar(part["pattern"])
        return part | {"pattern": pattern} if pattern else {"type": "const_string", "value": ""}
    return {key: _checked(value, tolerant, depth + 1) for key, value in part.items()}


def _pythonic_calls(part: TagFormat) -> PythonicCalls:
    try:
        return msgspec.convert(part, PythonicCalls)
    except msgspec.ValidationError as error:
        raise RequestError("bad_grammar", f"The structural tag is wrong: {error}.", "Correct it.") from None


def _checked_schema(part: TagFormat, tolerant: bool) -> TagFormat:
    if part.get("any_order"):
        raise RequestError("bad_grammar", "any_order leaves required properties unchecked.", "Leave it out.")
    tolerant = tolerant or part.get("tolerant") is True
    schema = schema_to_xgrammar(part.get("json_schema"), tolerant, part.get("style", "json"))
    rest = {key: value for key, value in part.items() if key != "tolerant"}
    return {"max_whitespace_cnt": _MOST_WHITESPACE} | rest | {"json_schema": schema}
