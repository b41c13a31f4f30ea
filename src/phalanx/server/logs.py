"""How the server's log is written: lines for people, or JSON for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from phalanx.errors import ConfigError

FORMATS = ("text", "json")


class JsonLines(logging.Formatter):
    """An object a line. What a record has in `fields` stands beside the rest, in place of its message."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        told |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def set_up_logs(form: str) -> None:
    if form not in FORMATS:
        raise ConfigError("bad_option", f"--log-format is {form!r}.", f"Use one of {', '.join(FORMATS)}.")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
