"""Runs a command on its node, and says what went wrong in words that name the node, the command and its last lines."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from phalanx.cluster.commands import Command, argv, shown
from phalanx.cluster.hosts import Cluster, Node
from phalanx.errors import PhalanxError
from phalanx.version import install_command

_TOLD_LINES = 12
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
Answer = TypeVar("Answer")
Item = TypeVar("Item")


class ClusterError(PhalanxError):
    """A node cannot be reached, does not fit the others, or Ray did not start on it."""


def run(cluster: Cluster, command: Command, token: str = "") -> str:
    """What the command prints. The token goes over standard input only, to commands that take it."""
    words = argv(cluster, command)
    try:
        done = subprocess.run(
            words,
            input=token if command.takes_token else "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=command.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        found = f"there was no answer in {command.timeout_s:g} s"
        raise _failed(cluster, command, "node_timeout", found, "", "See whether the machine hangs or swaps.") from None
    except OSError as error:
        found = f"{words[0]} cannot be started ({error.strerror})"
        raise _failed(
            cluster, command, "no_program", found, "", "Install it, or correct python in hosts.toml."
        ) from None
    if done.returncode == 0:
        return done.stdout
    code, found, fix = _diagnosis(command, done.returncode, done.stderr)
    raise _failed(cluster, command, code, found, done.stderr or done.stdout, fix)


def ask(cluster: Cluster, command: Command, kind: type[Answer]) -> Answer:
    """The answer of `phalanx.cluster.node`: the last line printed."""
    printed = run(cluster, command)
    try:
        return msgspec.json.decode(printed.strip().rpartition("\n")[2], type=kind)
    except msgspec.DecodeError:
        fix = "Install the same version of Phalanx on every node; a shell profile must print nothing."
        raise _failed(cluster, command, "bad_answer", "the answer is not understood", printed, fix) from None


def on_all(act: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Do it for all at once. All are waited for; then all failures are told together."""
    results, errors = attempt_all(act, items)
    if errors:
        raise joined_error(errors)
    return results


def attempt_all(act: Callable[[Item], Answer], items: Sequence[Item]) -> tuple[list[Answer], list[ClusterError]]:
    results, errors = [], []
    with ThreadPoolExecutor(max_workers=max(len(items), 1)) as pool:
        for future in [pool.submit(act, item) for item in items]:
            try:
                results.append(future.result())
            except ClusterError as error:
                errors.append(error)
    return results, errors


def joined_error(errors: Sequence[ClusterError]) -> ClusterError:
    """Several failures as one, in the order of the nodes; a fix that serves all is told once."""
    found = "\n".join(error.found for error in errors)
    return ClusterError(errors[0].code, found, "\n".join(dict.fromkeys(error.fix for error in errors)))


def _diagnosis(command: Command, status: int, stderr: str) -> tuple[str, str, str]:
    node = command.node
    if status == _SSH_FAILED and not node.is_local:
        fix = f"Try: ssh {node.host} true. It has to work without a password (ssh-copy-id), with a known host key."
        return "ssh_failed", "ssh could not log in", fix
    if status in _NOT_FOUND and node.python in stderr:
        return "no_python", f"there is no {node.python}", "Install Phalanx there, or correct python in hosts.toml."
    if "No module named" in stderr:
        missing = stderr.rpartition("No module named")[2].split("\n")[0].strip(" ':")
        fix = f"On {node.host}: {node.python} -m {install_command('cluster')}"
        return "not_installed", f"{node.python} has no module {missing}", fix
    return "command_failed", f"the command ended with status {status}", _advice(node, stderr)


def _advice(node: Node, stderr: str) -> str:
    if "already running" in stderr or "in use" in stderr:
        return "Another program has that port: stop it, or write another port in hosts.toml."
    if "uthenticat" in stderr:
        return "The head was started with another token: phalanx cluster down, then up."
    return f"Run the command by hand to see more; Ray's logs are in {node.ray_folder}/session_latest/logs."


def _failed(cluster: Cluster, command: Command, code: str, found: str, said: str, fix: str) -> ClusterError:
    lines = [f"{command.node.name}: could not {command.what}: {found}.", f"  $ {shown(cluster, command)}"]
    lines += [f"  | {line}" for line in said.strip().splitlines()[-_TOLD_LINES:]]
    return ClusterError(code, "\n".join(lines), fix)
