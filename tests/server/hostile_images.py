"""Images and addresses of somebody who means harm, the same for a seed: what a server has to refuse with one line."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any
from urllib.parse import quote_from_bytes

from PIL import Image

PRIVATE = (
    *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.31.255.1", "192.168.0.1", "169.254.169.254", "0.0.0.0"),
    *("100.100.100.200", "198.18.0.1", "224.0.0.1", "255.255.255.255", "168.63.129.16", "192.0.0.170"),
    *("::", "::1", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1", "fec0::1", "::ffff:127.0.0.1", "::127.0.0.1"),
    *("::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::1", "2001:0:7f00:1::", "2001:db8::1"),
    *("2606:4700::5efe:127.0.0.1", "fe80::1%1"),
)
"""Addresses that no packet may go to."""
WORDS = (
    *("127.0.0.1", "localhost", "169.254.169.254", "metadata.google.internal", "evil.example", "[::1]", "0"),
    *("localhost.", "evil.example.", "127.0.0.1..", "LOCALHOST", "ip6-localhost", "[::ffff:a9fe:a9fe]", "[v1.x]"),
    *(
        "xn--lcalhst-n4ac.example",
        "xn--",
        "xn--a-\x00.example",
        "b\u00fccher.example",
        "\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3",
        "127。0。0。1",
    ),
    *(
        "127.0.0.1%00.example",
        "127.0.0.1&evil.example",
        "[::1",
        "::1",
        "a" * 64 + ".example",
        "a." * 130,
        "-",
        "_",
        ".",
        "",
    ),
)


def spellings(rng: random.Random) -> str:
    """Return an IPv4 address of a private range as systems read it and people do not."""
    parts = rng.choice(([127, 0, 0, 1], [169, 254, 169, 254], [10, 0, 0, 1], [192, 168, 1, 1], [0, 0, 0, 0]))
    number = int.from_bytes(bytes(parts), "big")
    forms: list[Callable[[int], str]] = [str, hex, lambda n: f"0{n:o}", lambda n: f"0x{n:08X}", lambda n: f"{n:012d}"]
    return rng.choice(
        (
            rng.choice(forms)(number),
            ".".join(rng.choice(forms)(part) for part in parts),
            f"{rng.choice(forms)(parts[0])}.{rng.choice(forms)(number & 0xFFFFFF)}",
            f"[::ffff:{number >> 16:x}:{number & 0xFFFF:x}]",
            f"[64:ff9b::{number >> 16:x}:{number & 0xFFFF:x}]",
            f"[2002:{number >> 16:x}:{number & 0xFFFF:x}::]",
            f"[{rng.choice(PRIVATE).partition('%')[0] if rng.random() < 0.5 else '::1'}]",
            "[fe80::1%25eth0]",
            ".".join(map(str, parts)) + ".",
            ".".join(map(str, parts)).replace("1", rng.choice(("①", "１", "%31"))),
        )
    )


def addresses(seed: int) -> Iterator[str]:
    """Yield URLs without end; no public host is named but `evil.example`, whose answers the test makes up."""
    rng = random.Random(seed)
    while True:
        scheme = rng.choice(
            (
                "http",
                "https",
                "HTTP",
                "http",
                "ftp",
                "gopher",
                "file",
                "javascript",
                "dict",
                "//",
                "",
                "data",
                "http:",
                "\thttp",
                "ht\ntp",
                "blob:http",
                "unix",
                "jar:http",
            )
        )
        host = spellings(rng) if rng.random() < 0.6 else rng.choice(WORDS)
        user = rng.choice(
            (
                "",
                "",
                "",
                "a@",
                "example.org@",
                "a:b@",
                "evil.example\\@",
                "evil.example#@",
                "a%40b@",
                "@",
                ":@",
                "evil.example:80@",
                "a@b@",
            )
        )
        port = rng.choice(
            (
                "",
                "",
                "",
                ":80",
                ":443",
                ":22",
                ":6379",
                ":0",
                ":65536",
                ":-1",
                ":٨٠",
                ":x",
                ":http",
                ":",
                ":80:80",
                ":+80",
                ":8_0",
            )
        )
        path = rng.choice(
            (
                *("/", "/latest/meta-data/", "/../etc/passwd", "\r\nX: y", "/\t", "?u=http://[::1]", "/\0", ""),
                *("/%0d%0aX:%20y", "/ HTTP/1.1\r\nHost: a\r\n\r\n", "/%00", "#@evil.example/", ";/", "/" + "a" * 9000),
            )
        )
        url = f"{scheme}://{user}{host}{port}{path}"
        if rng.random() < 0.1:
            url = "".join(rng.choice((char, char, char, chr(rng.randrange(1, 0x3000)))) for char in url)
        yield url


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def seeds() -> list[bytes]:
    """Return a whole image of each format and several modes, and of rarer forms."""
    made = []
    for mode in ("RGB", "RGBA", "L", "P", "1", "LA"):
        image = Image.effect_noise((40, 30), 90).convert(mode)
        for kind in ("PNG", "JPEG", "WEBP", "GIF"):
            try:
                made.append(
                    saved(image, kind, **({"save_all": True, "append_images": [image] * 2} if kind == "GIF" else {}))
                )
            except OSError:  # JPEG has no alpha
                continue
    grey = Image.effect_noise((40, 30), 90)
    frames: dict[str, Any] = {"save_all": True, "append_images": [grey.rotate(90)] * 3}
    turned = Image.Exif()
    turned[0x0112] = 6
    return [
        *made,
        *(saved(grey.convert(mode), "JPEG", progressive=True) for mode in ("RGB", "CMYK")),
        saved(grey.convert("I;16"), "PNG", transparency=7),
        saved(grey.convert("P"), "PNG", transparency=bytes(range(256))),
        *(saved(grey.convert("RGB"), kind, **frames) for kind in ("PNG", "WEBP", "MPO")),
        *(saved(grey, kind, exif=turned, icc_profile=bytes(4000)) for kind in ("JPEG", "PNG", "WEBP")),
    ]


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *more: bytes, bits: int = 8, colour: int = 6) -> bytes:
    """Return a PNG of these chunks."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IEND", b"")


