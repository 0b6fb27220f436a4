"""Keys and options: what may be called how, and what is refused with a word on what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from outrider_serving.suffix.shared import keys
from outrider_serving.suffix.shared.connection import credentials
from outrider_serving.suffix.shared.keys import Keys, identity_of
from outrider_serving.suffix.shared.options import Address, LogOptions, Place, parse_url

KEYS = Keys("outrider:", identity_of("a", "b"))
names = st.one_of(st.just(""), st.from_regex(keys._TENANT, fullmatch=True))


def test_identities_tell_models_apart() -> None:
    made = [identity_of("a", "b"), identity_of("ab", ""), identity_of("a", "b", ""), identity_of("b", "a")]
    assert len(set(made)) == 4
    assert all(map(keys.is_identity, made))
    assert identity_of("a", "b") == made[0]


@given(names, names)
def test_tenants_never_share_a_key(one: str, other: str) -> None:
    assert (KEYS.log(one) == KEYS.log(other)) == (one == other)
    assert keys.read(keys.spell(one).encode()) == one
    assert KEYS.tenant_of(KEYS.log(one).encode()) == one


@pytest.mark.parametrize("name", ["a/b", "a b", "=single", "a\n", "*", "{a}", "é", "a" * 254, ":"])
def test_what_is_no_tenant(name: str) -> None:
    assert not keys.is_tenant(name)
    assert keys.read(name.encode()) in (None, "")


def test_a_model_has_one_slot_and_its_own_prefix() -> None:
    every = [KEYS.tenants, KEYS.tombstones, KEYS.epoch, KEYS.refilled, KEYS.log(""), KEYS.log("a")]
    assert len(set(every)) == len(every)
    assert len({key_slot(key.encode()) for key in every}) == 1
    assert all(key.startswith("outrider:{") for key in every)


def test_identities_are_found_in_keys() -> None:
    for key in (KEYS.epoch, KEYS.tenants, KEYS.tombstones):
        assert keys.model_in(key.encode()) == ("outrider:", KEYS.identity)
    assert keys.model_in(b"outrider:a:b:{" + b"0" * 32 + b"}:epoch") == ("outrider:a:b:", "0" * 32)
    for other in (
        KEYS.refilled,
        KEYS.log("a"),
        KEYS.epoch + "x",
        KEYS.epoch.upper(),
        "",
        "{",
        "x{short}:epoch",
    ):
        assert keys.model_in(other.encode()) is None
    assert keys.model_in(b"\xff" + KEYS.epoch.encode()) is None
    assert KEYS.tenant_of(b"outrider:{x}:log:a") is None


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://host", Place("", False, (Address("host", 6379),), "", 0)),
        ("rediss://host:1/7", Place("", True, (Address("host", 1),), "", 7)),
        ("redis://[::1]:2", Place("", False, (Address("::1", 2),), "", 0)),
        (
            "redis-sentinel://a,b:3/mine/4",
            Place("-sentinel", False, (Address("a", 26379), Address("b", 3)), "mine", 4),
        ),
        ("rediss-sentinel://a/mine", Place("-sentinel", True, (Address("a", 26379),), "mine", 0)),
        ("redis-cluster://a:1,b:2", Place("-cluster", False, (Address("a", 1), Address("b", 2)), "", 0)),
        ("rediss-cluster://a/0", Place("-cluster", True, (Address("a", 6379),), "", 0)),
    ],
)
def test_urls_say_where_redis_is(url: str, place: Place) -> None:
    assert parse_url(url) == place


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "is none of redis://"),
        ("host:6379", "is none of redis://"),
        ("http://host", "is none of redis://"),
        ("unix:///tmp/socket", "is none of redis://"),
        ("redis-other://host", "is none of redis://"),
        ("redis://", "must have hosts"),
        ("redis://host:0", "must have hosts and ports above 0"),
        ("redis://host:99999", "a port of 1 to 65535"),
        ("redis://host:x", "a port of 1 to 65535"),
        ("redis://a,b", "names several servers"),
        ("redis://host/x", "the number of a database"),
        ("redis://host/1/2", "the number of a database"),
        ("redis://host/\u0663", "the number of a database"),
        ("redis-cluster://host/1", "the number of a database"),
        ("redis-sentinel://host", "must name the service"),
        ("redis://[::1", "it is not a URL"),
        ("redis://host?password=hunter2", "nothing may follow its path"),
        ("redis://host#hunter2", "nothing may follow its path"),
        ("redis://me:hunter2@host", "they belong into files `username` and `password`"),
        ("redis://:hunter2@[host", "they belong into files"),
        ("http://me:hunter2@host", "they belong into files"),
    ],
)
def test_bad_urls_are_refused_without_repeating_a_secret(url: str, what: str) -> None:
    with pytest.raises(ValueError, match="url: ") as caught:
        LogOptions(url=url)
    assert what in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"prefix": ""}, "prefix: '' must be 1 to 128"),
        ({"prefix": "a{b}"}, "prefix: 'a{b}' must be"),
        ({"prefix": "*"}, "prefix: '\\*' must be"),
        ({"retention_seconds": 0}, "retention_seconds: 0 must be at least 1"),
        ({"retention_seconds": 10**17}, "retention_seconds: 1(0){17} must be at most 31536000"),
        ({"retention_bytes": 16383}, "retention_bytes: 16383 must be at least 16384"),
        ({"ca": Path("/ca")}, "ca: certificates are for a URL of TLS: .* \\(it is redis://\\)"),
        ({"queue_bytes": 1}, "queue_bytes: 1 must be at least 16384"),
        ({"memory_bytes": -1}, "memory_bytes: -1 must be at least 0"),
        ({"warm_tenants": -1}, "warm_tenants: -1 must be at least 0"),
        ({"warm_tokens": -1}, "warm_tokens: -1 must be at least 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        LogOptions(url="redis://host", **options)  # type: ignore[arg-type]


def test_the_size_of_a_tenant_is_told_in_entries() -> None:
    assert LogOptions(url="redis://host", retention_bytes=10 * 16384 + 1).entries == 10


def test_credentials_are_files_of_which_each_may_be_missing(tmp_path: Path) -> None:
    assert credentials(None) == (None, None)
    assert credentials(tmp_path) == (None, None)
    (tmp_path / "password").write_text(" word \r\n")
    assert credentials(tmp_path) == (None, " word ")
    (tmp_path / "username").write_text("me")
    assert credentials(tmp_path) == ("me", " word ")
    (tmp_path / "sentinel-password").write_text("other\n")
    assert credentials(tmp_path, "sentinel-") == (None, "other")
    (tmp_path / "username").unlink()
    (tmp_path / "username").mkdir()
    with pytest.raises(OSError, match="username"):
        credentials(tmp_path)
