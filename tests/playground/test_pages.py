"""The pages beside chat: compare, model, batches and live; what they show, and that everybody can use them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from screen import LOOKS, Screen, expect

from dovetail_server.testing import ScriptedServer

PAGES = ("compare", "model", "batches", "live")
HEADINGS = {"compare": "Compare", "model": "Model", "batches": "Batches", "live": "Live"}


def opened(screen: Screen, name: str) -> Any:
    """Go to a page by its link."""
    screen.page.get_by_role("navigation", name="Pages").get_by_role("link", name=HEADINGS[name]).click()
    screen.page.get_by_role("heading", level=1, name=HEADINGS[name]).wait_for()
    return screen.page


def call(screen: Screen, script: str, argument: Any = None) -> Any:
    """Run a function of the page's modules."""
    return screen.page.evaluate(script, argument)


@pytest.mark.first(1)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_no_page_has_obstacles(
    new_screen: Callable[..., Screen], server: ScriptedServer, scheme: str, width: int
) -> None:
    """axe finds nothing on any page, and none is wider than the window."""
    screen = new_screen(server.base, width=width, scheme=scheme).ready()
    server.chat("Some text")
    for name in PAGES:
        page = opened(screen, name)
        if name == "live":
            page.locator(".bars").first.wait_for()
        elif name == "model":
            page.locator("table.rows tbody tr").first.wait_for()
        assert screen.obstacles() == [], name
        screen.until("document.documentElement.scrollWidth <= innerWidth")
        screen.shot(f"{name}-{scheme}-{width}")


def test_the_pages_by_keyboard(screen: Screen) -> None:
    """Each page is reached with Tab and Enter, and its first control after the skip link."""
    page, keys = screen.page, screen.page.keyboard
    for name in PAGES:
        screen.reach(HEADINGS[name])
        keys.press("Enter")
        page.get_by_role("heading", level=1, name=HEADINGS[name]).wait_for()
    page.locator(".skip").focus()
    keys.press("Enter")
    screen.until("document.activeElement.closest('main') !== null")


def test_two_settings_and_one_seed(screen: Screen, server: ScriptedServer) -> None:
    """Both sides are asked with the same seed, each with its settings; the page says where they part."""
    page = opened(screen, "compare")
    page.get_by_label("Question").fill("Which?")
    page.get_by_label("Seed", exact=True).fill("17")
    sides = page.locator(".sides .card")
    sides.nth(0).get_by_label("Temperature").fill("0.1")
    sides.nth(1).get_by_label("Temperature").fill("9")
    page.get_by_role("button", name="Ask both").click()
    page.get_by_text("Not sent. Side B: Temperature is more than 2.").wait_for()
    assert server.engine.submits == []
    sides.nth(1).get_by_label("Temperature").fill("1.5")
    server.reply = "The same"
    page.get_by_role("button", name="Ask both").click()
    page.get_by_text("Both replies are the same.").wait_for()
    asked = [(one.params.temperature, one.params.seed) for one in server.engine.submits]
    assert sorted(asked) == [(0.1, 17), (1.5, 17)]
    screen.shot("compared")
    page.reload()
    page.get_by_role("heading", level=1, name="Compare").wait_for()
    expect(page.get_by_label("Question")).to_have_value("Which?")


def test_the_model_and_its_plugins(screen: Screen, server: ScriptedServer) -> None:
    """Facts of the model, memory as a picture with words, and the plugins in use, or all that are installed."""
    page = opened(screen, "model")
    page.locator("table.rows").wait_for()
    for part in ("FakeForCausalLM", "8,192 tokens", "KV cache"):
        expect(page.locator("main")).to_contain_text(part)
    expect(page.locator(".parts svg").last).to_have_attribute("aria-label", re.compile("Free 100,000 tokens"))
    page.get_by_label("Only those in use").uncheck()
    page.get_by_label("Find a plugin").fill("hermes")
    row = page.locator("table.rows tbody tr")
    page.get_by_text("1 of").wait_for()
    expect(row).to_contain_text("tool parser")


def test_a_batch_from_upload_to_replies(screen: Screen, server: ScriptedServer, tmp_path: Path) -> None:
    """A file goes up, its batch runs to the end, and the replies come down; a bad file says which line is wrong."""
    page = opened(screen, "batches")
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(json.dumps(line) + "\n" + json.dumps({**line, "custom_id": "b"}) + "\n")
    bad.write_text("{not json}\n")
    server.reply = "From a batch"
    page.get_by_label("File (.jsonl)").set_input_files(good)
    page.get_by_role("button", name="Start").click()
    page.get_by_text("2 of 2 answered").wait_for()
    page.locator(".state.completed").wait_for()
    assert screen.obstacles() == []
    screen.shot("batch")
    with page.expect_download() as download:
        page.get_by_role("button", name="Replies").click()
    replies = [json.loads(one) for one in Path(download.value.path()).read_text().splitlines()]
    assert {one["custom_id"] for one in replies} == {"a", "b"}
    assert replies[0]["response"]["body"]["choices"][0]["message"]["content"] == "From a batch"
    page.get_by_label("File (.jsonl)").set_input_files(bad)
    page.get_by_role("button", name="Start").click()
    page.locator(".state.failed").wait_for()
    expect(page.locator(".batch .problem").first).to_contain_text("Line 1:")


