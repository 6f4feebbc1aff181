"""Check the words of docs, help texts, public docstrings and API schemas: `make words`.

Findings are listed words, long sentences and paragraphs, and pages over 2,500 words. Code, generated tables and what
stands in backticks are not checked.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_SENTENCE, MAX_PARAGRAPH, MAX_PAGE = 30, 80, 2500
LISTED = {
    r"turned away": "rejected",
    r"requests that (run|wait)": "running / queued requests",
    r"as many as (?!\d)": "maximum, up to",
    r"(?-i:so many)\b": "the number",
    r"(half|99 %) within": "p50, p99",
    r"tokens a second|requests a second": "tokens/s, requests/s",
    r"let go of|gives? (it )?up\b|given up": "evict, free, abandon",
    r"whoever|whosoever|somebody|nobody|anybody|everybody": "user, caller, no other request",
    r"anew\b": "again",
    r"the better peer|the peers\b": "best of vLLM and SGLang; their names",
    r"stands? still|got on\b|gets on\b": "no progress, stall",
    r"(?<!not )guilty|culprit|who is to blame": "poisoned request, cause",
    r"made-up|made up (?!of)": "dummy",
    r"(is|are|was|were) drawn\b|draws? lots": "sampled",
    r"written out in": "dequantized to",
    r"multiplied at once|product of matrices": "matmul",
    r"who (wants|comes|has|needs|asks)\b": "a noun",
    r"of which (one|some|all)\b": "a noun",
    r"as ever\b|as it came\b|as they came\b": "unchanged",
    r"near(er)? to what": "closer to",
    r"is over\b(?! \d)|are over\b(?! \d)": "finished",
    r"once more\b": "again",
    r"beforehand": "first, in advance",
    r"if not given|if left out": "Default: …",
    r"is told (of|by|that)|are told (of|by|that)|tells of\b": "receives, reports",
    r"how it ended": "finish reason",
    r"the last one's": "the previous step's",
}
"""Words of the glossary to avoid that have one meaning in these pages, and what to write."""
EXCEPTIONS: dict[str, str] = {
    "gateway --help": "one of its sentences is the list of the flags of `serve` that it shares",
    "plan --help": "one of its sentences is the list of the flags of `serve` that it shares",
    "docs/design/paths.md": "its sentences are chains of files in the order in which they act",
}
"""At most ten pages, flags or names that may break a rule, each with its reason."""
LONG = {"docs/api.md": "the reference of the HTTP API"}
"""Pages that may have more words."""
WORD = re.compile(r"[^\s|]*\w[^\s|]*")
NOT_PROSE = re.compile(
    r"^---\n.*?^---$|^```.*?^```$|<!-- results: .*?<!-- results end -->|<!--.*?-->", re.MULTILINE | re.DOTALL
)
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)|\n(?=\|)|\n(?=    )")


def plain(text: str) -> str:
    """Return text without links' targets and with code as one word."""
    text = re.sub(r"\]\([^)]*\)|</?[a-z][^>]*>", "]", text)
    return re.sub(r"``.+?``|`[^`]*`", "CODE", text, flags=re.DOTALL)


def check(text: str) -> Iterator[str]:
    """Yield what is wrong with a text: listed words, long sentences and paragraphs."""
    for block in BLOCK.split(NOT_PROSE.sub("\n\n", text)):
        prose = " ".join(plain(block).split())
        for pattern, instead in LISTED.items():
            if found := re.search(rf"\b(?:{pattern})", prose, re.IGNORECASE):
                yield f"{found[0]!r}: write {instead}"
        if prose.startswith(("|", "#", "!")) or block.startswith("    "):
            continue
        if (num := len(WORD.findall(prose))) > MAX_PARAGRAPH:
            yield f"a paragraph of {num} words: {prose[:50]!r}"
        for sentence in re.split(r"(?<=[.!?:])\**\s+(?=[\"'(*\[]*[A-Z0-9])|(?<=;)\s", prose):
            if (num := len(WORD.findall(sentence))) > MAX_SENTENCE:
                yield f"a sentence of {num} words: {sentence[:60]!r}"


def pages() -> Iterator[tuple[str, str]]:
    """Yield the pages of the documentation by their path."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in found:
        if "changelog.d" not in path.parts:
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")


def helps() -> Iterator[tuple[str, str]]:
    """Yield the help text of every option and command."""
    from dovetail_server.cli import main
    from dovetail_server.cli.commands import COMMANDS
    from dovetail_server.cli.options import describe, flag_names, has_flag
    from dovetail_server.settings.serve import ServeSettings

    for name, field in ServeSettings.model_fields.items():
        if has_flag(field):
            yield f"serve {flag_names(name, field)[0]}", describe(name, with_choices=False)
    for name in COMMANDS:
        if name not in {"serve", "bench", "plugin"}:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
                main([name, "--help"])
            yield f"{name} --help", re.sub(r"\n  -", "\n\n  -", out.getvalue())


def public_modules() -> Iterator[str]:
    """Yield the modules whose names plugin authors import: `dovetail`, the contracts and the SDK's packages."""
    yield from ("dovetail", "dovetail.contracts")
    sdk = importlib.import_module("dovetail.sdk")
    for found in pkgutil.walk_packages(sdk.__path__, "dovetail.sdk."):
        if "._" not in found.name:
            yield found.name


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstring of every public class, method, property and function, once each."""
    seen: set[int] = set()
    for module in public_modules():
        home = importlib.import_module(module)
        own = (name for name, value in vars(home).items() if getattr(value, "__module__", "") == module)
        for name in getattr(home, "__all__", own):
            value = getattr(home, name)
            if name.startswith("_"):
                continue
            if not callable(value) or id(value) in seen:
                continue
            seen.add(id(value))
            yield f"{module}.{name}", inspect.getdoc(value) or ""
            for inner, method in vars(value).items() if inspect.isclass(value) else ():
                if not inner.startswith("_") and (inspect.isfunction(method) or isinstance(method, property)):
                    yield f"{module}.{name}.{inner}", inspect.getdoc(method) or ""


def fields() -> Iterator[tuple[str, str]]:
    """Yield the docstring of every request and response body of the API, and the description of its fields."""
    from pydantic import BaseModel

    server = importlib.import_module("dovetail_server")
    for found in pkgutil.walk_packages(server.__path__, "dovetail_server."):
        if ".schema" in found.name:
            for name, value in vars(importlib.import_module(found.name)).items():
                if inspect.isclass(value) and value.__module__ == found.name:
                    yield f"{found.name}.{name}", inspect.getdoc(value) or ""
                    for field, info in value.model_fields.items() if issubclass(value, BaseModel) else ():
                        yield f"{found.name}.{name}.{field}", info.description or ""


def findings() -> Iterator[str]:
    """Yield what is wrong anywhere."""
    for source in (pages, helps, docstrings, fields):
        for name, text in source():
            if name in EXCEPTIONS:
                continue
            yield from (f"{name}: {problem}" for problem in check(text))
            words = len(WORD.findall(NOT_PROSE.sub("", text)))
            if source is pages and words > MAX_PAGE and name not in LONG:
                yield f"{name}: {words:,} words, more than {MAX_PAGE:,}"


def main() -> int:
    """Print the findings; 1 if there are any."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = list(findings())
    print("\n".join(found), file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
