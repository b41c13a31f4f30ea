"""Keys from flags and file, what each may use in a minute, and when to come back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.server.errors import ApiError
from phalanx.server.keys import KeyRing
from phalanx.server.pace import FreeingPace
from phalanx.server.quotas import Quotas


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(
        "# those who may come\n\nsecret-a name=alice rpm=2 tpm=100 priority=-1\nsecret-b admin\nsecret-c tpm=60\n"
    )
    return path


def client(ring: KeyRing, secret: str) -> str:
    key = ring.find(secret.encode())
    assert key is not None
    return key.client


def test_a_line_has_a_key_its_name_and_its_limits(file: Path) -> None:
    ring = KeyRing(["from-flag"], file)
    keys = {secret: ring.find(secret.encode()) for secret in ("from-flag", "secret-a", "secret-b", "# those")}
    assert keys["# those"] is None
    assert [key.name for key in keys.values() if key] == ["flag-1", "alice", "line-4"]
    alice = keys["secret-a"]
    assert alice is not None
    assert (alice.requests_per_minute, alice.tokens_per_minute, alice.priority) == (2, 100, -1)
    assert [ring.is_operator(key) for key in keys.values() if key] == [False, False, True]
    alone = KeyRing(["one"])
    assert alone.is_operator(alone.find(b"one"))  # type: ignore[arg-type]
    assert "secret" not in repr(alice)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("secret-a another", "'another' is not understood"),
        ("secret-a rpm=many", "line 1: invalid literal"),
        ("secret-a rpm=0", "0 is not a limit"),
        ("secret-a name=", "'name=' is not understood"),
        ("# nothing\n", "is empty"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_without_the_key(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(ConfigError) as caught:
        KeyRing([], file)
    assert words in str(caught.value)
    assert "secret-a" not in str(caught.value)


def test_keys_read_anew_replace_the_old_and_a_bad_file_changes_nothing(file: Path) -> None:
    ring = KeyRing([], file)
    file.write_text("secret-a another")
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.find(b"secret-b")
    file.write_text("secret-d")
    ring.reload()
    assert ring.find(b"secret-b") is None
    assert ring.find(b"secret-d")
    assert not ring.several


def test_a_key_s_priority_cannot_be_bettered_by_its_requests(file: Path) -> None:
    ring = KeyRing([], file)
    alice, other = client(ring, "secret-a"), client(ring, "secret-b")
    assert [ring.priority(alice, asked) for asked in (-100, 0, 7)] == [-1, -1, 6]
    assert [ring.priority(other, asked) for asked in (-100, 0, 7)] == [0, 0, 7]
    assert KeyRing(["one", "two"]).priority(client(KeyRing(["one"]), "one"), -100) == -100


def test_a_key_that_has_used_its_minute_is_told_when_to_come_back(file: Path) -> None:
    ring, clock = KeyRing([], file), Clock()
    quotas, alice = Quotas(ring, clock), client(ring, "secret-a")
    quotas.take(alice, 10)
    quotas.take(alice, 10)
    with pytest.raises(ApiError) as caught:
        quotas.take(alice, 10)
    assert (caught.value.status_code, caught.value.headers["retry-after"]) == (429, "30")
    assert "2 requests a minute" in caught.value.detail
    clock.now = 30.0
    quotas.take(alice, 10)
    quotas.take(client(ring, "secret-b"), 10**9)


def test_tokens_of_answers_count_too_and_a_refused_request_does_not(file: Path) -> None:
    ring, clock = KeyRing([], file), Clock()
    quotas, key = Quotas(ring, clock), client(ring, "secret-c")
    quotas.take(key, 10)
    quotas.give_back(key, 10)
    quotas.take(key, 10)
    quotas.spend(key, 80)
    with pytest.raises(ApiError) as caught:
        quotas.take(key, 5)
    assert caught.value.headers["retry-after"] == "35"
    clock.now = 35.0
    quotas.take(key, 5)
    clock.now = 95.0
    quotas.take(key, 10**6)  # larger than any minute: let in when the minute is unused, and waited off


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 40)), max_size=60))
def test_no_key_gets_more_than_its_rate_and_one_full_minute(asked: list[tuple[float, int]]) -> None:
    with NamedTemporaryFile("w", suffix=".keys") as file:
        file.write("k tpm=60")
        file.flush()
        ring, clock = KeyRing([], Path(file.name)), Clock()
    quotas, let_in = Quotas(ring, clock), 0
    for pause, tokens in asked:
        clock.now += pause
        with suppress(ApiError):
            quotas.take(client(ring, "k"), tokens)
            let_in += tokens
    assert let_in <= 60 + clock.now + 1e-6


def test_who_is_refused_comes_back_when_so_many_will_have_ended() -> None:
    clock = Clock()
    pace = FreeingPace(clock)
    assert pace.seconds_until(1) == 10
    for second in range(20):
        clock.now = second * 2.0
        pace.one_ended()
    assert pace.seconds_until(1) == 2
    assert pace.seconds_until(10) == 19
    assert pace.seconds_until(10**6) == 60
    clock.now += 1000
    assert pace.seconds_until(1) == 10
