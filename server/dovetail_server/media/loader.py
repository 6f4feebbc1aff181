"""`ImageLoader`: the images of one request, from their parts to arrays in files. In a process that can be killed."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.processor import MAX_IMAGE_PIXELS, ImageProcessor
from dovetail.messages.media import content_digest, framed_digest, write_arrays
from dovetail.processing.images import PreparedImage
from dovetail.sdk.pixels import THREADS
from dovetail_server.media import decode
from dovetail_server.media.addresses import AllowedDomains
from dovetail_server.media.refusals import MediaError
from dovetail_server.media.rules import (
    MediaAnswer,
    MediaFetched,
    MediaMade,
    MediaMessage,
    MediaQuestion,
    MediaRules,
    MediaSought,
    layout_of,
)
from dovetail_server.media.sources import ImageKey, ImageSource, data_of, read_local, read_regular, source_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from dovetail_server.media.fetch import Fetcher

MAX_BYTES = 64 << 20
"""Of all images that one request has fetched, or names as uploaded files."""
MAX_IMAGES = 1024
"""Of a request with several prompts."""
MEMORY_BYTES = 16 * MAX_IMAGE_PIXELS
"""While an image of the largest size is decoded, laid over white, turned, and hashed."""
Ask = Callable[[MediaMessage], MediaAnswer]


class ImageLoader:
    """Loads images. Of one job.

    Attributes:
        has_decoded: Something was decoded, and …
        has_fetched: … something was fetched, which may leave something behind in this process.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        rules: MediaRules,
        job: str,
        ask: Ask,
        allow: Callable[[], None] = lambda: None,
        make_fetcher: Callable[[AllowedDomains], Fetcher] | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            processor: The model's.
            rules: See `MediaRules`.
            job: What files begin with.
            ask: Asks the server.
            allow: Lets this process take the memory and time that images need.
            make_fetcher: Makes what fetches from some hosts.
        """
        self._processor = processor
        self._rules = rules
        self._job = job
        self._ask = ask
        self._allow = allow
        self._make_fetcher = make_fetcher or _fetcher
        self._fetcher: Fetcher | None = None
        self._left_bytes = MAX_BYTES
        self._is_first = True
        self.has_decoded = self.has_fetched = False
        self._loaded: dict[ImageKey, PreparedImage] = {}
        self._made: dict[bytes, PreparedImage] = {}

    def __call__(self, parts: Sequence[tuple[Mapping[str, Any], str]], salt: str) -> list[PreparedImage]:
        """Load the images of a conversation's parts, in order; what was loaded before is not again.

        Args:
            parts: Each with its place in the request.
            salt: Requests with different ones share nothing that is kept.

        Raises:
            RequestError: There are too many, or one cannot be had, or is none; `param` names its part.
        """
        most = self._rules.max_images
        if len(parts) > most:
            text = f"the request has {len(parts)} images; possible: {most} (--limit-mm-per-prompt); send fewer"
            raise RequestError(text, param=parts[-1][1], code="too_many_images")
        if self._is_first:
            self._is_first = False
            self._allow()
        sources = [source_of(part, param) for part, param in parts]
        missing = {source.key: source for source in reversed(sources) if source.key not in self._loaded}
        if len(self._loaded) + len(missing) > MAX_IMAGES:
            text = f"the prompts of the request have more than {MAX_IMAGES} images together; send fewer"
            raise RequestError(text, param=parts[-1][1], code="too_many_images")
        remote = self._remote(list(missing.values())[::-1])
        for key, source in reversed(missing.items()):
            try:
                data = remote.pop(key) if key in remote else self._local(source)
                if isinstance(data, MediaError):
                    raise data
                self._loaded[key] = self._image(data, source.param, salt)
            except MediaError as error:
                raise error.at(source.param) from None
        return [self._loaded[source.key] for source in sources]

    def _local(self, source: ImageSource) -> bytes:
        if source.url[:5].lower() == "data:":
            return data_of(source.url)
        root = self._rules.local_path
        return read_local(source.url, None if root is None else Path(root))

    def _remote(self, sources: Sequence[ImageSource]) -> dict[ImageKey, bytes | MediaError]:
        """Return what uploaded files and addresses in the network hold."""
        files = [source for source in sources if source.file_id]
        urls = [source for source in sources if source.url[:5].lower() not in ("", "data:", "file:")]
        paths = self._ask(
            MediaQuestion(files=[(source.file_id, source.param) for source in files], fetches=bool(urls))
        ).paths
        found: dict[ImageKey, bytes | MediaError] = {}
        if urls:
            self.has_fetched = True
            if self._fetcher is None:
                self._fetcher = self._make_fetcher(AllowedDomains(self._rules.domains))
            fetched = fetched_all(self._fetcher, [each.url for each in urls])
            found |= {source.key: data for source, data in zip(urls, fetched, strict=True)}
            self._ask(MediaFetched())
        found |= {source.key: _uploaded(path, source.file_id) for source, path in zip(files, paths, strict=True)}
        self._left_bytes -= sum(len(data) for data in found.values() if isinstance(data, bytes))
        if self._left_bytes < 0:
            text = f"the images have more than {MAX_BYTES >> 20} MiB, the most that a request may; send smaller ones"
            raise RequestError(text, param=sources[-1].param, code="image_file_too_large")
        return found

    def _image(self, data: bytes, param: str, salt: str) -> PreparedImage:
        """Return an image as the server has it, or decode it.

        The server finds it by what this process has computed of its bytes and of all that arrays depend on.
        """
        key = framed_digest(salt.encode(), self._processor.fingerprint().encode(), self._rules.revision.encode(), data)
        if self._rules.keeps and (found := self._ask(MediaSought(key)).image) is not None:
            return found
        self.has_decoded = True
        made = self._decoded(data, param)
        if self._rules.keeps:
            self._ask(MediaMade(made))
        return made

    def _decoded(self, data: bytes, param: str) -> PreparedImage:
        image = decode.decoded(data)
        width, height = image.size
        layout_of(self._processor, width, height, param, self._rules.max_patches, self._rules.max_tokens)
        digested = THREADS.start(self._digest, image)
        processed = self._processor.process(image)
        if (made := self._made.get(digest := digested())) is None:
            path = Path(self._rules.folder) / f"{self._job}{len(self._made):x}"
            try:
                arrays = write_arrays(path, processed)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                text = f"the server has no room for the image now ({path.parent.parent} is full); try again later"
                raise RequestError(text, param=param, code="server_limits", status=503) from None
            made = PreparedImage(width=width, height=height, digest=digest, file=str(path), arrays=arrays)
            self._made[digest] = made
        return made

    def _digest(self, image: Image) -> bytes:
        return content_digest(image.size, image.tobytes(), self._processor.fingerprint(), self._rules.revision)


def preload(rules: MediaRules) -> None:
    """Import what copies of this process need."""
    decode.preload()
    if rules.domains:
        from dovetail_server.media.fetch import default_context

        default_context()


def fetched_all(fetcher: Fetcher, urls: Sequence[str]) -> list[bytes | MediaError]:
    """Fetch in an event loop of its own. It is not closed: a name that is still being resolved would be waited for."""
    loop = asyncio.new_event_loop()
    return loop.run_until_complete(fetcher.fetch_all(urls))


def _fetcher(allowed: AllowedDomains) -> Fetcher:
    from dovetail_server.media.fetch import Fetcher

    return Fetcher(allowed)


def _uploaded(path: str, file_id: str) -> bytes | MediaError:
    try:
        return read_regular(os.open(path, os.O_RDONLY | os.O_CLOEXEC), f"file {file_id!r}")
    except OSError:
        return MediaError(f"file {file_id!r} cannot be read; upload it again", "image_file_not_found")
    except MediaError as error:
        return error
