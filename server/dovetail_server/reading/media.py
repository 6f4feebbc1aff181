"""`MediaExchange`: what a process that loads images asks its server: files, its turn to fetch, images that are kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dovetail.contracts.errors import RequestError
from dovetail.processing.images import PreparedImage
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.http.auth import CALLER
from dovetail_server.media.cache import CacheKey, ImageCache
from dovetail_server.media.rules import MediaAnswer, MediaFetched, MediaMade, MediaMessage, MediaSought
from dovetail_server.reading.turns import ReadingTurn, Turns

MAX_WAITING_FETCHES = 64
"""Requests that wait for their turn to fetch images, in equal shares of their owners."""
FindFile = Callable[[str, str], Awaitable[str]]
"""Returns the path of an owner's uploaded file."""


class MediaExchange:
    """What one process is answered while it loads images."""

    def __init__(
        self,
        fetches: Turns,
        turn: ReadingTurn,
        find_file: FindFile | None,
        cache: ImageCache | None = None,
        job: str = "",
    ) -> None:
        """Nothing was asked yet.

        Args:
            fetches: Whose images are fetched.
            turn: The process's, paused while it computes nothing.
            find_file: Finds uploaded files; None: there are none.
            cache: Keeps images; None: the process does not ask for any.
            job: What files of the process begin with.
        """
        self._fetches = fetches
        self._turn = turn
        self._find_file = find_file
        self._cache, self._job = cache, job
        self._root = CALLER.get().cache_root
        self._making: CacheKey | None = None
        self._fetch: ReadingTurn | None = None
        self.has_images = False
        """It loads images."""

    @property
    def owner(self) -> tuple[str, str]:
        """Whose job it is, and what keeps those apart that share nothing."""
        return self._turn.owner, self._root

    async def answer(self, message: MediaMessage) -> MediaAnswer:
        """Return the answer when the process may go on.

        Raises:
            RequestError: It names a file that is not there, or somebody else's.
            ServiceError: Too much is fetched already.
        """
        self.has_images = True
        if isinstance(message, MediaFetched):
            self.close()
            await self._turn.resume()
            return MediaAnswer()
        if isinstance(message, MediaSought):
            return MediaAnswer(image=await self._sought(message.key))
        if isinstance(message, MediaMade):
            self._made(message.image)
            return MediaAnswer()
        paths = [await self._path(file_id, param) for file_id, param in message.files]
        if message.fetches:
            if not self._fetches.has_room(self._turn.owner, MAX_WAITING_FETCHES):
                num = self._fetches.num_waiting
                text = f"too many requests wait for their images to be fetched ({num}); try again later"
                raise ServiceError(text, code="queue_full", status=429, retry_after_s=1)
            self._turn.pause()
            self._fetch = self._turn.beside(self._fetches)
            await self._fetch.resume()
        return MediaAnswer(paths)

    async def _path(self, file_id: str, param: str) -> str:
        if self._find_file is None:
            raise RuntimeError("files were not opened for images")
        try:
            return await self._find_file(self._turn.owner, file_id)
        except RequestError as error:
            text = f"{param}: {error.message}"
            raise RequestError(text, param=param, code="image_file_not_found", status=error.status) from None

    async def _sought(self, key: bytes) -> PreparedImage | None:
        """Return a kept image. One that another process makes is waited for, in this one's turn: it needs no other."""
        if self._cache is None or self._making is not None:
            raise RuntimeError("a process asks for an image where none are kept, or before it has made the last")
        making = self._root, key
        if (image := await self._cache.find(making, self._job)) is None:
            self._making = making
        return image

    def _made(self, image: PreparedImage | None) -> None:
        making, self._making = self._making, None
        if self._cache is not None and making is not None:
            self._cache.end(making, self._turn.owner, image)

    def close(self) -> None:
        """Let others fetch, and make what this one has not made."""
        self._made(None)
        if self._fetch is not None:
            self._fetch.pause()
