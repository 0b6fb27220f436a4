"""API keys: directories as Kubernetes mounts them, and what a broken one does."""

from pathlib import Path

import pytest

from outrider_serving.api.keys import NO_KEYS, Contents, KeyRing, parse, read_directory


def ring_of(contents: Contents, earlier: KeyRing = NO_KEYS) -> KeyRing:
    ring, wrong = parse(contents, earlier)
    assert wrong == []
    return ring


def test_a_plain_directory(tmp_path: Path) -> None:
    (tmp_path / "red").write_text("one\n\n  two \r\n")
    (tmp_path / "blue").write_text("three")
    (tmp_path / ".hidden").write_text("four")
    (tmp_path / "folder").mkdir()
    ring = ring_of(read_directory(tmp_path))
    assert [ring.tenant_of(key) for key in ("one", "two", "three")] == ["red", "red", "blue"]
    assert [ring.tenant_of(key) for key in ("four", "", "on", "one ", "ONE")] == [None] * 5
    assert ring.tenants == ["blue", "red"]


def test_a_mounted_secret_is_read_through_its_link(tmp_path: Path) -> None:
    for version in ("..first", "..second"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "red").write_text(f"key-of-{version}")
    (tmp_path / "..data").symlink_to("..first")
    (tmp_path / "red").symlink_to("..data/red")
    assert ring_of(read_directory(tmp_path)).tenant_of("key-of-..first") == "red"
    (tmp_path / "..next").symlink_to("..second")
    (tmp_path / "..next").rename(tmp_path / "..data")
    ring = ring_of(read_directory(tmp_path))
    assert ring.tenant_of("key-of-..second") == "red"
    assert ring.tenant_of("key-of-..first") is None


def test_an_empty_directory_admits_nobody(tmp_path: Path) -> None:
    ring = ring_of(read_directory(tmp_path))
    assert ring.tenant_of("") is None
    assert ring.tenants == []


def test_a_key_twice_in_one_tenant_is_one_key() -> None:
    assert ring_of((("red", b"one\none\n"),)).tenant_of("one") == "red"


@pytest.mark.parametrize(
    "content", [b"good\nsecret key", b"good\n" + "schlüssel".encode(), b"\x00\xff\xfe", None]
)
def test_a_malformed_tenant_keeps_its_earlier_keys_and_stops_nobody(content: bytes | None) -> None:
    earlier = ring_of((("blue", b"revoked"), ("red", b"one")))
    ring, wrong = parse((("blue", b"fresh"), ("red", content)), earlier)
    assert [ring.tenant_of(key) for key in ("fresh", "revoked", "one", "good")] == ["blue", None, "red", None]
    (reason,) = wrong
    assert reason.startswith("'red': ")
    assert "line" in reason or content is None
    assert "secret" not in reason
    assert parse((("blue", b"fresh"), ("red", content)), ring) == (ring, wrong)


def test_a_malformed_tenant_has_no_keys_at_first() -> None:
    ring, wrong = parse((("blue", b"fresh"), ("red", b"good\ntwo words")))
    assert ring.tenants == ["blue"]
    assert wrong == [
        "'red': line 2: a key must be visible ASCII without spaces; its earlier keys stay in force"
    ]


def test_a_key_of_two_tenants_is_valid_for_neither() -> None:
    contents = (("blue", b"same\nown-blue"), ("green", b"own-green"), ("red", b"own-red\nsame"))
    ring, wrong = parse(contents)
    keys = ("same", "own-blue", "own-green", "own-red")
    assert [ring.tenant_of(key) for key in keys] == [None, "blue", "green", "red"]
    assert wrong == ["'blue', line 1 and 'red', line 2 have the same key; it is valid for none of them"]
    assert parse(contents, ring) == (ring, wrong)


@pytest.mark.parametrize("red", [b"same", b"same\ntwo words"])
def test_a_key_that_another_tenant_claims_stays_with_the_one_who_had_it(red: bytes) -> None:
    earlier = ring_of((("red", b"same"),))
    ring, wrong = parse((("blue", b"same"), ("red", red)), earlier)
    assert ring.tenant_of("same") == "red"
    assert "have the same key; it is valid only for 'red'" in wrong[-1]
    # It was given over once only one claims it.
    assert ring_of((("blue", b"same"), ("red", b"other")), ring).tenant_of("same") == "blue"


def test_a_file_that_cannot_be_read_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "red").write_text("one")
    (tmp_path / "blue").write_text("two")
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "red":
            raise PermissionError
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert read_directory(tmp_path) == (("blue", b"two"), ("red", None))


def test_keys_are_not_kept() -> None:
    assert "hunter2" not in repr(ring_of((("red", b"hunter2"),)))


def test_odd_presented_keys() -> None:
    ring = ring_of((("red", b"one"),))
    assert ring.tenant_of("\udcff\u20ac" * 1000) is None
