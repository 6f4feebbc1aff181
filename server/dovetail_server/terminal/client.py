"""Requests to a server, one at a time: a terminal waits for each, and Ctrl-C breaks it off."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail_server.http.hosts import is_loopback

DEFAULT_URL = "http://127.0.0.1:30000"
TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 600.0
"""A server breaks silence with comments every few seconds, unless it was told not to."""


class ServerGoneError(DovetailError):
    """The server does not answer, or has gone in the middle of a reply."""


class ServerClient:
    """A server under an address.

    Args:
        url: With or without `/v1` at its end.
        key: The API key; None sends none.

    Raises:
        ConfigError: The address is none.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if urlsplit(self.url).scheme not in {"http", "https"} or not urlsplit(self.url).hostname:
            raise ConfigError(f"--url {url!r}: expected an address such as {DEFAULT_URL}")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        proxies: dict[str, str] | None = {} if is_loopback(urlsplit(self.url).hostname or "") else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))

    def get(self, path: str) -> bytes:
        """Return the body of a GET.

        Raises:
            ServerGoneError: Nobody answers.
            DovetailError: The server refuses; its reason.
        """
        with self._open(urllib.request.Request(self.url + path, headers=self._headers), TIMEOUT_S) as reply:
            return bytes(reply.read())

    def models(self) -> list[str]:
        """Return the served names; raises as `get`."""
        return [str(model["id"]) for model in json.loads(self.get("/v1/models"))["data"]]

    def chat(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the chunks of a chat completion; closing the generator stops the reply at the server.

        Raises:
            ServerGoneError: Nobody answers, or the stream ends before the reply does.
            DovetailError: The server refuses, or the reply fails; its reason.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        headers = {**self._headers, "content-type": "application/json"}
        data = json.dumps({**body, **options}).encode()
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", data, headers)
        with self._open(request, STREAM_TIMEOUT_S) as reply:
            try:
                for line in reply:
                    if not line.startswith(b"data:"):
                        continue
                    text = line[5:].strip()
                    if text == b"[DONE]":
                        return
                    chunk = json.loads(text)
                    if "error" in chunk:
                        raise DovetailError(str(chunk["error"]["message"]))
                    yield chunk
            except (OSError, ValueError) as error:
                raise ServerGoneError("the connection broke before the reply was finished") from error
        raise ServerGoneError("the connection broke before the reply was finished")

    def _open(self, request: urllib.request.Request, timeout_s: float) -> Any:
        try:
            return self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise DovetailError(_reason(error)) from None
        except OSError as error:
            raise ServerGoneError(f"{self.url} does not answer; is a server running there?") from error


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "the server needs an API key, and another than was sent, if any; give --api-key, or set DOVETAIL_API_KEY"
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answered with status {error.code} and no reason"


def key_from(given: str | None) -> str | None:
    """Return the key that was given, or the first in the environment."""
    return given or os.environ.get("DOVETAIL_API_KEY", "").split(",")[0].strip() or None
