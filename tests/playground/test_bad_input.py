"""What goes wrong between a person and a server: shown as text, said in words, and nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from screen import Screen, expect, piece, stream

from dovetail_server.testing import ScriptedServer

HOSTILE = """<script>window.hit = 1</script>

<img src=x onerror="window.hit = 1"> <svg onload="window.hit=1"></svg>

[a](javascript:window.hit=1) [b](data:text/html,x) ![c](javascript:window.hit=1) <a href="javascript:window.hit=1">d</a>

```html
<script>window.hit = 1</script>
```

`<b>x</b>` and <javascript:alert(1)> and <https://example.org/?<script>>
"""
OVERRIDE = "before \u202egnp.exe\u202c after\n\n```\nif x: \u202e return\u2066 1\n```\n"
TOOL = '[{"name": "lookup", "parameters": {"type": "object"}}]'


def test_markup_in_a_reply_is_text(screen: Screen, server: ScriptedServer) -> None:
    """Nothing of a reply, a question or a title is ever markup, a script or an address that runs."""
    server.reply = HOSTILE
    screen.ask("<img src=x onerror='window.hit=1'>")
    page, reply = screen.page, screen.last()
    assert page.evaluate("window.hit") is None
    expect(reply).to_contain_text("<script>window.hit = 1</script>")
    expect(page.locator(".messages img, .messages svg[onload], .messages script")).to_have_count(0)
    targets = reply.locator("a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert [one for one in targets if not one.startswith("https://example.org")] == []
    expect(page.locator("h1")).to_have_text(re.compile("^<img"))


def test_text_that_reorders_what_follows(screen: Screen, server: ScriptedServer) -> None:
    """Characters that turn the order of others are shown by name, in code too."""
    server.reply = OVERRIDE
    screen.ask("a \u202eb")
    expect(screen.last().locator(".mark")).to_have_text(["U+202E", "U+202C", "U+202E", "U+2066"])
    expect(screen.page.locator(".bubble .mark")).to_have_count(1)
    screen.until("document.querySelectorAll('.list .mark').length === 1")  # the list is drawn a moment later
    expect(screen.page.locator("#app")).not_to_contain_text("\u202e")


@pytest.mark.parametrize(
    "unit",
    [
        "# Title\n\n* a *b* `c` [d](e)\n\n",
        pytest.param("word **x** ", marks=pytest.mark.full),
        pytest.param("> " * 50 + "x\n", marks=pytest.mark.full),
    ],
)
def test_two_megabytes(screen: Screen, replying: Callable[[str], None], unit: str) -> None:
    """A very long reply is shown as plain text and said to be, all of it; the page stays usable."""
    text = (unit * (2_000_000 // len(unit) + 1))[:2_000_000]
    parts = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
    replying(stream(*(piece(content=part) for part in parts)))
    screen.ask("Long")
    expect(screen.last()).to_contain_text("too long to be laid out")
    shown = "[...document.querySelectorAll('.reply .piece')].reduce((sum, one) => sum + one.textContent.length, 0)"
    screen.until(f"{shown} === 2_000_000")
    screen.page.fill("#composer", "still here")
    screen.stores(2)


SLOW = (">" * 20_000 + "x", "_a" * 50_000, "[" * 50_000, "`a" * 50_000, "- " * 2000 + "x", "|" * 9000 + "\n|-|\n")


def test_markdown_that_takes_long(screen: Screen) -> None:
    """Texts made to keep a Markdown reader busy are laid out, or left as they are, within a second or so."""
    script = """async (text) => {
      const {lex} = await import("./playground/parts/markdown.js");
      const began = performance.now();
      lex(text);
      return performance.now() - began;
    }"""
    for text in SLOW:
        assert screen.page.evaluate(script, text) < 10_000, text[:3]  # on a busy machine; 100 ms are usual


def test_a_tool_call_that_is_not_json(screen: Screen, replying: Callable[[str], None], server: ScriptedServer) -> None:
    """Its arguments are shown as they came, with a word on it, and it can be answered still."""
    page = screen.page
    page.locator("summary", has_text="Tools").click()
    screen.set("Functions, as a JSON list", TOOL)
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": <b>'}}
    replying(stream(piece(role="assistant", content=""), piece(tool_calls=[call])))
    screen.ask("Look it up")
    expect(screen.last().locator("pre")).to_contain_text('{"city": <b>')
    expect(screen.last()).to_contain_text("These arguments are not JSON")
    expect(page.get_by_label("Result of lookup")).to_have_count(1)


def test_a_server_that_dies_while_it_replies(
    new_server: Callable[..., ScriptedServer], new_screen: Callable[..., Screen]
) -> None:
    """What had come stays, a sentence says what happened, what was asked is not lost, and one can try again."""
    server = new_server()
    screen = new_screen(server.base).ready()
    server.reply = "word " * 50
    server.engine.die_after = 60
    screen.ask("Go on")
    page = screen.page
    expect(screen.last()).to_contain_text("word word")
    expect(screen.last().locator(".problem")).to_have_text(re.compile("."))
    expect(page.locator(".bubble")).to_have_text("Go on")
    screen.shot("chat-died")
    server.close()
    page.get_by_label("Try again").click()
    page.get_by_text("The server does not answer. Is it still running").wait_for()
    page.get_by_label("Previous version").click()
    page.wait_for_selector(".reply >> text=word word")
    screen.stores(3)


def test_a_connection_that_breaks(screen: Screen, replying: Callable[[str], None]) -> None:
    """A stream that ends without its end is told from a reply that is finished."""
    replying(stream(piece(content="Half a")))
    screen.ask("One")
    expect(screen.last().locator(".problem")).to_have_count(0)
    screen.page.unroute_all()
    replying(stream(piece(content="Half a"), ends=False))
    screen.ask("Two")
    expect(screen.last()).to_contain_text("The connection broke before the reply was finished")
    expect(screen.last()).to_contain_text("Half a")
    screen.page.unroute_all()
    replying(stream(piece(content="Half a"), {"error": {"message": "the engine died", "code": "engine_dead"}}))
    screen.ask("Three")
    expect(screen.last()).to_contain_text("The engine died.")
    screen.page.unroute_all()
    replying("data: {broken\n\n")
    screen.ask("Four")
    expect(screen.last().locator(".problem")).to_have_count(1)


def test_a_key_that_is_no_longer_right(
    new_server: Callable[..., ScriptedServer], new_screen: Callable[..., Screen]
) -> None:
    """In the middle of a conversation the page asks again; without an answer the question stays, said in words."""
    server = new_server(api_key=["right"])
    screen = new_screen(server.base)
    page = screen.page
    dialog = page.get_by_role("dialog", name="API key")
    dialog.wait_for()
    page.keyboard.press("Escape")
    page.locator(".banner", has_text="This server needs an API key").wait_for()
    page.get_by_role("button", name="Give a key").click()
    dialog.get_by_label("Key").fill("right")
    page.keyboard.press("Enter")
    screen.ready()
    page.evaluate("sessionStorage.setItem('dovetail-key', 'old')")
    screen.ask("Hello", wait=False)
    dialog.get_by_text("The server does not accept this key.").wait_for()
    dialog.get_by_label("Close").click()
    screen.done()
    expect(screen.last()).to_contain_text("The API key is not valid")
    page.get_by_label("Try again").click()
    dialog.get_by_label("Key").fill("right")
    page.keyboard.press("Enter")
    page.wait_for_selector(".reply >> text=Hello, world")


def test_a_conversation_that_is_gone(screen: Screen, new_screen: Callable[..., Screen]) -> None:
    """An address of a conversation that this browser does not have says so, and what is typed begins a new one."""
    page = screen.page
    page.fill("#composer", "typed already")
    page.evaluate("location.hash = '#/chat/nowhere'")
    page.get_by_text("This conversation is not in this browser any more.").wait_for()
    expect(page.locator("#composer")).to_have_value("typed already")
    page.keyboard.press("Enter")
    page.wait_for_selector(".reply footer")
    assert "nowhere" not in page.url


def test_a_window_closed_in_the_middle(screen: Screen, server: ScriptedServer) -> None:
    """What had come of a reply is there when the page is opened again, and said to be cut off."""
    server.reply = "word " * 400
    server.engine.delay_s = 0.02
    screen.ask("Go on", wait=False)
    page = screen.page
    screen.until("document.querySelector('.reply .markdown')?.textContent.length > 20")
    script = "async () => { const {list, load} = await import('./playground/core/store.js');"
    script += " const rows = await list(); return rows.length && Object.keys((await load(rows[0].id)).nodes).length; }"
    screen.until(f"({script})().then((count) => count === 2)")
    page.reload()
    page.get_by_text("This window was closed before the reply was finished.").wait_for()
    expect(page.locator(".bubble")).to_have_text("Go on")


@pytest.fixture(autouse=True)
def quiet_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """Browsers log failed connections by themselves."""
    yield
    screen: Screen | None = request.node.funcargs.get("screen")
    if screen is not None:
        screen.expected += ("net::ERR",)
