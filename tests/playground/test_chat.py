"""Chat in a real browser: streaming, reasoning, branches, tools, tokens, and what is kept."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Callable
from typing import Any

from screen import Screen, expect, piece, stream

from dovetail_server.testing import ScriptedServer

RICH = """<think>Let me **think**.</think>Here are *two*:

1. **France**, `Paris`
2. Peru

| Country | Capital |
|---|---|
| France | Paris |

```python
def f(x):
    return x + 1
```

A [link](https://example.org) and &amp; an ![image](http://example.org/x.png).
"""
SCHEMA = "[...document.querySelectorAll('.settings label')].find((one) => one.textContent === 'JSON schema')?.control"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'


def body_of(server: ScriptedServer) -> str:
    """The last prompt that the engine was asked with, as text."""
    return server.state.text.tokenizer.decode(server.engine.submits[-1].prompt_ids, skip_special_tokens=False)


def test_a_conversation(screen: Screen, server: ScriptedServer) -> None:
    """A reply is laid out as Markdown, its reasoning folded and timed; both are there again after a reload."""
    server.reply = RICH
    server.engine.delay_s = 0.001  # without it a reply may take no whole millisecond, and then has no rate
    screen.ask("Two countries?")
    page, reply = screen.page, screen.last()
    expect(reply.locator("ol li")).to_have_text(["France, Paris", "Peru"])
    expect(reply.locator("td")).to_have_text(["France", "Paris"])
    page.wait_for_selector("pre .c-keyword")
    assert reply.locator("pre").inner_text() == "def f(x):\n    return x + 1"
    expect(reply.locator("a")).to_have_text(["link", "image: image"])
    expect(reply.locator("img")).to_have_count(0)
    expect(reply).to_contain_text("and & an")
    summary = reply.locator(".reasoning summary")
    expect(summary).to_have_text(re.compile(r"^Thought for \d+(\.\d)? m?s$"))
    expect(reply.locator(".reasoning strong")).to_be_hidden()
    summary.click()
    expect(reply.locator(".reasoning strong")).to_have_text("think")
    figures = re.compile(r"\d+ tokens · first token after .* · [\d.]+ tokens/s")
    expect(reply.locator(".figures")).to_have_text(figures)
    screen.shot("chat")
    screen.kept().page.reload()
    page.wait_for_selector(".reply ol")
    expect(page.locator(".list li")).to_have_count(1)
    expect(page.locator("h1")).to_have_text("Two countries?")


def test_text_appears_while_it_is_written_and_stops(screen: Screen, server: ScriptedServer) -> None:
    """What has come stands there; Escape stops this reply at the server, and what came is kept."""
    server.reply = "word " * 400
    server.engine.delay_s = 0.02
    screen.ask("Go on", wait=False)
    page = screen.page
    screen.until("document.querySelector('.reply .markdown')?.textContent.includes('word word')")
    expect(screen.last()).to_have_attribute("aria-busy", "true")
    screen.shot("chat-writing")
    page.keyboard.press("Escape")
    screen.done()
    expect(screen.last()).to_contain_text("Stopped.")
    deadline = time.monotonic() + 120
    while server.engine.live and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.engine.live == []
    assert len(server.engine.aborted) >= 1
    server.engine.delay_s, server.reply = 0, "And more."
    screen.ask("Go on")
    expect(page.locator(".reply")).to_have_count(2)


def test_edit_retry_and_branches(screen: Screen, server: ScriptedServer) -> None:
    """Editing and trying again begin branches that one can go back to; a branch can become a conversation."""
    page = screen.page
    server.reply = "First."
    screen.ask("Question one")
    server.reply = "Second."
    page.get_by_label("Try again").click()
    page.get_by_text("2 of 2").wait_for()
    screen.done()
    expect(screen.last()).to_contain_text("Second.")
    page.get_by_label("Previous version").click()
    page.get_by_text("1 of 2").wait_for()
    expect(screen.last()).to_contain_text("First.")
    page.locator(".asked").hover()
    page.get_by_label("Edit", exact=True).click()
    page.get_by_label("Edit what you asked").fill("Question two")
    server.reply = "Third."
    page.keyboard.press("Enter")
    page.wait_for_selector(".reply >> text=Third.")
    screen.done()
    expect(page.locator(".bubble")).to_have_text("Question two")
    page.locator(".asked").get_by_label("Previous version").click()
    page.wait_for_selector(".reply >> text=First.")
    page.get_by_label("Branch into a new conversation").click()
    screen.until("document.querySelectorAll('.list li').length === 2")
    expect(page.locator(".bubble")).to_have_text("Question one")
    screen.stores(2, 5)


def test_the_whole_conversation_is_sent(screen: Screen, server: ScriptedServer) -> None:
    """System prompt, sampling and the earlier messages reach the engine."""
    screen.set("System prompt", "Be brief.")
    screen.set("Temperature", "0.5")
    screen.set("Max tokens", "77")
    screen.set("Seed", "5")
    server.reply = "One."
    screen.ask("First")
    screen.ask("Second")
    text = body_of(server)
    for part in ("Be brief.", "First", "One.", "Second"):
        assert part in text
    params = server.engine.submits[-1].params
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 77, 5)


def test_bad_settings_are_named_and_nothing_is_lost(screen: Screen, server: ScriptedServer) -> None:
    """A setting that is wrong is named where it stands, nothing is sent, and what was typed stays."""
    page = screen.page
    page.get_by_text("More fields").click()
    screen.set("JSON object, added to the request", "{oops")
    page.fill("#composer", "Hello?")
    page.keyboard.press("Enter")
    page.get_by_text("Not sent. What else to send is not JSON").wait_for()
    expect(page.locator("#composer")).to_have_value("Hello?")
    assert server.engine.submits == []
    screen.set("JSON object, added to the request", '{"nonsense": 1}')
    page.keyboard.press("Tab")
    screen.ask("Hello?")
    expect(screen.last().locator(".problem")).to_contain_text("nonsense")


def test_a_setting_acts_at_once(screen: Screen) -> None:
    """Enter in the moment after a setting was mended sends, before the page is drawn again."""
    page = screen.page
    screen.set("Temperature", "9")
    page.get_by_text("Temperature is more than 2.").wait_for()
    page.fill("#composer", "Hello?")
    at_once = """(field) => {
      field.value = "1";
      field.dispatchEvent(new Event("input", {bubbles: true}));
      const enter = new KeyboardEvent("keydown", {key: "Enter", bubbles: true, cancelable: true});
      document.getElementById("composer").dispatchEvent(enter);
    }"""
    page.get_by_label("Temperature").evaluate(at_once)
    screen.last().wait_for()
    assert screen.bodies[-1]["temperature"] == 1


def test_a_tool_is_called_and_answered(screen: Screen, server: ScriptedServer) -> None:
    """A call is laid out; what is typed as its result goes back, and the model goes on."""
    page = screen.page
    page.locator("summary", has_text="Tools").click()
    screen.set("Functions, as a JSON list", TOOL)
    server.reply = CALL
    screen.ask("How is the weather in Paris?")
    expect(screen.last().locator(".call h2")).to_have_text("get_weather")
    assert json.loads(screen.last().locator(".call pre").inner_text()) == {"city": "Paris"}
    screen.shot("chat-tool")
    page.get_by_label("Result of get_weather").fill('{"temperature": 21}')
    server.reply = "It is 21 degrees."
    page.get_by_role("button", name="Send the result").click()
    page.wait_for_selector(".reply >> text=21 degrees")
    screen.done()
    called, result = screen.bodies[-1]["messages"][-2:]
    assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": '{"temperature": 21}'}
    expect(page.get_by_label("Result of get_weather")).to_have_count(0)


def test_structured_output_and_its_report(screen: Screen, replying: Callable[[str], None]) -> None:
    """A schema is edited with its mistakes named; the server's report on it stands under the reply."""
    page = screen.page
    page.get_by_label("Output").select_option("json_schema")
    schema = page.get_by_role("textbox", name="JSON schema")
    screen.until(f"{SCHEMA}?.value.includes('object')")
    schema.fill('{"type": "object",')
    page.get_by_text("The schema is not JSON").wait_for()
    schema.fill('{"type":"object","properties":{"a":{"type":"integer"}}}')
    page.get_by_role("button", name="Format JSON").click()
    screen.until(f"{SCHEMA}?.value.split('\\n').length > 4")
    ends = {"backend": "llguidance", "enforcement": "full", "ignored": [], "valid": True}
    replying(stream(piece(content='{"a": 1}'), piece(finish="stop", structured_output=ends)))
    screen.ask("An object")
    assert screen.bodies[-1]["response_format"]["json_schema"]["schema"]["properties"] == {"a": {"type": "integer"}}
    report = screen.last().locator(".report")
    expect(report).to_contain_text("Structured output: full")
    report.locator("summary").click()
    report.get_by_text("llguidance").wait_for()
    screen.shot("chat-schema")


def test_tokens_with_probabilities(screen: Screen, server: ScriptedServer) -> None:
    """Each token tells its probability and what else might have stood there, to pointer and keys alike."""
    page = screen.page
    page.get_by_label("Token probabilities").check()
    server.reply = "Hi there"
    screen.ask("Hello")
    page.get_by_label("Tokens", exact=True).click()
    tokens = page.locator(".token")
    tokens.nth(2).wait_for()
    assert "".join(tokens.all_inner_texts()[:-1]).replace("·", " ").startswith("Hi there"[:3])
    rows = page.locator(".alternatives tr")
    expect(rows).to_have_count(5)
    first = rows.first.inner_text()
    tokens.nth(2).hover()
    screen.until("document.querySelector('.alternatives tr').innerText !== " + json.dumps(first))
    tokens.nth(2).focus()
    page.keyboard.press("ArrowRight")
    screen.until("document.activeElement.dataset.at === '3'")
    page.keyboard.press("Home")
    screen.until("document.activeElement.dataset.at === '0'")
    screen.until("document.activeElement.getAttribute('aria-label').includes('%')")
    screen.shot("chat-tokens")


def test_the_same_request_as_a_program(screen: Screen, server: ScriptedServer) -> None:
    """curl, Python and JavaScript ask what the page asked, and can be copied."""
    page = screen.page
    screen.set("Temperature", "0.25")
    page.locator("summary", has_text="More sampling").click()
    screen.set("Repetition penalty", "1.1")
    screen.ask("It's a 'quoted' question")
    screen.last().get_by_label("Show code").click()
    dialog = page.locator("dialog")
    curl = dialog.locator("pre").inner_text()
    text = re.search(r"-d '(.*)'", curl.replace("'\\''", "\0"), re.S)
    assert text is not None
    body = json.loads(text[1].replace("\0", "'"))
    assert body["messages"] == [{"role": "user", "content": "It's a 'quoted' question"}]
    assert body["temperature"] == 0.25
    dialog.get_by_role("button", name="Python").click()
    dialog.get_by_label("Code, Python").wait_for()
    program = ast.parse(dialog.locator("pre").inner_text())
    assert "extra_body={'repetition_penalty': 1.1}" in ast.unparse(program)
    dialog.get_by_role("button", name="JavaScript").click()
    dialog.get_by_label("Code, JavaScript").wait_for()
    expect(dialog.locator("pre")).to_contain_text(server.base)
    dialog.get_by_label("Copy code").click()
    dialog.get_by_label("Copied").wait_for()
    assert "await fetch" in str(page.evaluate("navigator.clipboard.readText()"))
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")


def test_images_are_refused_politely(screen: Screen) -> None:
    """A pasted image is left out, and the page says so; a pasted text file is attached."""
    page = screen.page
    paste = """(kind) => {
      const data = new DataTransfer();
      data.items.add(new File(["some text"], "a" + (kind === "image/png" ? ".png" : ".txt"), {type: kind}));
      const event = new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true});
      document.getElementById("composer").dispatchEvent(event);
    }"""
    page.evaluate(paste, "image/png")
    page.get_by_text("a.png was left out: this model is served for text only.").wait_for()
    page.evaluate(paste, "text/plain")
    page.get_by_label("Remove a.txt").wait_for()


def test_two_windows_of_one_conversation(screen: Screen, server: ScriptedServer) -> None:
    """What two windows add to a conversation is all kept."""
    screen.ask("First")
    screen.kept()
    other = screen.page.context.new_page()
    other.goto(screen.page.url)
    other.wait_for_selector(".reply")
    screen.ask("From one")
    other.fill("#composer", "From the other")
    other.keyboard.press("Enter")
    other.locator(".reply footer").nth(1).wait_for()
    deadline = time.monotonic() + 120
    texts: set[Any] = set()
    while time.monotonic() < deadline and not {"From one", "From the other"} <= texts:
        texts = {node["content"] for one in screen.stored() for node in one["nodes"].values()}
        time.sleep(0.05)
    assert {"First", "From one", "From the other"} <= texts


def test_removing_a_conversation(screen: Screen) -> None:
    """A removed conversation is gone from the list and the browser, once that was confirmed."""
    page = screen.page
    screen.ask("Short-lived")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(".list li").hover()
    page.get_by_label("Remove Short-lived").click()
    screen.until("document.querySelectorAll('.list li').length === 0")
    screen.stores()
    page.locator(".reply").wait_for(state="detached")


def test_a_key_is_typed_once(new_server: Callable[..., ScriptedServer], new_screen: Callable[..., Screen]) -> None:
    """A server with keys is asked for none in vain: the page asks, says when the key is wrong, and keeps it for now."""
    server = new_server(api_key=["right"])
    screen = new_screen(server.base)
    page = screen.page
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    dialog.get_by_text("The server does not accept this key.").wait_for()
    screen.shot("key")
    dialog.get_by_label("Key").fill("right")
    page.keyboard.press("Enter")
    screen.ready()
    screen.ask("Hello")
    expect(screen.last()).to_contain_text("Hello, world")
    screen.kept().page.reload()
    page.wait_for_selector(".reply")
    expect(dialog).to_have_count(0)
    assert "right" not in json.dumps(screen.stored())
    assert page.evaluate("Object.values(localStorage).join()").find("right") == -1
