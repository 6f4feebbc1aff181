"""From the bytes of an image to upright RGB pixels. Only for processes that can be killed: decoders are native code.

The format is that of the first bytes; what a client or server calls it says nothing. Orientation is applied as
transformers' `load_image` does; transparent pixels are laid over white, as vLLM does.
"""

from __future__ import annotations

import io
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dovetail.contracts.processor import MAX_IMAGE_PIXELS
from dovetail_server.media.refusals import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

NO_PILLOW = "Pillow cannot be imported here; the operator runs pip install 'dovetail-llm[vision]'"
FORMATS = "PNG, JPEG, WebP, GIF (its first frame)"
ORIENTATION, TURNS = 0x0112, {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""A tag of EXIF, and by its value Pillow's number of what makes the image upright."""
_BOX_KINDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"qt  ": "a video"}
_OTHERS = (
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML"),
    (b"<!DOCTYPE html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"\x1aE\xdf\xa3", "a video"),
    (b"OggS", "audio or a video"),
    (b"ID3", "audio"),
    (b"fLaC", "audio"),
)


def has_pillow() -> bool:
    """Whether Pillow is installed. It is not imported: a server decodes nothing itself."""
    return find_spec("PIL") is not None


def preload() -> None:
    """Import Pillow and its four decoders, so that no copy of this process has to, and none imports the others."""
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401


def sniffed(data: bytes) -> str:
    """Return the format of an image by its first bytes, in Pillow's words.

    Raises:
        MediaError: It is none of those that are decoded; what it seems to be is named.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise MediaError(f"the image is empty; possible: {FORMATS}", "empty_image_file")
    raise MediaError(f"the data is {_other(data)}; possible: {FORMATS}; convert it", "unsupported_image_media_type")


def _other(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return _BOX_KINDS.get(data[8:12], "a video")
    if data[:4] == b"RIFF":
        return {b"AVI ": "a video", b"WAVE": "audio"}.get(data[8:12], "no image")
    head = data[:64].lstrip().lower()
    return next((what for start, what in _OTHERS if head.startswith(start.lower())), "no image that is known here")


def decoded(data: bytes) -> Image:
    """Decode an image: upright, of mode `RGB`.

    Raises:
        MediaError: It is no image of a format that is decoded, is damaged, or has too many pixels.
        MemoryError: It takes more memory than the process may have.
    """
    from PIL import Image, ImageFile, UnidentifiedImageError

    kind = sniffed(data)
    # Of ours, not Pillow's, are both the limit and its error: Pillow warns of twice fewer pixels than it refuses.
    Image.MAX_IMAGE_PIXELS = None
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, which nothing here reads
            with Image.open(io.BytesIO(data), formats=(kind,)) as image:
                check_pixels(*image.size)
                image.load()
                upright = _upright(image)
            del image  # what was turned is no longer needed
            return _on_white(upright)
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # decoders raise nearly anything about what is damaged
        why = " ".join(str(error).split())[:120] or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # Pillow's words have an address of this process
            why = "its head is damaged"
        raise MediaError(
            f"the {kind} image cannot be decoded: {why}; send one that is whole", "image_parse_error"
        ) from None


def check_pixels(width: int, height: int) -> None:
    """Refuse an image by its size, before it is decoded.

    Raises:
        MediaError: It has no pixels, or too many.
    """
    if width < 1 or height < 1:
        raise MediaError(f"the image has {width} x {height} pixels; send one that has some", "image_too_small")
    if width * height > MAX_IMAGE_PIXELS:
        most = f"at most {MAX_IMAGE_PIXELS:,} are possible; send a smaller one"
        raise MediaError(f"the image has {width} x {height} pixels; {most}", "image_too_large")


def _upright(image: Image) -> Image:
    """Turn an image as its orientation says; damaged metadata is no damaged image.

    Pillow's own `exif_transpose` writes all metadata anew, which fails for odd values of any tag.
    """
    from PIL.Image import Transpose

    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # of damaged metadata, nearly anything
        turn = None
    return image if turn is None else image.transpose(Transpose(turn))


def _on_white(image: Image) -> Image:
    """Return an image of mode `RGB`: transparent pixels become white, 16-bit greys lose their lower bits."""
    from PIL import Image as Images

    if image.mode.startswith("I;16"):
        import numpy as np

        values, clear = np.asarray(image), image.info.get("transparency")
        is_clear = False if clear is None else values == clear  # Pillow would look for it among greys of 8 bits
        return Images.fromarray(np.where(is_clear, 255, values >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    laid = Images.new("RGB", image.size, (255, 255, 255))
    laid.paste(image, mask=image.getchannel("A"))
    return laid
