"""Images are the same bytes for the same content."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

from outrider_local import images, pyruntime
from outrider_local.ociimage import Configuration, Entry, Image, Layer, write_archive, write_layer


def layer(folder: Path, name: str = "layer") -> Layer:
    program = folder / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    entries = [
        Entry("opt/app/program", source=program),
        Entry("etc/passwd", content=b"root:x:0:0\n"),
        Entry("bin", link="usr/bin"),
        Entry("tmp", mode=0o1777),
        Entry("etc/passwd", content=b"second\n"),
    ]
    return write_layer(entries, folder / name)


def test_a_layer_is_reproducible_and_owned_by_root(tmp_path: Path) -> None:
    first = layer(tmp_path)
    os.utime(tmp_path / "program", (1, 1))
    second = layer(tmp_path, "again")
    assert first.digest == second.digest
    with tarfile.open(first.file) as tar:
        members = {member.name: member for member in tar}
        assert list(members) == ["opt", "opt/app", "opt/app/program", "etc", "etc/passwd", "bin", "tmp"]
        assert {(m.uid, m.gid, m.mtime, m.uname) for m in members.values()} == {(0, 0, 0, "")}
        # A private file of the builder is readable by the image's user.
        assert members["opt/app/program"].mode == 0o755
        assert members["tmp"].mode == 0o1777
        assert tar.extractfile("etc/passwd").read() == b"root:x:0:0\n"  # type: ignore[union-attr]


def test_the_digest_of_an_image_covers_configuration_and_files(tmp_path: Path) -> None:
    image = Image((layer(tmp_path),), Configuration(("/program",), {"A": "1"}, "65532:65532"))
    assert image.digest == replace(image).digest
    other = replace(image, configuration=Configuration(("/program",), {"A": "2"}, "65532:65532"))
    labelled = replace(image, configuration=replace(image.configuration, labels={"lock": "x"}))
    (tmp_path / "program").write_text("changed\n")
    assert len({image.digest, other.digest, labelled.digest}) == 3


def test_an_archive_holds_what_its_index_says(tmp_path: Path) -> None:
    image = Image(
        (layer(tmp_path), layer(tmp_path, "same")), Configuration(("/program",), user="65532:65532")
    )
    write_archive(image, "localhost/outrider-operator:abc", tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as tar:
        blobs = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]
    index = json.loads(blobs["index.json"])
    manifest_entry = index["manifests"][0]
    manifest = json.loads(blobs["blobs/" + manifest_entry["digest"].replace(":", "/")])
    assert manifest_entry["digest"] == image.digest
    assert manifest_entry["annotations"]["io.containerd.image.name"] == "localhost/outrider-operator:abc"
    for entry in (manifest["config"], *manifest["layers"]):
        content = blobs["blobs/" + entry["digest"].replace(":", "/")]
        assert entry["size"] == len(content)
        assert entry["digest"] == "sha256:" + hashlib.sha256(content).hexdigest()
    config = json.loads(blobs["blobs/" + manifest["config"]["digest"].replace(":", "/")])
    assert config["config"]["User"] == "65532:65532"


def test_tags_follow_the_content(tmp_path: Path) -> None:
    image = Image((layer(tmp_path),), Configuration(("/program",)))
    name = images.reference("operator", image)
    assert name.startswith("localhost/outrider-operator:")
    assert name.endswith(image.digest[7:19])


def test_libraries_in_the_output_of_ldd() -> None:
    text = (
        "/usr/bin/python3:\n"
        "\tlinux-vdso.so.1 (0x00007ffc)\n"
        "\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f1)\n"
        "\tlibgone.so => not found\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f2)\n"
        "/bin/true:\n"
        "\tstatically linked\n"
    )
    assert list(pyruntime.loaded_libraries(text)) == [
        "/lib/x86_64-linux-gnu/libm.so.6",
        "/lib64/ld-linux-x86-64.so.2",
    ]
