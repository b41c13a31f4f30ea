"""Xids: the errors that NVIDIA's driver writes to the kernel's log."""

from __future__ import annotations

import os
import re

from phalanx.doctor.gather.host import CommandError, Host

_XID = re.compile(r"NVRM: Xid \([^)]{1,40}\): (\d{1,4})\b")
_MOST_LINES = 100_000
_LINE_BYTES = 8192


def parse_xids(text: str) -> tuple[int, ...]:
    """The numbers of the Xids in a kernel log, each once, in the order they first came."""
    return tuple(dict.fromkeys(int(number) for number in _XID.findall(text)))


def read_xids(host: Host) -> tuple[int, ...] | None:
    """From dmesg, else from /dev/kmsg; `None` where this user may read neither."""
    try:
        return parse_xids(host.command("dmesg"))
    except CommandError as error:
        reason = error.found
    log = _kernel_messages(host)
    if log is None:
        host.unread.append(f"The kernel's log cannot be read, so Xid errors cannot be told: {reason}")
        return None
    return parse_xids(log)


def _kernel_messages(host: Host) -> str | None:
    """/dev/kmsg gives one message a read, and would wait for the next one at its end."""
    try:
        file = os.open(host.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    messages = []
    try:
        for _ in range(_MOST_LINES):
            try:
                message = os.read(file, _LINE_BYTES)
            except BrokenPipeError:  # a message was overwritten before it was read
                continue
            if not message:
                break
            messages.append(message)
    except BlockingIOError:
        pass
    except OSError:
        return None
    finally:
        os.close(file)
    return b"".join(messages).decode(errors="replace")