def test_the_server_at_work(screen: Screen, server: ScriptedServer) -> None:
    """Requests, steps and latencies appear while the server works; a pause stops the questions."""
    page = opened(screen, "live")
    page.locator(".charts figure").first.wait_for()
    server.chat("Some more text")
    screen.until("document.querySelectorAll('.bars tr').length > 3")
    expect(page.locator("main")).to_contain_text("p50 ")
    page.get_by_role("button", name="Histograms from now on").click()
    page.get_by_text("nothing yet").first.wait_for()
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert asked == []


def row(step: int, ago_s: float, seconds: float, num_prefill: int = 0) -> dict[str, float]:
    return {"step": step, "ago_s": ago_s, "seconds": seconds, "num_decode": 3, "num_prefill_tokens": num_prefill,
            "num_queued": 2}  # fmt: skip


def test_steps_as_a_picture(screen: Screen, server: ScriptedServer) -> None:
    """Each step of the last ten seconds is a bar; words say the same, and a table names the slowest."""
    server.engine.step = 900
    server.engine.steps = [row(1, 60.0, 1.0), *(row(n, 3.0, 0.01) for n in range(2, 40)), row(40, 0.5, 0.25, 512)]
    page = opened(screen, "live")
    page.locator(".steps rect").first.wait_for()
    expect(page.locator(".steps rect")).to_have_count(39)
    expect(page.locator(".steps rect.part-w")).to_have_count(1)
    words = "Steps: 39 steps in ten seconds, 1 with prompts; longest 250 ms"
    expect(page.locator(".steps svg")).to_have_attribute("aria-label", re.compile(f"^{words}"))
    server.engine.steps.append(row(41, 0.1, 0.2))  # before anything that takes long: bars leave after ten seconds
    screen.until("document.querySelectorAll('.steps rect').length === 40")
    page.locator(".steps summary").click()
    expect(page.locator(".steps tbody tr").first.locator("td")).to_have_text(["40", "250 ms", "3", "512", "2"])
    assert screen.obstacles() == []
    screen.shot("live-steps")
    server.engine.steps = []


def test_steps_of_an_engine_that_begins_again(screen: Screen) -> None:
    """Its numbers begin again, so what is known of the one before is dropped; never more are kept than there may be."""
    script = """async () => {
      const { join } = await import("./playground/live/timeline.js");
      const rows = (...steps) => steps.map((step) => ({ step, ago_s: 1, seconds: 0 }));
      const many = join([], rows(...Array.from({ length: 2000 }, (_, i) => i + 1)), 5000);
      const numbers = (all) => all.map(({ step }) => step);
      return [numbers(join(join([], rows(1, 2), 0), rows(3), 9)), numbers(join(join([], rows(7, 8), 0), rows(1, 2), 9)),
        numbers(join(join([], rows(1), 0), [], 9)), many.length, many[0].end];
    }"""
    assert call(screen, script) == [[1, 2, 3], [1, 2], [1], 512, 4000]


EXPOSITION = """\
# HELP x_seconds y
x_seconds_bucket{model_name="a \\"q\\" {b}",le="0.1"} 1
x_seconds_bucket{model_name="a",le="1.0"} 3
x_seconds_bucket{model_name="a",le="+Inf"} 4
runs{reason="stop"} 2
runs{reason="length"} 3.5e1
broken line {
"""


def test_metrics_are_read_as_written(screen: Screen) -> None:
    """Labels with any text, sums, histograms and their quantiles; a server that begins again does not go backwards."""
    script = """async (text) => {
      const m = await import("./playground/live/exposition.js");
      const series = m.parse(text);
      const rows = m.histogram(series, "x_seconds");
      return [m.total(series, "runs"), m.total(series, "nothing"), rows.map(([bound, value]) => [String(bound), value]),
        m.quantile(rows, 0.5), m.quantile([], 0.5), m.since(rows, rows).map(([, value]) => value),
        m.since([[0.1, 5]], [[0.1, 2]])[0][1], series.get("x_seconds_bucket").length];
    }"""
    buckets = [["0.1", 1], ["1", 2], ["Infinity", 1]]
    half = pytest.approx(0.1 + 0.9 / 2)
    assert call(screen, script, EXPOSITION) == [37, None, buckets, half, None, [0, 0, 0], 2, 3]


def test_a_page_whose_server_is_gone(
    new_server: Callable[..., ScriptedServer], new_screen: Callable[..., Screen]
) -> None:
    """Each page says that the server does not answer, and what it showed stays."""
    server = new_server()
    screen = new_screen(server.base).ready()
    screen.expected += ("net::ERR",)
    page = opened(screen, "model")
    page.locator("table.rows").wait_for()
    server.close()
    page.get_by_text("The server does not answer. Is it still running").wait_for()
    expect(page.locator("table.rows")).to_have_count(1)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Live").click()
    page.get_by_text("this page could not be loaded").or_(
        page.get_by_text("The server does not answer")
    ).first.wait_for()
