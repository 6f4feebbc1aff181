"""What a frame costs while a reply is written: as much in a long reply as in a short one. Counted, not timed."""

from __future__ import annotations

import os

import pytest
from screen import Screen

from dovetail_server.testing import ScriptedServer

PARAGRAPH = "Some *text* with `code`, a [link](https://example.org) and **more** of it, as replies are.\n\n"
KINDS = {
    "paragraphs": PARAGRAPH,
    "one list": "- an item of *text* that goes on\n",
    "code": "value = compute(1, 'two')  # a line\n",
    "a table": "| a cell | *another* | third |\n",
    "one line": "word *and* word ",
    "headings": "# One\n\n## Two\n\n",
}
HEADS = {"code": "```python\n", "a table": "| a | b | c |\n|---|---|---|\n"}

COUNT = """async ([head, unit, sizes]) => {
  const { html, render } = await import("./playground/core/html.js");
  const { Markdown } = await import("./playground/parts/markdown.js");
  const { Lexer } = await import("./playground/vendor/marked.js");
  const place = document.createElement("div");
  document.body.append(place);
  let read = 0;
  const lex = Lexer.prototype.lex;
  Lexer.prototype.lex = function (source) { read += source.length; return lex.call(this, source); };
  let touched = 0;
  const count = (records) => records.forEach((r) => { touched += 1 + r.addedNodes.length + r.removedNodes.length; });
  const observer = new MutationObserver(count);
  observer.observe(place, { subtree: true, childList: true, characterData: true, attributes: true });
  const frame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  const found = [];
  let text = head;
  render(html`<${Markdown} text=${"```python\\n1\\n```\\n"} isWriting=${true} />`, place);
  while (!place.querySelector(".c-number")) await frame(); // what colours code is there
  render(null, place);
  try {
    for (const size of sizes) {
      while (text.length < size) text += unit;
      render(html`<${Markdown} text=${text} isWriting=${true} />`, place);
      await frame();
      read = 0;
      touched = 0;
      for (let i = 0; i < 100; i++) {
        text += unit.length > 40 ? unit.slice((i % 4) * unit.length / 4, (i % 4 + 1) * unit.length / 4) : unit;
        render(html`<${Markdown} text=${text} isWriting=${true} />`, place);
      }
      await frame();
      count(observer.takeRecords());
      found.push([read, touched]);
    }
    const shown = () => place.innerText.replace(/\\s+/g, " ").trim();
    const words = shown();
    render(html`<${Markdown} text=${text} isWriting=${false} />`, place);
    await frame();
    return { found, words, whole: shown() };
  } finally {
    Lexer.prototype.lex = lex;
    render(null, place);
    place.remove();
  }
}"""


FEW = ("paragraphs", "one list", "code")


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_a_frame_costs_the_same_at_any_length(screen: Screen, kind: str) -> None:
    """Characters read and nodes touched by a hundred frames, in a reply of 10 KB and in one of 60."""
    answer = screen.page.evaluate(COUNT, [HEADS.get(kind, ""), KINDS[kind], [10_000, 60_000]])
    (read, touched), *later = answer["found"]
    for more_read, more_touched in later:
        assert more_read <= 2 * read + 20_000, answer["found"]
        assert more_touched <= 3 * touched + 3_000, answer["found"]
    print(kind, answer["found"])
    assert max(each for each, _ in answer["found"]) < 100 * 9_000


@pytest.mark.parametrize("kind", ["paragraphs", "headings"])
def test_what_is_written_is_what_it_will_be(screen: Screen, kind: str) -> None:
    """Where every part settles, nothing changes when the reply has ended."""
    answer = screen.page.evaluate(COUNT, [HEADS.get(kind, ""), KINDS[kind], [9_000]])
    assert answer["words"] == answer["whole"]


SAMPLES = [
    "# A\n\nText\n\n```python\ncode\n\n\nmore\n```\n\nafter\n\n- a\n\n- b\n\n1. c\n\nend\n\n> q\n\n",
    "| a |\n|---|\n| b |\n\nx\n\n| c |\n",
    "a\n\n~~~\n```\n\nx\n~~~\n\nb\n\n    indented\n\nc",
    "\n\n\nstart\n\n\n\nend\n\n",
    "```\nnever closed\n\n\nx\n\ny",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_any_pieces_are_read_alike(screen: Screen, text: str) -> None:
    """However a text is cut while it comes, it is laid out at last as if it had come at once."""
    script = """async (text) => {
      const { Reading } = await import("./playground/parts/reading.js");
      const made = (step) => {
        const chunks = [];
        const reader = new Reading((source, level) => (chunks.push(source), { elements: [], level }));
        let tail = "";
        for (let at = step; at < text.length + step; at += step) tail = reader.take(text.slice(0, at));
        return [...chunks, tail];
      };
      return [1, 2, 3, 7, text.length].map(made);
    }"""
    first, *others = screen.page.evaluate(script, text)
    assert "".join(first) == text
    for other in others:
        assert "".join(other) == text
        assert other == first


def test_other_messages_and_the_settings_are_left_alone(screen: Screen, server: ScriptedServer) -> None:
    """While a reply grows, nothing of the page changes but its own article."""
    screen.ask("First")
    server.reply = "word " * 60
    server.engine.delay_s = 0.005
    screen.page.evaluate(
        """() => {
          window.outside = [];
          new MutationObserver((records) => records.forEach((r) => {
            const element = r.target.nodeType === 1 ? r.target : r.target.parentElement;
            const last = [...document.querySelectorAll(".reply")].at(-1);
            const grows = document.querySelector(".reply[aria-busy=true] .markdown");
            if (grows && element && !last.contains(element)) window.outside.push(element.outerHTML.slice(0, 80));
          })).observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true });
        }"""
    )
    screen.ask("Second")
    found = screen.page.evaluate("window.outside")
    assert len(found) < 60, found  # fewer than there are pieces: the list of conversations is drawn once or twice


@pytest.mark.skipif(not os.environ.get("DOVETAIL_FRAMES"), reason="a measurement; DOVETAIL_FRAMES=1 makes it")
def test_frames_a_second(screen: Screen, server: ScriptedServer) -> None:
    """Frames, and what scripts and layout take of one, at 200 tokens a second and more behind a long reply."""
    page = screen.page
    server.engine.context_len = 1 << 20
    server.reply = PARAGRAPH * 40
    screen.ask("First")
    server.engine.delay_s = 0.001
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable")
    frames = "window.frames60 = 0; (function f() { frames60 += 1; requestAnimationFrame(f); })()"
    page.evaluate(f"() => {{ {frames} }}")

    def look() -> dict[str, float]:
        found = {row["name"]: row["value"] for row in client.send("Performance.getMetrics")["metrics"]}
        return {**found, "frames": page.evaluate("window.frames60")}

    screen.ask("Second", wait=False)
    page.wait_for_timeout(1000)
    before, num = look(), len(page.locator(".reply").last.inner_text())
    page.wait_for_timeout(5000)
    after, num = look(), len(page.locator(".reply").last.inner_text()) - num
    passed = after["Timestamp"] - before["Timestamp"]
    each = after["frames"] - before["frames"]
    print(f"\n{each / passed:.1f} frames/s, {num / passed:.0f} characters/s, ms per frame:")
    for name in ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration", "TaskDuration"):
        print(f"  {name}: {1000 * (after[name] - before[name]) / each:.2f}")