def bombs() -> list[bytes]:
    """Return small files that become large, or claim to be, or are two things at once."""
    zeros = zlib.compress(bytes(1 << 22))
    data, text = chunk(b"IDAT", zeros), b"k\0\x01\0\0\0" + zeros
    animated = chunk(b"acTL", struct.pack(">II", 0x7FFFFFFF, 0))
    frame = struct.pack(">IIIIIHHBB", 0, 0x7FFFFFFF, 0x7FFFFFFF, 1, 1, 0, 0, 0, 0)
    whole, turned = saved(Image.effect_noise((40, 30), 90), "PNG"), b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0"
    webp = bytearray(
        saved(Image.new("RGB", (9, 9)), "WEBP", save_all=True, append_images=[Image.new("RGB", (9, 9), 9)])
    )
    webp[24:30] = b"\xff\x3f\0\xff\x3f\0"  # its canvas: 16,384 pixels each way
    jpeg = saved(Image.new("RGB", (40, 30)), "JPEG")
    return [
        *(png(side, side, data) for side in (1 << 14, 1 << 20, (1 << 31) - 1)),
        png(1, 1 << 26, data),
        png(8, 8, chunk(b"zTXt", b"k\0\0" + zeros), data),
        png(8, 8, chunk(b"iCCP", b"k\0\0" + zeros), data),
        png(8, 8, *[chunk(b"tEXt", b"k\0" + bytes(1000))] * 200, data),
        png(8, 8, chunk(b"eXIf", b"II*\0\x08\0\0\0" + b"\xff" * 64), data),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + bytes(6) + b"," + bytes(9) + b"\x08\xff" * 200,
        b"RIFF" + struct.pack("<I", 1 << 30) + b"WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff" * 6,
        b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03" + bytes(9) + b"\xff\xda",
        png(8, 8, *[chunk(b"iTXt", text)] * 64, data),
        png(8, 8, data, *[chunk(b"zTXt", b"k\0\0" + zeros)] * 64),
        png(8, 8, animated, chunk(b"fcTL", frame), data, chunk(b"fdAT", b"\0\0\0\x01" + zeros)),
        png(8, 8, *[animated, chunk(b"fcTL", frame)] * 2000, data),
        *(
            png(*size, chunk(b"IDAT", zlib.compress(bytes(1_100_000))), bits=1, colour=0)
            for size in ((1, 1_000_000), (1_000_000, 1), (8_800_000, 1))
        ),
        png(8, 8, chunk(b"PLTE", bytes(3)), chunk(b"tRNS", bytes(70_000)), data, colour=3),
        png(8, 8, chunk(b"eXIf", turned + b"\xff\xff\xff\xff\x06\0\0\0\x08\0\0\0"), data),  # its directory is its next
        png(8, 8, chunk(b"IHDR", struct.pack(">IIBBBBB", 1 << 20, 1 << 20, 8, 6, 0, 0, 0)), data),
        bytes(webp),
        bytes(webp[: webp.index(b"ANMF")]) + bytes(webp[webp.index(b"ANMF") :]) * 5000,
        jpeg[:2] + b"".join(b"\xff\xe1\xff\xffExif\0\0" + turned + bytes(65_535 - 22) for _ in range(40)) + jpeg[2:],
        jpeg[:2]
        + b"".join(b"\xff\xe2\xff\xffICC_PROFILE\0" + bytes([n, 255]) + bytes(65_535 - 16) for n in range(40))
        + jpeg[2:],
        jpeg.replace(b"\xff\xc0", b"\xff\xc9"),
        jpeg.replace(b"\xff\xc0", b"\xff\xc3"),
        *(whole + end for end in (b"PK\3\4" + bytes(99), b"%PDF-1.7", b"<script>alert(1)</script>")),
        *(
            start + whole
            for start in (
                b"\n",
                b"\xef\xbb\xbf",
                b"<svg>",
                b"%PDF-1.7 ",
                b"GIF89a/*",
                b"\xff\xd8\xff\xe0",
                b"RIFF\0\0\0\0WEBP",
            )
        ),
    ]


