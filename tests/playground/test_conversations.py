"""What people do with conversations: files, titles, search, export and import, going on, and text without a chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from screen import LOOKS, Screen, expect, piece, stream

from dovetail_server.testing import ScriptedServer

LONG_TITLE = "A question whose first line is far too long for the narrow list of conversations"


def prompt_of(server: ScriptedServer) -> str:
    """The last prompt that the engine was asked with, as text."""
    return server.state.text.tokenizer.decode(server.engine.submits[-1].prompt_ids, skip_special_tokens=False)


def test_files_go_along_as_text(screen: Screen, server: ScriptedServer, tmp_path: Path) -> None:
    """Under their names, in fences that they cannot end; what is no text is left out, and one may be removed."""
    page = screen.page
    (tmp_path / "notes.md").write_text("Some notes\n```\ncode\n```")
    (tmp_path / "other.csv").write_text("a,b")
    (tmp_path / "archive.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.txt").write_text("x" * ((1 << 20) + 1))
    names = ["notes.md", "other.csv", "archive.bin", "large.txt"]
    page.get_by_label("Text files", exact=True).set_input_files([tmp_path / name for name in names])
    page.get_by_text("archive.bin is not a text file (UTF-8) and was left out. large.txt has more than").wait_for()
    page.get_by_label("Remove other.csv").click()
    expect(page.locator(".files li")).to_have_count(1)
    screen.ask("What do they say?")
    (body,) = screen.bodies
    text = "What do they say?\n\nnotes.md:\n````\nSome notes\n```\ncode\n```\n````"
    assert body["messages"] == [{"role": "user", "content": text}]
    expect(page.locator(".files")).to_have_count(0)
    expect(page.locator("h1")).to_have_text("What do they say?")
    (tmp_path / "notes.md").write_text("A line\n" * 2_000)
    page.get_by_label("Text files", exact=True).set_input_files(tmp_path / "notes.md")
    expect(page.locator(".files li")).to_have_count(1)  # the browser reads the file a moment after it is chosen
    screen.ask("And now?")
    last = "[...document.querySelectorAll('.bubble')].at(-1)"
    screen.until(f"{last}.clientHeight < {last}.scrollHeight && {last}.clientHeight < 400")
    assert screen.obstacles() == []


def test_titles_are_changed_and_seen_in_full(screen: Screen, server: ScriptedServer) -> None:
    """On hover, in the list and above; a title that somebody gave stays when the conversation goes on."""
    page = screen.page
    screen.ask(LONG_TITLE)
    link = page.locator(".list a").first
    for each in (link, page.locator("h1")):
        expect(each).to_have_attribute("title", LONG_TITLE)
    page.once("dialog", lambda dialog: dialog.accept("Short"))
    page.get_by_label(f"Rename {LONG_TITLE}").click()
    page.locator("h1", has_text="Short").wait_for()
    screen.ask("And then?")
    screen.kept()
    page.reload()
    page.locator(".list a", has_text="Short").wait_for()


def test_search_finds_texts_of_messages(screen: Screen, server: ScriptedServer) -> None:
    """Of questions and of replies, whatever the case."""
    page = screen.page
    for question, answer in (("First question", "About kangaroos"), ("Second question", "About whales")):
        server.reply = answer
        screen.ask(question)
        screen.kept()
        page.get_by_role("button", name="New conversation", exact=True).click()
        screen.ready()
    page.keyboard.press("Control+k")
    screen.until("document.activeElement.getAttribute('aria-label') === 'Search conversations'")
    page.keyboard.type("KANGAROO")
    page.locator(".list a", has_text="First question").wait_for()
    expect(page.locator(".list a small")).to_have_text("About kangaroos")
    page.locator(".list a", has_text="Second question").wait_for(state="detached")
    page.get_by_label("Search conversations").fill("nowhere")
    page.get_by_text("No conversation has this text.").wait_for()


def test_an_export_comes_back_in_another_browser(
    screen: Screen, server: ScriptedServer, new_screen: Callable[..., Screen], tmp_path: Path
) -> None:
    """With branches, reasoning and title; what is there already is not written over."""
    server.reply = "<think>Hm.</think>An answer"
    screen.ask("To be exported")
    screen.kept()
    with screen.page.expect_download() as download:
        screen.page.get_by_role("button", name="Export", exact=True).click()
    file = tmp_path / "export.json"
    download.value.save_as(file)
    other = new_screen(server.base).ready()
    for notice in ("1 imported.", "0 imported, 1 was here already."):
        other.page.get_by_label("File of conversations").set_input_files(file)
        other.page.get_by_text(notice).wait_for()
    other.page.locator(".list a", has_text="To be exported").click()
    expect(other.page.locator(".reply .markdown").last).to_have_text("An answer")
    expect(other.page.locator(".reasoning summary")).to_contain_text("Thought for")


def test_one_conversation_is_exported(screen: Screen, server: ScriptedServer, tmp_path: Path) -> None:
    """The file holds it alone; a shortcut begins the next one."""
    page = screen.page
    for question in ("Stays here", "Is exported"):
        screen.ask(question)
        screen.kept()
        page.keyboard.press("Control+Shift+O")
        screen.ready()
    page.locator(".list li", has_text="Is exported").hover()
    with page.expect_download() as download:
        page.get_by_label("Export Is exported").click()
    file = tmp_path / "one.json"
    download.value.save_as(file)
    assert [one["title"] for one in json.loads(file.read_text())["conversations"]] == ["Is exported"]


def export(**node: Any) -> dict[str, Any]:
    """A file with one conversation of one message."""
    whole = {"role": "user", "content": "x", "parent": "", **node}
    one = {"id": "a", "title": "t", "nodes": {"n": whole}}
    return {"format": "dovetail-conversations", "version": 1, "conversations": [one]}


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("{", "The file is not JSON"),
        ('{"conversations": []}', "The file is not an export of this page."),
        (json.dumps({**export(), "version": 2}), "has version 2 of the format"),
        (json.dumps(export(role="system")), "Conversation 1 of the file is damaged"),
        (json.dumps(export(content={"a": 1})), "Conversation 1 of the file is damaged"),
        (json.dumps(export(parent="gone")), "Conversation 1 of the file is damaged"),
    ],
)
def test_a_file_that_lies_is_refused(screen: Screen, tmp_path: Path, text: str, notice: str) -> None:
    """In a sentence, and nothing of it is taken."""
    file = tmp_path / "file.json"
    file.write_text(text)
    screen.page.get_by_label("File of conversations").set_input_files(file)
    screen.page.get_by_text(notice).wait_for()
    expect(screen.page.locator(".list a")).to_have_count(0)


def test_a_file_with_wrong_types_is_shown_without_them(screen: Screen, tmp_path: Path) -> None:
    """What is not what it should be is left out, wherever the page can do without."""
    wrong = {"calls": [3, {"name": 4}], "tokens": 5, "times": {"sent": "x"}, "usage": [], "report": {}, "reasoning": 6}
    file = tmp_path / "file.json"
    file.write_text(json.dumps(export(role="assistant", content="Said", state="writing", **wrong)))
    screen.page.get_by_label("File of conversations").set_input_files(file)
    screen.page.locator(".list a", has_text="t").click()
    screen.page.locator(".reply .markdown", has_text="Said").wait_for()


def test_a_stopped_reply_goes_on(screen: Screen, server: ScriptedServer) -> None:
    """The model is asked to go on behind what came, and the rest stands in the same reply."""
    page = screen.page
    server.reply = "The beginning. " * 40
    server.engine.delay_s = 0.05
    screen.ask("Tell me", wait=False)
    page.locator(".reply .markdown", has_text="The beginning").wait_for()
    page.keyboard.press("Escape")
    screen.done()
    (stopped,) = screen.kept().stored()
    came = next(node["content"] for node in stopped["nodes"].values() if node["role"] == "assistant")
    expect(page.locator(".reply .markdown")).to_have_text(came)
    server.engine.delay_s, server.reply = 0.0, "And the end."
    page.get_by_label("Continue").click()
    page.locator(".reply .markdown", has_text="And the end.").wait_for()
    screen.done()
    body = screen.bodies[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["messages"][-1]["role"] == "assistant"
    assert body["messages"][-1]["content"].strip() == came.strip()
    expect(page.locator(".reply")).to_have_count(1)
    expect(page.locator(".figures")).to_contain_text("continued")
    expect(page.get_by_label("Continue")).to_have_count(0)


def test_an_edited_reply_goes_on(screen: Screen, server: ScriptedServer) -> None:
    """The edited text is a version of its own, and the model continues behind it; the first version stays."""
    page = screen.page
    server.reply = "It is red."
    screen.ask("Which colour?")
    page.get_by_label("Edit reply").click()
    page.get_by_label("Edit the text of the reply").fill("It is blue")
    page.keyboard.press("Enter")
    page.keyboard.press("Backspace")  # Enter alone is a new line
    page.keyboard.press("Control+Enter")
    page.get_by_text("Edited by you.").wait_for()
    page.get_by_text("2 of 2").wait_for()
    server.reply = ", like the sea."
    page.get_by_label("Continue").click()
    screen.done()
    expect(screen.last().locator(".markdown")).to_have_text("It is blue, like the sea.")
    assert screen.bodies[-1]["messages"][-1] == {"role": "assistant", "content": "It is blue"}
    assert screen.bodies[-1]["continue_final_message"] is True
    page.get_by_label("Previous version").click()
    expect(screen.last().locator(".markdown")).to_have_text("It is red.")


def test_a_reply_at_its_limit_may_go_on(screen: Screen, replying: Callable[[str], None]) -> None:
    """As one that was stopped."""
    replying(stream(piece(content="Part"), piece(finish="length")))
    screen.ask("Tell me")
    screen.page.get_by_label("Continue").wait_for()
    expect(screen.last()).to_contain_text("The response reached its token limit.")


def test_the_system_prompt_acts_on_the_open_conversation(screen: Screen, server: ScriptedServer) -> None:
    """From the next message on, also after a reload."""
    screen.ask("Hello")
    screen.set("System prompt", "Be brief.")
    screen.ask("And now?")
    screen.kept()
    screen.page.reload()
    screen.page.locator(".reply").nth(1).wait_for()
    screen.ask("And later?")
    firsts = [body["messages"][0]["role"] for body in screen.bodies]
    assert firsts == ["user", "system", "system"]


@pytest.mark.first(1)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_text_goes_on(new_screen: Callable[..., Screen], server: ScriptedServer, width: int, scheme: str) -> None:
    """Without a chat template; what came can be edited, gone on with, and taken back."""
    screen = new_screen(server.base, "/playground#/complete", width=width, scheme=scheme)
    page = screen.page
    server.reply = " there was a page."
    server.engine.delay_s = 0.001
    page.get_by_label("Text", exact=True).fill("Once upon a time")
    page.get_by_label("Max tokens").fill("9000000")
    page.get_by_role("button", name="Complete").click()
    page.locator(".problem").wait_for()
    page.get_by_label("Max tokens").fill("50")
    page.get_by_role("button", name="Complete").click()
    page.get_by_text("tokens/s").wait_for()
    expect(page.get_by_label("Text", exact=True)).to_have_value("Once upon a time there was a page.")
    assert prompt_of(server) == "Once upon a time"
    screen.shot(f"complete-{width}-{scheme}")
    assert screen.obstacles() == []
    page.get_by_role("button", name="Undo").click()
    screen.until("document.getElementById('complete-text').value === 'Once upon a time'")
