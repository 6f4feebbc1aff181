"""From bytes to pixels: formats by their first bytes, limits before memory, one line for whatever is damaged."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from dovetail_server.media.decode import decoded, sniffed
from dovetail_server.media.refusals import MAX_IMAGE_BYTES, MediaError
from dovetail_server.media.sources import data_of, read_local, source_of

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_of(
    width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2, transparent: bytes = b""
) -> bytes:
    """A PNG that claims a size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    more = chunk(b"tRNS", transparent) if transparent else b""
    rest = chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + rest


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind: str) -> None:
    """The four that are decoded, all to RGB."""
    image = Image.new("RGB", (5, 3), RED)
    made = decoded(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert (made.mode, made.size) == ("RGB", (5, 3))
    assert max(abs(a - b) for a, b in zip(made.getpixel((2, 1)), RED, strict=True)) <= 2


def test_the_first_frame() -> None:
    """Of an animation only what comes first is seen."""
    frames = [Image.new("RGB", (4, 4), colour) for colour in (GREEN, RED)]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decoded(data).getpixel((0, 0)) == GREEN


def test_orientation() -> None:
    """What a camera says of the image's orientation holds, as in transformers."""
    image = Image.new("RGB", (4, 2), RED)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoded(encoded(image, "PNG", exif=exif)).size == (2, 4)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_pillows(orientation: int, kind: str) -> None:
    """Turned and mirrored as Pillow's own function does it, also where another tag has a value that it cannot write."""
    image = Image.frombytes("RGB", (4, 3), bytes(range(0, 252, 7)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    plain = encoded(image, kind, exif=exif)
    with Image.open(io.BytesIO(plain)) as opened:
        wanted = ImageOps.exif_transpose(opened)
    exif[0x011A] = 72.0  # a resolution, …
    text = exif.tobytes()
    order: Any = "big" if text[6:8] == b"MM" else "little"
    at = text.index((0x011A).to_bytes(2, order)) + 2
    odd = text[:at] + (2).to_bytes(2, order) + text[at + 2 :]  # … which is of text
    for data in (plain, encoded(image, kind, exif=odd)):
        assert (decoded(data).size, decoded(data).tobytes()) == (wanted.size, wanted.tobytes())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_metadata_is_no_damaged_image(kind: str) -> None:
    """An image whose EXIF is cut off is seen as it lies."""
    image = Image.new("RGB", (4, 2), RED)
    assert decoded(encoded(image, kind, exif=b"Exif\0\0MM\0")).size == (4, 2)


@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [
        ("RGBA", (255, 0, 0, 0), WHITE),
        ("RGBA", (255, 0, 0, 255), RED),
        ("RGBA", (0, 0, 0, 127), (128, 128, 128)),
        ("LA", (0, 0), WHITE),
        ("L", 7, (7, 7, 7)),
        ("1", 1, WHITE),
        ("I;16", 0x8000, (128, 128, 128)),
    ],
)
def test_modes(mode: str, colour: Any, seen: tuple[int, int, int]) -> None:
    """Transparent pixels lie over white, and greys of 16 bits keep their upper ones."""
    assert decoded(encoded(Image.new(mode, (3, 3), colour), "PNG")).getpixel((1, 1)) == seen


@pytest.mark.parametrize("clear", [0x1234, 7, 0xFFFF, None])
def test_greys_of_16_bits_with_a_transparent_one(clear: int | None) -> None:
    """It alone is white; a grey with the same upper bits is not."""
    greys = [0x1234, 0x1235, 7, 0x0700, 0xFFFE]
    rows = b"\0" + struct.pack(">5H", *greys)
    image = decoded(png_of(5, 1, rows, 16, 0, b"" if clear is None else struct.pack(">H", clear)))
    want = [255 if grey == clear else grey >> 8 for grey in greys]
    assert [image.getpixel((at, 0)) for at in range(5)] == [(level,) * 3 for level in want]


def test_a_palette_with_a_transparent_colour() -> None:
    """As alpha."""
    image = Image.new("P", (3, 3), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    assert decoded(encoded(image, "PNG", transparency=0)).getpixel((1, 1)) == WHITE


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"hello", "no image"),
        (b"BM" + bytes(60), "BMP"),
        (b"II*\0" + bytes(60), "TIFF"),
        (b"%PDF-1.7", "PDF"),
        (b"<svg xmlns='x'/>", "SVG"),
        (b"\n <!DOCTYPE HTML><p>", "HTML"),
        (b"\0\0\0\x18ftypavif", "AVIF"),
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"\0\0\0\x18ftypisom", "a video"),
        (b"RIFF\0\0\0\0AVI LIST", "a video"),
        (b"RIFF\0\0\0\0WAVEfmt ", "audio"),
        (b"\x1aE\xdf\xa3", "a video"),
        (b"ID3\x04", "audio"),
        (b"\x89PNG\r\n\x1a\n", "PNG image cannot be decoded"),
        (b"\xff\xd8\xff\xe0" + bytes(40), "JPEG image cannot be decoded"),
        (b"GIF89a" + bytes(4), "GIF image cannot be decoded"),
        (b"RIFF\x04\0\0\0WEBP", "WEBP image cannot be decoded"),
        (encoded(Image.new("RGB", (64, 64), RED), "PNG")[:-30], "PNG image cannot be decoded"),
        (encoded(Image.effect_noise((64, 64), 90), "JPEG")[:900], "JPEG image cannot be decoded"),
        (png_of(8192, 8193), "8192 x 8193 pixels"),
        (png_of(1 << 30, 1 << 30), "pixels"),
        (png_of(0, 5), "PNG image cannot be decoded"),
    ],
)
def test_what_is_none(data: bytes, why: str) -> None:
    """Each is refused with one line that says what is possible."""
    with pytest.raises(MediaError) as found:
        decoded(data)
    assert why in found.value.message
    assert "\n" not in found.value.message
    assert len(found.value.message) < 300


