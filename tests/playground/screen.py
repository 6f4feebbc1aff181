"""One window of the browser, and the usual things that people do there."""

from __future__ import annotations

import json
import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Locator, Page, Request

TIMEOUT_MS = 60_000
LOOKS = [(1280, "light"), (390, "dark")]
"""Widths of the window, and colours."""


@cache
def axe() -> str:
    """The program that looks for obstacles to people with disabilities (axe-core, MPL-2.0)."""
    return (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")


def expect(locator: Locator) -> Any:
    """Return assertions that look again until they hold; a page is drawn a moment after what changes it."""
    from playwright.sync_api import expect as playwright_expect  # not everybody who runs the other tests has it

    playwright_expect.set_options(timeout=TIMEOUT_MS)
    return playwright_expect(locator)


def stream(*chunks: dict[str, Any], ends: bool = True) -> str:
    """A stream as the server sends it."""
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join(lines) + ("data: [DONE]\n\n" if ends else "")


def piece(finish: str | None = None, structured_output: Any = None, **delta: Any) -> dict[str, Any]:
    """One chunk of a stream."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"choices": [{**choice, **({"structured_output": structured_output} if structured_output else {})}]}


class Screen:
    """A window.

    Attributes:
        complaints: Errors of scripts and of the page's policy, and requests to anywhere else.
        expected: Parts of those that are none.
        bodies: What was asked of the chat route.
    """

    def __init__(self, page: Page, base: str, folder: Path) -> None:
        self.page = page
        self.base = base
        self.folder = folder
        self.complaints: list[str] = []
        self.bodies: list[Any] = []
        self.expected: tuple[str, ...] = ("Failed to load resource",)
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("console", self._console)
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.base + "/", "data:", "blob:")):
            self.complaints.append(f"a request to {request.url}")
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(json.loads(request.post_data or "null"))

    def check(self) -> None:
        """Nothing was complained of but refusals that a test provokes, which browsers log by themselves."""
        found = [line for line in self.complaints if not any(part in line for part in self.expected)]
        assert found == []

    def ready(self) -> Screen:
        """Wait until the page knows the server."""
        self.page.wait_for_selector(".idea:not([disabled])")
        return self

    def ask(self, text: str, *, wait: bool = True) -> None:
        """Type something, send it, and wait for the end of the reply."""
        replies = self.page.locator(".reply").count()
        self.page.fill("#composer", text)
        self.page.keyboard.press("Enter")
        self.page.locator(".reply").nth(replies).wait_for()
        if wait:
            self.done()

    def done(self) -> None:
        """Wait until no reply is being written."""
        self.page.wait_for_selector(".reply[aria-busy=true]", state="detached")

    def until(self, expression: str) -> None:
        """Wait until an expression holds; the page's policy forbids the driver to look from within."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(30)

    def last(self) -> Locator:
        """The last reply."""
        return self.page.locator(".reply").last

    def shot(self, name: str) -> None:
        """Keep a picture."""
        self.page.screenshot(path=self.folder / f"{name}.png")

    def focused(self) -> str:
        """The name of what has the focus."""
        name = self.page.evaluate(
            "(() => { const e = document.activeElement, label = e.labels?.[0];"
            " const own = label && [...label.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join('');"
            " return e.getAttribute('aria-label') ?? own ?? e.textContent.trim().slice(0, 60); })()"
        )
        return " ".join(str(name).split())

    def reach(self, name: str) -> None:
        """Press Tab until something has the focus."""
        for _ in range(90):
            if self.focused() == name:
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{name} is not reached by Tab")

    def set(self, label: str, value: str) -> None:
        """Fill a field of the settings."""
        self.page.get_by_label(label, exact=True).fill(value)

    def stored(self) -> list[Any]:
        """The conversations that the browser keeps."""
        script = """async () => {
          const {list, load} = await import("./playground/core/store.js");
          return Promise.all((await list()).map((row) => load(row.id)));
        }"""
        found: list[Any] = json.loads(json.dumps(self.page.evaluate(script)))
        return found

    def stores(self, *sizes: int) -> None:
        """Wait until the conversations that the browser keeps have these numbers of messages, in ascending order."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while (found := sorted(len(one["nodes"]) for one in self.stored())) != list(sizes):
            assert time.monotonic() < deadline, found
            self.page.wait_for_timeout(30)

    def kept(self) -> Screen:
        """Wait until the browser has stored the replies as they stand; a page that is left earlier may lose them."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        num_shown = self.page.locator(".reply").count()
        while True:
            nodes = [node for conversation in self.stored() for node in conversation["nodes"].values()]
            ended = [node for node in nodes if node["role"] == "assistant" and node["state"] != "writing"]
            if len(ended) >= num_shown:
                return self
            assert time.monotonic() < deadline, nodes
            self.page.wait_for_timeout(30)

    def obstacles(self) -> list[str]:
        """What axe finds, each as its rule, the element and what to do."""
        self.page.evaluate(axe())
        found = self.page.evaluate("async () => (await axe.run()).violations")
        return [
            f"{rule['id']}: {node['html'][:160]}: {node['failureSummary'][:300]}"
            for rule in found
            for node in rule["nodes"]
        ]
