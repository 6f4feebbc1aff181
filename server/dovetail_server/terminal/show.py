"""What a terminal is shown: a reply as text, piece by piece, and nothing that it could take for a command."""

from __future__ import annotations

import json
import re
from typing import Any

from rich.console import Console

from dovetail_server.terminal.conversation import ShownReply

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Everything that moves a cursor, renames a window or turns the order of text; line feeds and tabs stay."""


def safe(text: str) -> str:
    """Return text with control characters by name."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Screen:
    """Writes a conversation."""

    def __init__(self, console: Console) -> None:
        """Write to a console."""
        self.console = console
        self._style = ""

    def begin(self) -> None:
        """A reply begins."""
        self._style = ""

    def text(self, piece: str, style: str) -> None:
        """Write a piece of a reply; reasoning and answer are apart."""
        if self._style and style != self._style:
            self.console.print("\n")
        self._style = style
        self.console.print(safe(piece), end="", style=style, markup=False, highlight=False, soft_wrap=True)

    def end(self, reply: ShownReply, seconds: float, note: str = "") -> None:
        """Write what stands under a reply."""
        if self._style:
            self.console.print()
        for call in reply.calls:
            self.note(f"calls {call['function']['name']}({laid_out(call['function']['arguments'])})", style="cyan")
        if reply.report is not None:
            self.note(f"structured output: {report_line(reply.report)}")
        self.note(note or reply_stats(reply, seconds))

    def note(self, text: str, style: str = "dim") -> None:
        """Write a line beside the conversation."""
        self.console.print(safe(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def problem(self, text: str) -> None:
        """Write what went wrong."""
        self.note(text, style="red")


def laid_out(arguments: str) -> str:
    """Return arguments on one line, or as they came where they are no JSON."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except ValueError:
        return f"{arguments} [not JSON]"


def report_line(report: dict[str, Any]) -> str:
    """Say how far a schema was enforced."""
    validity = {True: ", conforms", False: ", does not conform", None: ""}[report.get("valid")]
    ignored = f"; not enforced: {', '.join(report['ignored'])}" if report.get("ignored") else ""
    return f"{report['enforcement'].replace('_', ' ')}{validity} ({report['backend']}){ignored}"


def reply_stats(reply: ShownReply, seconds: float) -> str:
    """Tokens and pace of a reply."""
    tokens = (reply.usage or {}).get("completion_tokens")
    if tokens is None or reply.first is None:
        return f"{seconds:.1f} s"
    waited = reply.first - reply.sent
    rate = f", {(tokens - 1) / (seconds - waited):.1f} a second" if tokens > 1 and seconds > waited else ""
    cut = "; cut off at the most tokens" if reply.finish == "length" else ""
    return f"{tokens} tokens, the first after {waited:.2f} s{rate}{cut}"
