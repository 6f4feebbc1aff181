"""Formulas are typeset, and what is none comes out as it went in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from screen import LOOKS, Screen, expect

from dovetail_server.testing import ScriptedServer

FORMULAS = r"""Inline \(a^2 + b^2 = c^2\), $x_1*y_1$ and $$e^{i\pi}$$, **bold \(a*b\)** and \(c*d\).

\[
\int_0^1 x^2\,dx

= \frac{1}{3}
\]

$$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$$

\begin{align}
a &= b \\
- c &= d
\end{align}

1. First \(\sqrt{2}\)
2. Second
   \[ \sum_{i=1}^n i \]
"""
TEXTS = [
    r"Without marks x^2\,dx and \{1\} stay.",
    "It costs $5 and $10, or US$6-$7.",
    r"Code keeps its own: `\(a\)` and `$x$`.",
    r"Not closed \(a + b",
    r"Not TeX: \(\frac{1\) here.",
]


def test_formulas_are_typeset(server: ScriptedServer, screen: Screen) -> None:
    """In all the marks that models write, in lists and bold text, without any request elsewhere; read as MathML."""
    server.reply = FORMULAS
    screen.ask("Formulas, please")
    # Not by `wait_for_function`: from its second look on it evaluates text, which the page's policy forbids.
    expect(screen.page.locator(".katex")).to_have_count(10)
    found = screen.page.locator(".reply annotation").all_text_contents()
    assert found[0] == "a^2 + b^2 = c^2"
    assert r"\int_0^1 x^2\,dx" in found[5]
    expect(screen.page.locator(".reply .formula.display")).to_have_count(5)
    expect(screen.page.locator(".reply strong .katex")).to_have_count(1)
    expect(screen.page.locator(".reply em")).to_have_count(0)
    screen.until("document.fonts.check('16px KaTeX_Main')")


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_formula_stays_as_it_is(server: ScriptedServer, screen: Screen, text: str) -> None:
    """Prices, code, TeX without marks, and what cannot be read."""
    server.reply = text
    screen.ask("Text, please")
    expect(screen.last().locator(".markdown")).to_have_text(text.replace("`", ""))


@pytest.mark.first(1)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_wide_formulas_and_tables_scroll(
    new_screen: Callable[..., Screen], server: ScriptedServer, width: int, scheme: str
) -> None:
    """On a narrow screen each scrolls by itself, and the page does not."""
    columns = 9
    table = "\n".join("|" + "a longer word |" * columns if i != 1 else "|" + "---|" * columns for i in range(4))
    server.reply = f"{table}\n\n\\[ {' + '.join(f'x_{{{i}}}^{{{i}}}' for i in range(40))} \\]\n"
    screen = new_screen(server.base, width=width, scheme=scheme).ready()
    screen.ask("Wide, please")
    screen.page.locator(".katex").first.wait_for()
    for part in (".scrolls", ".formula.display"):
        screen.until(f"(({{scrollWidth, clientWidth}}) => scrollWidth > clientWidth)(document.querySelector('{part}'))")
    screen.until("document.documentElement.scrollWidth <= innerWidth")
    heights = screen.page.evaluate("[...document.querySelectorAll('td')].map((cell) => cell.clientHeight)")
    assert max(heights) < 90  # words are not broken into letters
    screen.shot(f"formulas-{width}-{scheme}")
    assert screen.obstacles() == []
