"""Images and addresses of somebody who means harm, the same for a seed: what a server has to refuse with one line."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator

from PIL import Image

PRIVATE = (
    *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.31.255.1", "192.168.0.1", "169.254.169.254", "0.0.0.0"),
    *("100.100.100.200", "198.18.0.1", "224.0.0.1", "255.255.255.255", "168.63.129.16", "192.0.0.170"),
    *("::", "::1", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1", "fec0::1", "::ffff:127.0.0.1", "::127.0.0.1"),
    *("::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::1", "2001:0:7f00:1::", "2001:db8::1"),
    *("2606:4700::5efe:127.0.0.1", "fe80::1%1"),
)
"""Addresses that no packet may go to."""
WORDS = ("127.0.0.1", "localhost", "169.254.169.254", "metadata.google.internal", "evil.example", "[::1]", "0")


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
        scheme = rng.choice(("http", "https", "HTTP", "http", "ftp", "gopher", "file", "javascript", "dict", "//", ""))
        host = spellings(rng) if rng.random() < 0.6 else rng.choice(WORDS)
        user = rng.choice(("", "", "", "a@", "example.org@", "a:b@", "evil.example\\@", "evil.example#@"))
        port = rng.choice(("", "", "", ":80", ":443", ":22", ":6379", ":0", ":65536", ":-1", ":٨٠", ":x"))
        path = rng.choice(
            ("/", "/latest/meta-data/", "/../etc/passwd", "\r\nX: y", "/\t", "?u=http://[::1]", "/\0", "")
        )
        url = f"{scheme}://{user}{host}{port}{path}"
        if rng.random() < 0.1:
            url = "".join(rng.choice((char, char, char, chr(rng.randrange(1, 0x3000)))) for char in url)
        yield url


def seeds() -> list[bytes]:
    """Return a whole image of each format and several modes."""
    made = []
    for mode in ("RGB", "RGBA", "L", "P", "1", "LA"):
        image = Image.effect_noise((40, 30), 90).convert(mode)
        for kind in ("PNG", "JPEG", "WEBP", "GIF"):
            file = io.BytesIO()
            try:
                image.save(file, kind, **({"save_all": True, "append_images": [image] * 2} if kind == "GIF" else {}))
            except OSError:  # JPEG has no alpha
                continue
            made.append(file.getvalue())
    return made


def bombs() -> list[bytes]:
    """Return small files that become large, or claim to be."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    def png(width: int, height: int, *more: bytes) -> bytes:
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0))
        return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IEND", b"")

    zeros = zlib.compress(bytes(1 << 22))
    return [
        *(png(side, side, chunk(b"IDAT", zeros)) for side in (1 << 14, 1 << 20, (1 << 31) - 1)),
        png(1, 1 << 26, chunk(b"IDAT", zeros)),
        png(8, 8, chunk(b"zTXt", b"k\0\0" + zeros), chunk(b"IDAT", zeros)),
        png(8, 8, chunk(b"iCCP", b"k\0\0" + zeros), chunk(b"IDAT", zeros)),
        png(8, 8, *[chunk(b"tEXt", b"k\0" + bytes(1000))] * 200, chunk(b"IDAT", zeros)),
        png(8, 8, chunk(b"eXIf", b"II*\0\x08\0\0\0" + b"\xff" * 64), chunk(b"IDAT", zeros)),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + bytes(6) + b"," + bytes(9) + b"\x08\xff" * 200,
        b"RIFF" + struct.pack("<I", 1 << 30) + b"WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff" * 6,
        b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03" + bytes(9) + b"\xff\xda",
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