def test_a_bomb_takes_no_memory_before_it_is_refused() -> None:
    """A small file of many pixels is refused by its head: these would be 3 GB."""
    with pytest.raises(MediaError, match="at most 67,108,864"):
        decoded(png_of(32768, 32768, bytes(1 << 20)))


def test_a_type_is_not_believed() -> None:
    """A WebP that is called a PNG is one, and a format that Pillow knows and we do not is none."""
    data = encoded(Image.new("RGB", (4, 4), RED), "WEBP", lossless=True)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert sniffed(data_of(url)) == "WEBP"
    with pytest.raises(MediaError, match="TIFF"):
        decoded(encoded(Image.new("RGB", (4, 4)), "TIFF"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,%%%", "no valid base64"),
        ("data:image/png;base64,a", "no valid base64"),
        ("data:image/png;base64,aG=k", "no valid base64"),
        ("data:image/png;base64,aGk-", "URL-safe"),
        ("data:image/png;base64,data:image/png;base64,aGk=", "begins with data:"),
        ("data:image/png;base64,é", "no valid base64"),
        ("data:video/mp4;base64,aGk=", "video is not read"),
        ("data:audio/wav;base64,aGk=", "audio is not read"),
        ("data:" + "x" * 1000 + ",", "no comma"),
        ("data:;base64," + "A" * (MAX_IMAGE_BYTES // 3 * 4 + 16), "more than 20 MiB"),
    ],
)
def test_data_urls(url: str, why: str) -> None:
    """What is wrong with one is said."""
    with pytest.raises(MediaError, match=why):
        data_of(url)


@pytest.mark.parametrize("text", ["aGVsbG8=", "aGVs\nbG8=\n", "aGVs\r\nbG8=", " aGVsbG8", "aGVsbG8%3D%0A"])
def test_base64_as_browsers_read_it(text: str) -> None:
    """What `base64 cat.png` writes has line breaks."""
    assert data_of(f"data:image/png;base64,{text}") == b"hello"


@pytest.mark.parametrize("head", ["image/png; base64", "image/png ;BASE64 ", ";base64", "image/png;name=a.png;base64"])
def test_heads_as_browsers_read_them(head: str) -> None:
    """There may be spaces around words, and what stands behind # is no data."""
    assert data_of(f"data:{head},aGVsbG8=#page") == b"hello"


@pytest.mark.parametrize("head", [b"\x89PNG\r\n\x1a\n\0\0", b"RIFF\0\0\0\0WEBP", b"GIF89a\0"])
def test_no_address_of_the_process(head: bytes) -> None:
    """Pillow says where in memory the data lies; clients are not told."""
    with pytest.raises(MediaError, match="cannot be decoded") as found:
        decoded(head)
    assert "0x" not in found.value.message


def test_local_files(tmp_path: Path) -> None:
    """Only regular files below the directory are read; no link leads out, and what is outside has one error."""
    root, outside = tmp_path / "images", tmp_path / "secret"
    (root / "a b").mkdir(parents=True)
    outside.mkdir()
    (root / "a b" / "cat.png").write_bytes(b"cat")
    (outside / "key").write_bytes(b"key")
    (root / "link").symlink_to(outside / "key")
    (root / "folder").symlink_to(outside)
    (root / "inside").symlink_to(root / "a b" / "cat.png")
    os.mkfifo(root / "pipe")
    (root / "large").write_bytes(bytes(MAX_IMAGE_BYTES + 1))
    assert read_local(f"file://{root}/a%20b/cat.png", root) == b"cat"
    assert read_local(f"file://localhost{root}/inside", root) == b"cat"
    out = [
        *("link", "folder/key", "../secret/key", "..%2fsecret%2fkey", "../secret/nothing", "../images2/x", "", "."),
        *("a b/../../secret/key",),
    ]
    errors = set()
    for name in out:
        with pytest.raises(MediaError, match="outside") as found:
            read_local(f"file://{root}/{name}", root)
        errors.add(found.value.message.partition(" is outside")[2])
    assert len(errors) == 1
    for name, why in (("pipe", "no regular file"), ("a b", "no regular file"), ("large", "20 MiB"), ("no", "be read")):
        with pytest.raises(MediaError, match=why):
            read_local(f"file://{root}/{name}", root)
    for url in ("file:///etc/passwd", "file:///proc/self/environ", "file:/etc/passwd", "file:etc", "file://"):
        with pytest.raises(MediaError, match="outside"):
            read_local(url, root)
    for url in (f"file://host{root}/x", f"file://{root}/x?y", f"file://{root}/%00", f"file://{root}/%ff"):
        with pytest.raises(MediaError, match=r"file:///images/cat\.png"):
            read_local(url, root)
    with pytest.raises(MediaError, match="--allowed-local-media-path"):
        read_local(f"file://{root}/a%20b/cat.png", None)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"type": "image_url", "image_url": {"url": "u", "detail": "low"}}, ("u", "")),
        ({"type": "image_url", "image_url": "u"}, ("u", "")),
        ({"type": "image_url", "image_url": {"file_id": "f"}}, ("", "f")),
        ({"type": "input_image", "image_url": "u", "detail": "auto"}, ("u", "")),
        ({"type": "input_image", "file_id": "f"}, ("", "f")),
        ({"type": "image", "image": "u"}, ("u", "")),
        ({"type": "image", "url": "u", "detail": None}, ("u", "")),
        ({"type": "image_url", "file_id": "f"}, ("", "f")),
    ],
)
def test_parts(part: dict[str, Any], key: tuple[str, str]) -> None:
    """Each API's form of a part."""
    assert source_of(part, "here").key == key
    assert source_of({**part, "param": "there"}, "here").param == "there"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": ["u"]},
        {"type": "image_url", "image_url": {"url": "u", "detail": "huge"}},
        {"type": "image_url", "image_url": {"url": "u", "detail": ["low"]}},
        {"type": "image_url", "image_url": {"url": "u", "detail": []}},
        {"type": "image_url", "image_url": "u", "detail": {}},
        {"type": "image_url", "image_url": "u", "url": "v"},
        {"type": "image_url", "image_url": {"url": "u"}, "file_id": "f"},
        {"type": "image", "image": "u", "url": "v"},
        {"type": "input_image", "image_url": "u", "file_id": "f"},
        {"type": "input_image", "file_id": {}},
        {"type": "image", "image": None},
    ],
)
def test_parts_that_say_nothing(part: dict[str, Any]) -> None:
    """The error names the part."""
    from dovetail.contracts.errors import RequestError

    with pytest.raises(RequestError, match=r"messages\[1\]\.content\[2\]") as found:
        source_of(part, "messages[1].content[2]")
    assert found.value.param == "messages[1].content[2]"
