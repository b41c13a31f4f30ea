"""Options of `phalanx serve` from a file, and what they come to."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.shared import told_errors
from phalanx.errors import ConfigError

config = typer.Typer(help="What a server would be started with.", no_args_is_help=True, rich_markup_mode=None)

_SOURCES = {"COMMANDLINE": "flag", "DEFAULT_MAP": "file", "ENVIRONMENT": "environment"}
_SECRET = "api_key"
_NOT_OPTIONS = ("config_file", "help")


def take_options(context: typer.Context, file: Path | None) -> Path | None:
    """Have what the file says stand where no flag does."""
    if file is not None and not context.resilient_parsing:
        with told_errors():
            context.default_map = read_options(file, context.command.params)
    return file


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", is_eager=True, callback=take_options, help="A TOML file of these options; flags win."),
]


def read_options(file: Path, known: Sequence[Any]) -> dict[str, Any]:
    """Values by the names of parameters. ConfigError names a key that is none, or a value that cannot be one."""
    by_name = {_shown(parameter.name): parameter for parameter in known if parameter.name not in _NOT_OPTIONS}
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("bad_config", f"--config {file}: {error.strerror}.", "Give a readable file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("bad_config", f"{file} is no TOML: {error}.", "Correct it.") from None
    options = {}
    for key, value in told.items():
        parameter = by_name.get(_shown(key))
        if parameter is None:
            near = get_close_matches(_shown(key), by_name, n=1, cutoff=0.3)
            fix = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(
                "unknown_option", f"{file}: no option is called {key!r}.", f"{fix}See: phalanx serve --help"
            )
        options[str(parameter.name)] = _checked(file, key, value, parameter)
    return options


def _checked(file: Path, key: str, value: Any, parameter: Any) -> Any:
    """A list where one may be repeated; true and false for switches alone."""
    several = getattr(parameter, "multiple", False)
    values = value if several and isinstance(value, list) else [value]
    is_switch = getattr(parameter, "is_flag", False)
    if any(not isinstance(each, str | int | float) or isinstance(each, bool) != is_switch for each in values):
        wanted = "true or false" if is_switch else "a text or number"
        raise ConfigError("bad_config", f"{file}: {key} is {value!r}.", f"It must be {wanted}.")
    return values if several else value


def _shown(name: str | None) -> str:
    return str(name).replace("_", "-")


@config.command("show", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def show(context: typer.Context) -> None:
    """Print what `phalanx serve` with the same arguments would use, as a file for --config."""
    root: Any = context.find_root().command
    serve = root.commands["serve"].make_context("serve", list(context.args))
    for parameter in serve.command.params:
        if parameter.name is not None and parameter.name not in _NOT_OPTIONS:
            source = serve.get_parameter_source(parameter.name)
            print(_line(parameter.name, serve.params[parameter.name], source.name if source else ""))


def _line(name: str, value: Any, source: str) -> str:
    if name == _SECRET and value:
        return f"# {_shown(name)}: {len(value)} given, not shown"
    if value is None or value == []:
        return f"# {_shown(name)} is not set"
    text = json.dumps([*value] if isinstance(value, list | tuple) else value, default=str)
    comment = f"  # {_SOURCES[source]}" if source in _SOURCES else ""
    return f"{_shown(name)} = {text}{comment}"