def costly() -> list[bytes]:
    """Return files that decoders work on for long: 64 Mi pixels, and 2,000 scans of an image."""
    side, blank = 1 << 13, b"\xff\xc4"
    many = saved(Image.new("L", (8000, 8000), 90), "JPEG", progressive=True)
    last = many[many.rindex(blank) : -2]
    return [
        *(saved(Image.new(mode, (side, side)), "PNG") for mode in ("RGBA", "1", "P")),
        saved(Image.new("P", (side, side)), "GIF", transparency=0),
        saved(Image.new("RGB", (side, side)), "WEBP", quality=0, method=0),
        saved(Image.new("CMYK", (side, side)), "JPEG", quality=1),
        many[:-2] + last * 2000 + many[-2:],
    ]


def images(seed: int) -> Iterator[bytes]:
    """Yield files without end: bombs, then whole images that were cut, changed, mixed or lengthened."""
    rng = random.Random(seed)
    whole = seeds()
    yield from bombs()
    while True:
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(data)) if data else 0
            kind = rng.randrange(6)
            if kind == 0:
                del data[at:]
            elif kind == 1 and data:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 2:
                data[at : at + 4] = struct.pack(">I", rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32))))
            elif kind == 3:
                data[at:at] = rng.randbytes(rng.randrange(64))
            elif kind == 4:
                other = rng.choice(whole)
                data[at:] = other[rng.randrange(len(other)) :]
            else:
                data[at : at + rng.randrange(64)] = b""
        yield bytes(data)


HEADS = (
    *("data:image/png;base64,", "DATA:image/png;BASE64,", "data:;base64,", "data:image/jpeg;charset=\u00fc;base64,"),
    *(
        "data:text/html;charset=utf-7;base64,",
        "data:image/svg+xml;base64,",
        "data:application/pdf;base64 ,",
        "data:image/png,",
    ),
    *(
        "data:image/png;base64;base64,",
        "data:video/mp4;base64,",
        "data:" + "a" * 300 + ";base64,",
        "data:base64",
        "data:",
    ),
    *(
        'data:image/png;name="a,b";base64,',
        "data:image/png;base64=1,",
        "data:image/png;\r\nX: y;base64,",
        "data://x;base64,",
    ),
)
"""Beginnings of `data:` URLs: media types that lie, and what is no beginning."""


def data_urls(seed: int) -> Iterator[str]:
    """Yield `data:` URLs without end: heads that lie, and base64 that is written in odd ways or is none."""
    rng = random.Random(seed)
    whole = seeds()
    for head in cycle(HEADS):
        data = rng.choice(whole)
        text = base64.b64encode(data).decode()
        at = rng.randrange(len(text))
        yield head + rng.choice((
            text, text.rstrip("="), text + "=" * rng.randrange(1, 9), text[:at] + "=" + text[at:], text[:at], "", "%00",
            "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)), " ".join(text), text + head + text,
            *(text[:at] + odd + text[at:] for odd in ("\0", "%", "#", "\u2028", "\u00ff", "%0A")),
            quote_from_bytes(text.encode(), safe=""), quote_from_bytes(data), base64.urlsafe_b64encode(data).decode(),
            base64.b64encode(text.encode()).decode(), "A" * (28 << 20) if rng.random() < 0.02 else "A" * 99,
        ))  # fmt: skip
