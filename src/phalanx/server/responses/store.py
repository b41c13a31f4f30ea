"""ResponseStore: answers that may be asked for again, or gone on with, by the key that asked for them."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from phalanx.errors import ConfigError

log = logging.getLogger("phalanx.server")

MOST_BYTES = 64 * 2**20
_SCHEMA = (
    """
    create table if not exists kept (
        number integer primary key autoincrement,
        client text not null, id text not null, response blob not null, items blob not null,
        unique (client, id)
    )
    """,
    "create index if not exists kept_by_age on kept (client, number)",
)
_SIZE = "length(response) + length(items)"


class Kept(NamedTuple):
    """A response, and the conversation up to its end, both as JSON."""

    response: bytes
    items: bytes


def appended(items: bytes, more: list[dict[str, Any]]) -> bytes:
    """A list of JSON with more behind it, without reading what is there."""
    return items[:-1] + (b"," if more and items != b"[]" else b"") + msgspec.json.encode(more)[1:]


class ResponseStore:
    """Keeps so many bytes, in memory or in a file. Where they are used up, whoever has most there loses the oldest."""

    def __init__(self, path: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._database = _opened(path)
        sums = f"select client, sum({_SIZE}) from kept group by client"
        self._bytes: Counter[str] = Counter(dict(self._database.execute(sums)))
        self._make_room()

    def put(self, client: str, id: str, kept: Kept) -> None:
        """What cannot be kept, for its size or for want of disk, is not found later; its answer is sent as ever."""
        if len(kept.response) + len(kept.items) > self._most_bytes:
            log.warning("%s is not kept: it is larger than the store", id)
            return
        try:
            with self._database:
                row = (client, id, kept.response, kept.items)
                self._database.execute("insert into kept (client, id, response, items) values (?, ?, ?, ?)", row)
                self._bytes[client] += len(kept.response) + len(kept.items)
                self._make_room()
        except sqlite3.Error as error:
            log.warning("%s is not kept: %s", id, error)

    def get(self, client: str, id: str) -> Kept | None:
        found = self._database.execute("select response, items from kept where client = ? and id = ?", (client, id))
        row = found.fetchone()
        return Kept(*row) if row is not None else None

    def delete(self, client: str, id: str) -> bool:
        found = self._database.execute(f"select number, {_SIZE} from kept where client = ? and id = ?", (client, id))
        row = found.fetchone()
        if row is None:
            return False
        with self._database:
            self._forget(client, *row)
        return True

    def close(self) -> None:
        self._database.close()

    def _make_room(self) -> None:
        while self._bytes.total() > self._most_bytes:
            ((client, _),) = self._bytes.most_common(1)
            oldest = f"select number, {_SIZE} from kept indexed by kept_by_age where client = ? order by number limit 1"
            self._forget(client, *self._database.execute(oldest, (client,)).fetchone())

    def _forget(self, client: str, number: int, size: int) -> None:
        self._database.execute("delete from kept where number = ?", (number,))
        self._bytes[client] -= size
        if self._bytes[client] <= 0:
            del self._bytes[client]


class Archive:
    """A store behind a thread of its own, since a large answer may take the place of thousands of small ones. What was
    put there is found by whoever asks afterwards.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "responses")

    def put(self, client: str, id: str, kept: Kept) -> None:
        self._thread.submit(self._store.put, client, id, kept)

    async def get(self, client: str, id: str) -> Kept | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.get, client, id)

    async def delete(self, client: str, id: str) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.delete, client, id)


def _opened(path: Path | None) -> sqlite3.Connection:
    """A file only this user can read, and only this process writes. A crash may cost the last answers, no more."""
    try:
        if path is not None:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        database = sqlite3.connect(path or ":memory:", timeout=0.0, check_same_thread=False)
        for setting in ("locking_mode = exclusive", "journal_mode = wal", "synchronous = off", "secure_delete = on"):
            database.execute(f"pragma {setting}")
        for statement in _SCHEMA:
            database.execute(statement)
        database.commit()
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            "bad_option",
            f"--response-store {path} cannot be used: {error}.",
            "Give a file for this server alone.",
        ) from None
    return database
