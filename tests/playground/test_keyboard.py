"""Every page without a pointer: all that can be used is reached by Tab, shows it, and does its work by a key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from screen import Screen, expect

from dovetail_server.testing import ScriptedServer

if TYPE_CHECKING:
    from playwright.sync_api import FileChooser

PAGES = {"Chat": "Conversation", "Compare": "Compare", "Model": "Model", "Batches": "Batches", "Live": "Live"}
USABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']"

MARK = """(selector) => {
  const shown = (e) => e.checkVisibility({ visibilityProperty: true }) && !e.closest("[inert]");
  const all = [...document.querySelectorAll(selector)].filter((e) => !e.disabled && shown(e));
  all.forEach((e, i) => { e.marked = i + 1; });
  const name = (e) => e.getAttribute("aria-label") ?? e.labels?.[0]?.textContent ?? e.textContent;
  return all.map((e) => name(e).trim().slice(0, 40));
}"""
HERE = """() => {
  const e = document.activeElement;
  if (e === document.body) return [0, true];
  const box = e.closest(".box") ?? e;
  const style = getComputedStyle(box);
  const seen = box !== e || style.outlineStyle !== "none" || style.boxShadow !== "none";
  const place = e.getBoundingClientRect();
  return [e.marked ?? -1, seen && place.width > 0 && place.height > 0];
}"""


def visit(screen: Screen, key: str, num: int) -> tuple[set[int], list[str]]:
    """Press a key until the round is over; returns the marks that were passed, and what had the focus unseen."""
    found: set[int] = set()
    unseen: list[str] = []
    for _ in range(2 * num + 10):
        screen.page.keyboard.press(key)
        mark, is_seen = screen.page.evaluate(HERE)
        if not is_seen:
            unseen.append(screen.focused())
        found.add(mark)
    return found, unseen


def go(screen: Screen, name: str) -> None:
    """Open a page from its link, by keys."""
    screen.reach(name)
    screen.page.keyboard.press("Enter")
    if name != "Chat":
        screen.page.get_by_role("heading", level=1, name=PAGES[name]).wait_for()


@pytest.mark.first(1)
@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.full)])
def test_everything_is_reached_and_nothing_holds_fast(
    new_screen: Callable[..., Screen], server: ScriptedServer, width: int
) -> None:
    """Forwards and backwards, on every page, wide and narrow; whatever has the focus can be seen to have it."""
    screen = new_screen(server.base, width=width).ready()
    server.reply = "<think>Well.</think>Some `code`:\n\n```python\nx = 1\n```\n\n| a |\n|---|\n| b |\n"
    screen.ask("Something")
    for name in PAGES:
        if name != "Chat":
            go(screen, name)
        if name == "Live":
            screen.page.get_by_role("button", name="Pause").focus()
            screen.page.keyboard.press("Space")
            screen.page.get_by_role("button", name="Resume").wait_for()
        elif name == "Model":
            screen.page.locator("table.rows tbody tr").first.wait_for()
        names = screen.page.evaluate(MARK, USABLE)
        assert len(names) > 5, name
        for key in ("Tab", "Shift+Tab"):
            found, unseen = visit(screen, key, len(names))
            missed = [each for at, each in enumerate(names, 1) if at not in found]
            assert not missed, (name, key, missed)
            assert not unseen, (name, key, unseen)


def test_comparing(screen: Screen, server: ScriptedServer) -> None:
    """A question is typed, both sides are asked, and stopped."""
    page, keys = screen.page, screen.page.keyboard
    go(screen, "Compare")
    screen.reach("Question")
    keys.type("Which?")
    screen.reach("Seed")
    keys.press("Control+a")
    keys.type("17")
    server.reply = "The same"
    screen.reach("Ask both")
    keys.press("Enter")
    page.get_by_text("Both replies are the same.").wait_for()
    assert {one.params.seed for one in server.engine.submits} == {17}
    server.reply, server.engine.delay_s = "word " * 200, 0.02
    screen.reach("Ask both")
    keys.press("Space")
    page.get_by_role("button", name="Stop").wait_for()
    screen.reach("Stop")
    keys.press("Enter")
    page.get_by_role("button", name="Ask both").wait_for()


def test_the_model(screen: Screen) -> None:
    """A plugin is looked for among all of them; a table that is wider than its place is scrolled."""
    page, keys = screen.page, screen.page.keyboard
    go(screen, "Model")
    page.locator("table.rows tbody tr").first.wait_for()
    screen.reach("Find a plugin")
    keys.type("hermes")
    screen.reach("Only those in use")
    keys.press("Space")
    page.get_by_text("1 of").wait_for()
    screen.reach("Table of plugins")


def test_batches(screen: Screen, server: ScriptedServer, tmp_path: Path) -> None:
    """A file is chosen and sent, and its replies are saved."""
    page, keys = screen.page, screen.page.keyboard
    choosers: list[FileChooser] = []
    page.on(
        "filechooser", lambda chooser: choosers.append(chooser)
    )  # long before one is opened: the browser has to be told
    go(screen, "Batches")
    body = {"model": "scripted", "prompt": "Hello"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(line) + "\n")
    screen.reach("What a line looks like")
    keys.press("Enter")
    page.get_by_label("Example of a line").wait_for()
    screen.reach("File (.jsonl)")
    keys.press("Enter")
    for _ in range(1000):
        page.wait_for_timeout(20)
        if choosers:
            break
    choosers[0].set_files(file)
    screen.until("document.querySelector('select').value === '/v1/completions'")
    screen.reach("Route")
    keys.press("ArrowUp")
    keys.press("ArrowDown")
    expect(page.locator("select")).to_have_value("/v1/completions")
    screen.reach("Start")
    keys.press("Enter")
    page.locator(".state.completed").wait_for()
    screen.reach("Replies")
    with page.expect_download() as download:
        keys.press("Enter")
    assert json.loads(Path(download.value.path()).read_text())["custom_id"] == "a"


def test_live(screen: Screen, server: ScriptedServer) -> None:
    """The page is halted, and its histograms begin anew."""
    page, keys = screen.page, screen.page.keyboard
    server.chat("Some text")
    go(screen, "Live")
    page.locator(".bars").first.wait_for()
    screen.reach("Histograms from now on")
    keys.press("Enter")
    page.get_by_text("nothing yet").first.wait_for()
    screen.reach("Pause")
    keys.press("Space")
    page.get_by_role("button", name="Resume").wait_for()


def test_conversations_dialogs_and_tools(screen: Screen, server: ScriptedServer) -> None:
    """Going back to a conversation, its program in a dialog that gives the focus back, removing it, a tool's answer."""
    page, keys = screen.page, screen.page.keyboard
    screen.ask("The first one")
    screen.reach("New conversation")
    keys.press("Enter")
    screen.until("document.activeElement.id === 'composer'")
    screen.reach("The first one")
    keys.press("Enter")
    page.locator(".bubble", has_text="The first one").wait_for()
    screen.reach("Show code")
    keys.press("Enter")
    page.locator("dialog pre").wait_for()
    screen.until("document.activeElement.closest('dialog') !== null")
    keys.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    screen.until("document.activeElement.getAttribute('aria-label') === 'Show code'")
    server.reply = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    screen.reach("Tools")
    keys.press("Enter")
    screen.reach("Functions, as a JSON list")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    keys.insert_text(json.dumps([tool]))
    screen.ask("Look")
    server.reply = "Seen."
    screen.reach("Result of look")
    keys.type("there")
    screen.reach("Send the result")
    keys.press("Enter")
    page.get_by_text("Seen.").last.wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    screen.reach("Remove The first one")
    keys.press("Enter")
    page.get_by_label("Remove The first one").wait_for(state="detached")
