"""Every page for everybody: axe finds no obstacle, the keyboard is enough, and it fits a telephone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from screen import LOOKS, Screen, expect

from dovetail_server.testing import ScriptedServer

RICH = """<think>Let me think.</think># A heading

#### Two levels left out

Some *text* with `code`, a [link](https://example.org):

1. one
2. two

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x): return "text", 1  # comment
```
"""


@pytest.mark.first(1)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_chat_has_no_obstacles(
    new_screen: Callable[..., Screen], server: ScriptedServer, scheme: str, width: int
) -> None:
    """Empty, with a reply, with its tokens and its settings, in light and dark, wide and narrow."""
    screen = new_screen(server.base, width=width, scheme=scheme).ready()
    page = screen.page
    assert screen.obstacles() == []
    screen.shot(f"empty-{scheme}-{width}")
    server.reply = RICH
    if width < 1000:
        page.get_by_label("Settings", exact=True).first.click()
    page.get_by_label("Token probabilities").check()
    page.locator("summary", has_text="More sampling").click()
    page.get_by_label("Output").select_option("regex")
    page.get_by_label("Output").select_option("")
    assert screen.obstacles() == []
    if width < 1000:
        page.get_by_label("Close settings").click()
    screen.ask("Something rich")
    page.locator(".reasoning summary").click()
    page.wait_for_selector(".c-keyword")
    assert screen.obstacles() == []
    screen.shot(f"reply-{scheme}-{width}")
    page.get_by_label("Tokens", exact=True).click()
    page.locator(".alternatives").wait_for()
    assert screen.obstacles() == []
    screen.last().get_by_label("Show code").click()
    page.locator("dialog pre").wait_for()
    assert screen.obstacles() == []
    screen.until("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Escape")
    page.get_by_label("Dark" if scheme == "light" else "Light").click()
    expected = "dark" if scheme == "light" else "light"
    screen.until(f"document.documentElement.dataset.theme === '{expected}'")


@pytest.mark.full
def test_the_keyboard_is_enough(screen: Screen, server: ScriptedServer) -> None:
    """A question, an edit, another try, a setting and the theme, without a pointer; the focus is always seen."""
    page, keys = screen.page, screen.page.keyboard
    screen.until("document.activeElement.id === 'composer'")
    keys.type("Hello")
    keys.press("Enter")
    page.wait_for_selector(".reply footer")
    keys.press("ArrowUp")
    screen.until("document.activeElement.getAttribute('aria-label') === 'Edit what you asked'")
    keys.press("End")
    keys.type(" again")
    keys.press("Enter")
    screen.until("document.querySelector('.bubble')?.innerText === 'Hello again'")
    screen.done()
    names = walk(screen, 80)
    for name in ("New conversation", "Hello", "Settings", "Try again", "Copy reply", "Show code", "Dark"):
        assert name in names, (name, names)
    screen.reach("Dark")
    keys.press("Enter")
    screen.until("document.documentElement.dataset.theme === 'dark'")
    screen.reach("Temperature")
    keys.type("0.5")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    screen.reach("Try again")
    keys.press("Enter")
    page.get_by_text("2 of 2").last.wait_for()


def walk(screen: Screen, most: int) -> list[str]:
    """Press Tab until the round is over; each stop must show that it has the focus."""
    found: list[str] = []
    for _ in range(most):
        screen.page.keyboard.press("Tab")
        style = screen.page.evaluate(
            "(() => { const e = document.activeElement; if (e === document.body) return null;"
            " const box = e.closest('.box') ?? e; const s = getComputedStyle(box);"
            " return box !== e || s.outlineStyle !== 'none'; })()"
        )
        assert style in (None, True), screen.focused()
        found.append(screen.focused())
    return found


def test_a_screen_reader_is_told(screen: Screen, server: ScriptedServer) -> None:
    """A region that is read aloud says that a reply is being written, and then what it is; not each token."""
    screen.ask("Hello")
    screen.until("document.querySelector('.unseen[role=status]').textContent.includes('Hello, world')")
    expect(screen.page.locator("[aria-live] .markdown, [role=log] .markdown")).to_have_count(0)
