"""Tests image files, their places in a message, and the projector that belongs to a
model's file."""

import struct
from pathlib import Path

import pytest
from pictures import (
    base64_of,
    deep_png,
    gif,
    image,
    jpeg,
    jpeg_header,
    message,
    png,
    png_bomb,
    with_thumbnail,
)

from moegguf.chat.session import begins_with_image, extract_images
from moegguf.engine.projector import has_end
from moegguf.errors import ModelFormatError, OptionError
from moegguf.generate.images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    image_part,
    mark_images,
    read_image,
    text_of,
)
from moegguf.gguf.projector import read_projector
from moegguf.models.catalog import Catalog
from moegguf.models.selection import projector_beside
from tools.models import write_projector


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(3, 5), (3, 5)),
        (jpeg_header(640, 480), (640, 480)),
        (b"GIF89a" + struct.pack("<HH", 7, 9), (7, 9)),
    ],
)
def test_read_image_reads_dimensions_without_decoding(
    data: bytes, size: tuple[int, int]
) -> None:
    found = read_image(data)
    assert (found.width, found.height) == size


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png_bomb(60000, 60000), "pixels"),
        (deep_png(5000, 4000)[:64], "12582912 pixels"),
        (png_bomb(6500, 100), "times the shorter side"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "PNG, JPEG or GIF"),
        (b"", "PNG, JPEG or GIF"),
        (png()[:20], "PNG, JPEG or GIF"),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 10000, "PNG, JPEG or GIF"),
        (b"\xff\xd8\xff\xe0\xff\xff", "PNG, JPEG or GIF"),
        (png() + bytes(MAX_IMAGE_BYTES), f"at most {MAX_IMAGE_BYTES} bytes"),
    ],
)
def test_read_image_rejects_oversized_and_undecodable_files(
    data: bytes, reason: str
) -> None:
    with pytest.raises(OptionError, match=reason):
        read_image(data)


@pytest.mark.parametrize(
    "data",
    [
        jpeg(),
        jpeg(progressive=True),
        jpeg(restart_marker_blocks=1),
        jpeg(comment=b"a" * 300, quality=100),
        with_thumbnail(jpeg(progressive=True)),
        gif(),
        gif(3),
    ],
    ids=(
        "baseline",
        "progressive",
        "restarts",
        "comment",
        "thumbnail",
        "GIF",
        "animated",
    ),
)
def test_has_end_detects_a_file_cut_anywhere(data: bytes) -> None:
    assert (
        has_end(data)
        and has_end(data + b"\0\xff\xd8more")
        and read_image(data).width == 32
    )
    whole = data.rstrip(b"\0")
    assert [n for n in range(6, len(whole)) if has_end(data[:n])] == []


def test_has_end_accepts_padding_and_rejects_endless_files() -> None:
    start, *rest = gif(2).partition(b"\x2c")
    assert has_end(b"".join((start, b"\0\0", *rest))), "zeros between two blocks"
    plain = jpeg()
    assert has_end(plain[:-2] + b"\xff\xff\xff\xd9"), "fill bytes before a marker"
    assert has_end(png()) and has_end(b"") and has_end(b"RIFF")
    assert not has_end(b"\xff\xd8" + b"\xff\xe0\0\x02" * 10_000 + b"\xff\xd9"), (
        "too many segments"
    )
    assert not has_end(b"\xff\xd8" + b"\xff" * MAX_IMAGE_BYTES)
    assert not has_end(b"\xff\xd8\xff\xda\0\2" + b"\xff\0" * (MAX_IMAGE_BYTES // 2))


@pytest.mark.parametrize("text", ["!!!", "data:image/png;base64,AAAA", "é"])
def test_image_part_accepts_line_breaks_in_base64_and_rejects_other_text(
    text: str,
) -> None:
    with pytest.raises(OptionError, match="base64"):
        image_part(text)
    good = base64_of(png(1, 1))
    assert image_part(good[:10] + "\n" + good[10:])["type"] == "image"


def test_mark_images_keeps_the_place_of_each_image() -> None:
    marked = mark_images(
        [message("a", "b", png(1, 1), "c"), {"role": "assistant", "content": "d"}]
    )
    assert (
        marked.messages[0]["content"] == f"a\nb{marked.marker}c"
        and marked.messages[1]["content"] == "d"
    )
    assert marked.pieces(f"<{marked.marker}>") == ["<", ">"]
    assert marked.pieces("none") is None and marked.pieces(marked.marker * 2) is None
    assert text_of(message("a", png(1, 1), "b")["content"]) == "a\nb"
    with pytest.raises(OptionError, match="at most"):
        mark_images(
            [{"role": "user", "content": [image(png(1, 1))] * (MAX_IMAGES + 1)}]
        )


def test_extract_images_replaces_paths_in_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.png", "with space.PNG"):
        (tmp_path / name).write_bytes(png(2, 2))
    escaped = str(tmp_path / "with space.PNG").replace(" ", "\\ ")
    text, images = extract_images(
        f"what is {tmp_path}/a.png and '{tmp_path}/a.png', or {escaped}?"
    )
    assert text == "what is  and , or ?" and images == [png(2, 2)] * 3
    assert capsys.readouterr().err.count("Added image") == 3
    assert extract_images(f"no {tmp_path}/b.png, a.png") == (
        f"no {tmp_path}/b.png, a.png",
        [],
    )
    assert begins_with_image(f"{tmp_path}/a.png what?") and not begins_with_image(
        "/set system x.png"
    )
    (tmp_path / "a.png").write_bytes(b"text")
    with pytest.raises(OptionError, match=r"a\.png"):
        extract_images(f"what is {tmp_path}/a.png?")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m-Q4_0.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["m-Q4_0.gguf", "n-Q4_0.gguf", "mmproj-F16.gguf"], None),
        (
            ["m-Q4_0.gguf", "n-Q4_0.gguf", "mmproj-m-F16.gguf", "mmproj-n-F16.gguf"],
            "mmproj-m-F16.gguf",
        ),
    ],
)
def test_projector_beside_selects_the_projector_of_a_file(
    tmp_path: Path, names: list[str], expected: str | None
) -> None:
    assert projector_beside("m-Q4_0.gguf", names) == expected
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    # The folder itself can be opened as a model: it has one model and one projector.
    if len(names) == 2:
        entry = Catalog().find(tmp_path)
        assert (
            entry.path.name == "m-Q4_0.gguf"
            and entry.mmproj == tmp_path / "mmproj-F16.gguf"
        )


def test_read_projector_reads_its_header_and_rejects_cut_files(tmp_path: Path) -> None:
    good = write_projector(tmp_path / "mmproj.gguf", "gemma3", 128)
    header = read_projector(good)
    assert (header.kind, header.one_pass_tokens, header.n_patches) == ("gemma3", 64, 64)
    assert header.total_bytes > header.weight_bytes > 0
    for length in (0, 3, 100, len(good.read_bytes()) - 40):
        (tmp_path / "cut.gguf").write_bytes(good.read_bytes()[:length])
        with pytest.raises(ModelFormatError):
            read_projector(tmp_path / "cut.gguf")
