r"""What the llguidance library says of a grammar that it refuses, in one line for whoever wrote the grammar.

```
at 2(4): invalid regex "a[z-a]" (in regex): regex parse error:
    a[z-a]
      ^^^
error: invalid character class range, the start must be <= the end
   2 | x: /a[z-a]/
          ^
```

becomes `line 2, column 4: the regex "a[z-a]" cannot be read at character 3 ("z-a"): invalid character class range, …`.
Lines and columns are told of the dialect that users write only; other kinds are rewritten before the library has them.
"""

from __future__ import annotations

import re

from dovetail.contracts.grammar import Kind

MAX_LEN = 400
_REGEX = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)(\^+)\s*\nerror: (.*)")
_AROUND = re.compile(r"lookarounds not supported yet; (\w+) in regex /(.*)/")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_SOURCE = re.compile(r"^ *\d+ \| .*$|^ *\^+ *$", re.MULTILINE)
_NAMED = {"Start": "an anchor ^ within", "End": "an anchor $ within", "Word": "a word boundary"}


def worded(error: str, kind: Kind) -> str:
    """Return the library's error in one line.

    Args:
        error: As it came.
        kind: Of the grammar.
    """
    place = _PLACE.match(error)
    said = _said(error[place.end() :] if place else error, kind)
    return f"line {place[1]}, column {place[2]}: {said}" if place and kind is Kind.LARK else said


def first_line(error: str) -> str:
    """Join the lines of an error; it ends with some for the library's developers."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and "non-verbose" not in line]
    return " ".join(lines)[:MAX_LEN]


def _said(error: str, kind: Kind) -> str:
    found = _REGEX.search(error)
    if found is not None:
        pattern, before, marked, why = found.groups()
        at = len(before)
        return f'the regex "{pattern}" cannot be read at character {at + 1} ("{pattern[at : at + len(marked)]}"): {why}'
    around = _AROUND.search(error)
    if around is not None:
        held = _NAMED.get("Word" if around[1].startswith("Word") else around[1], "a line anchor, ^ or $ behind (?m)")
        return f'the regex "{around[2]}" holds {held}, which is not supported'
    if error.lstrip().startswith("NoExtensionBias"):
        why = "it matches no text" if kind is Kind.REGEX else "whatever begins leads to a rule that never ends"
        return f"it allows no text: {why}"
    return first_line(_SOURCE.sub("", error))
