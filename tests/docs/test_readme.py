"""The README is short, and what it shows can be copied: commands, a plugin, names and pictures."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from dovetail.plugins import KINDS
from dovetail_server.cli.commands import COMMANDS
from dovetail_server.cli.options import parse_flags
from dovetail_testing.parsers import parse_chunks

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path for path in (ROOT / "docs/tutorials").glob("*.md") if path.name != "README.md")
TEXT = (ROOT / "README.md").read_text("utf-8")
MAX_LINES, MAX_PICTURE_BYTES = 110, 200_000


def block(language: str) -> str:
    """Return the first block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[0]


def test_it_fits_on_a_screen_and_a_half() -> None:
    """Anything longer belongs to a page that it links to."""
    assert len(TEXT.splitlines()) < MAX_LINES
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"|!\[[^\]]*\]\(([^)]+)\)', TEXT)
    sizes = {path: (ROOT / path).stat().st_size for found in pictures for path in found if path}
    assert len(sizes) == 3
    assert {path: size for path, size in sizes.items() if size > MAX_PICTURE_BYTES} == {}


def test_its_commands_exist() -> None:
    """Each `make` target and variable, each subcommand and each flag of `dovetail serve`."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = re.findall(r"^make (\w+)", block("bash"), re.MULTILINE)
    assert named == ["serve", "test"]
    assert set(named) <= targets
    variables = set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make \w+ (\w+)=", TEXT)) <= variables
    commands = [code.split() for code in re.findall(r"`(?:\.venv/bin/)?dovetail ([^`]+)`", TEXT)]
    assert {words[0] for words in commands} <= COMMANDS.keys()
    served = [parse_flags(words[1:]) for words in commands if words[0] == "serve"]
    assert [flags for flags in served if not isinstance(flags, dict)] == []
    assert len(served) >= 2


def test_its_plugin_parses_the_format_that_it_names() -> None:
    """However the text is cut; its entry point is in a group that is scanned."""
    names: dict[str, type] = {}
    exec(compile(block("python"), "README.md", "exec"), names)
    text = "<r>thinking</r>answer"
    for cut in range(len(text) + 1):
        reply = parse_chunks(names["AcmeR2"](), [text[:cut], text[cut:]])
        assert (reply.reasoning, reply.content) == ("thinking", "answer")
    [(group, points)] = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    assert group in {f"{kind.group}.v{kind.api}" for kind in KINDS.values()}
    assert list(points.values()) == ["acme_parser:AcmeR2"]


def test_its_counts_and_versions_are_those_of_the_tree() -> None:
    """The number of architectures, and the versions whose flags are known."""
    (num_decoders,) = re.findall(r"over (\d+) decoder architectures", TEXT)
    names = {point.name for point in entry_points(group="dovetail.models.v1") if "dovetail_models" in point.value}
    assert len([name for name in names if name.endswith("ForCausalLM")]) > int(num_decoders)
    migrate = (ROOT / "docs/migrate.md").read_text("utf-8")
    versions = re.findall(r"(?:vLLM|SGLang) \d[\d.]*\d", re.findall(r"knows every flag of (.*)", TEXT)[0])
    assert len(versions) == 2
    assert [version for version in versions if version not in migrate] == []


@pytest.mark.parametrize("page", [ROOT / "docs/quickstart.md", *TUTORIALS], ids=lambda path: path.stem)
def test_a_page_says_how_to_install_what_its_code_imports(page: Path) -> None:
    """Dovetail's own dependencies are there; the tutorials' README says it for all of them."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    here = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in dependencies} | sys.stdlib_module_names
    text = page.read_text("utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    imported = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)) - here
    said = text if page not in TUTORIALS else text + (page.parent / "README.md").read_text("utf-8")
    installed = set(re.findall(r"\w+", " ".join(re.findall(r"pip install ([^`]+)", said))))
    names = {"PIL": "vision"}  # by what installs it: an extra of Dovetail
    lost = {name for name in imported if not name.startswith("dovetail") and names.get(name, name) not in installed}
    assert lost == set()
