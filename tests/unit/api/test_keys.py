"""API keys: directories as Kubernetes mounts them, and what a broken one does."""

from pathlib import Path

import pytest

from outrider_serving.api.keys import KeysError, parse, read_directory


def test_a_plain_directory(tmp_path: Path) -> None:
    (tmp_path / "red").write_text("one\n\n  two \r\n")
    (tmp_path / "blue").write_text("three")
    (tmp_path / ".hidden").write_text("four")
    (tmp_path / "folder").mkdir()
    ring = parse(read_directory(tmp_path))
    assert [ring.tenant_of(key) for key in ("one", "two", "three")] == ["red", "red", "blue"]
    assert [ring.tenant_of(key) for key in ("four", "", "on", "one ", "ONE")] == [None] * 5
    assert ring.tenants == ["blue", "red"]


def test_a_mounted_secret_is_read_through_its_link(tmp_path: Path) -> None:
    for version in ("..first", "..second"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "red").write_text(f"key-of-{version}")
    (tmp_path / "..data").symlink_to("..first")
    (tmp_path / "red").symlink_to("..data/red")
    assert parse(read_directory(tmp_path)).tenant_of("key-of-..first") == "red"
    (tmp_path / "..next").symlink_to("..second")
    (tmp_path / "..next").rename(tmp_path / "..data")
    ring = parse(read_directory(tmp_path))
    assert ring.tenant_of("key-of-..second") == "red"
    assert ring.tenant_of("key-of-..first") is None


def test_an_empty_directory_admits_nobody(tmp_path: Path) -> None:
    ring = parse(read_directory(tmp_path))
    assert ring.tenant_of("") is None
    assert ring.tenants == []


def test_a_key_twice_in_one_tenant_is_one_key() -> None:
    assert parse((("red", b"one\none\n"),)).tenant_of("one") == "red"


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ((("blue", b"same"), ("red", b"other\nsame")), "red, line 2: this key belongs to blue too"),
        ((("red", b"secret key"),), "red, line 1"),
        ((("red", "schlüssel".encode()),), "red, line 1"),
        ((("red", b"\x00\xff\xfe"),), "red, line 1"),
    ],
)
def test_a_broken_set_is_refused_without_naming_a_key(
    contents: tuple[tuple[str, bytes], ...], says: str
) -> None:
    with pytest.raises(KeysError) as refused:
        parse(contents)
    assert says in str(refused.value)
    assert "same" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_keys_are_not_kept() -> None:
    assert "hunter2" not in repr(parse((("red", b"hunter2"),)))


def test_odd_presented_keys() -> None:
    ring = parse((("red", b"one"),))
    assert ring.tenant_of("\udcff\u20ac" * 1000) is None
