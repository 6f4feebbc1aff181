"""What goes wrong, on the pages beside chat: shown as text, said in words, and what was typed stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from screen import Screen, expect, piece, stream

from dovetail_server.testing import ScriptedServer

MARKUP = '<script>window.hit = 1</script>\n\n<img src=x onerror="window.hit = 1"> [a](javascript:window.hit=1)\n'
OVERRIDE = "before \u202egnp.exe\u202c after"
HEADINGS = {"compare": "Compare", "model": "Model", "batches": "Batches", "live": "Live"}


def go(screen: Screen, name: str) -> None:
    """Open a page by its address behind the #, as a link does."""
    screen.page.evaluate(f"location.hash = '#/{name}'")


def ask_both(screen: Screen) -> None:
    page = screen.page
    page.get_by_label("Question").fill("Which?")
    page.get_by_role("button", name="Ask both").click()
    page.get_by_role("button", name="Ask both").wait_for()


def test_compared_replies_are_text(screen: Screen, server: ScriptedServer, replying: Callable[[str], None]) -> None:
    """Markup, characters that reorder, a call that is not JSON, two megabytes, and a stream that breaks."""
    page = screen.page
    go(screen, "compare")
    server.reply = MARKUP + OVERRIDE
    ask_both(screen)
    sides = page.locator(".sides .card")
    page.get_by_text("window.hit = 1").first.wait_for()
    assert page.evaluate("window.hit") is None
    expect(page.locator("main script, main img, main a[href^='javascript']")).to_have_count(0)
    page.locator("main .mark").nth(1).wait_for()
    expect(page.locator("main")).not_to_contain_text("\u202e")
    broken = [{"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": "{<b>not json"}}]
    replying(stream(piece(tool_calls=broken), piece(finish="tool_calls")))
    ask_both(screen)
    page.locator(".sides .call", has_text="{<b>not json").first.wait_for()
    page.get_by_text("These arguments are not JSON").first.wait_for()
    page.unroute_all()
    replying(stream(piece(content="word **x** " * 200_000), piece(finish="stop")))
    ask_both(screen)
    page.get_by_text("This reply is too long to be laid out").first.wait_for()
    page.unroute_all()
    replying(stream(piece(content="Half a"), ends=False))
    ask_both(screen)
    page.get_by_text("The connection broke before the reply was finished").first.wait_for()
    expect(sides.first).to_contain_text("Half a")
    expect(page.get_by_label("Question")).to_have_value("Which?")


def test_a_file_of_markup_is_refused_as_text(screen: Screen, tmp_path: Path) -> None:
    """What the server says of a line holds what stood there; it is shown as it is."""
    go(screen, "batches")
    page = screen.page
    line = {"custom_id": MARKUP, "method": "POST", "url": MARKUP, "body": {"model": OVERRIDE}}
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(line) + "\n")
    page.get_by_label("File (.jsonl)").set_input_files(file)
    page.get_by_role("button", name="Start").click()
    page.locator(".state.failed, main > .broad > .problem").first.wait_for()
    assert page.evaluate("window.hit") is None
    expect(page.locator("main script, main img")).to_have_count(0)


def test_a_server_that_is_gone(new_server: Callable[..., ScriptedServer], new_screen: Callable[..., Screen]) -> None:
    """Each page says so in words, one that was never opened too, and what was typed is there when one comes back."""
    server = new_server()
    screen = new_screen(server.base).ready()
    page = screen.page
    screen.expected = (*screen.expected, "Failed to fetch")
    for name in ("compare", "model", "batches"):
        go(screen, name)
        page.get_by_role("heading", level=1, name=HEADINGS[name]).wait_for()
        if name == "compare":
            page.get_by_label("Question").fill("typed already")
    server.close()
    for name in ("model", "batches"):
        go(screen, "compare")
        go(screen, name)
        page.locator("main .problem").first.wait_for()
        expect(page.locator("main .problem").first).to_contain_text("The server does not answer")
    go(screen, "live")
    page.get_by_text("this page could not be loaded").wait_for()
    go(screen, "compare")
    page.get_by_role("button", name="Ask both").click()
    page.locator(".sides .problem").first.wait_for()
    expect(page.get_by_label("Question")).to_have_value("typed already")


def test_live_goes_on_when_the_server_is_back(screen: Screen) -> None:
    """While metrics cannot be had the page says so and keeps its lines; then it goes on by itself."""
    page = screen.page
    go(screen, "live")
    page.locator(".charts figure").first.wait_for()
    page.route("**/metrics", lambda route: route.abort())
    page.locator("main .problem").wait_for()
    page.locator(".charts figure").nth(3).wait_for()
    page.unroute_all()
    page.locator("main .problem").wait_for(state="detached")


def test_a_wrong_key_on_every_page(
    new_server: Callable[..., ScriptedServer], new_screen: Callable[..., Screen]
) -> None:
    """Whichever page is opened first asks for the key, says when it is wrong, and then shows what it has."""
    server = new_server(api_key=["right"])
    for name in ("model", "live"):
        screen = new_screen(server.base, f"/#/{name}")
        page = screen.page
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        dialog.get_by_label("Key").fill("wrong")
        page.keyboard.press("Enter")
        dialog.get_by_text("The server does not accept this key.").wait_for()
        dialog.get_by_label("Key").fill("right")
        page.keyboard.press("Enter")
        dialog.wait_for(state="detached")
        page.locator("main figure, main table").first.wait_for()


def test_the_first_paint_waits_for_styles_alone(screen: Screen) -> None:
    """Nothing else holds it up: no script, and nothing that the server works out."""
    script = """() => performance.getEntriesByType("resource")
      .filter((e) => e.renderBlockingStatus === "blocking").map((e) => new URL(e.name).pathname)"""
    found = screen.page.evaluate(script)
    assert all(name.endswith(".css") for name in found), found
    assert len(found) <= 3, found
