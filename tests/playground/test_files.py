"""The page's files: what is served, to whom, and that they are all there is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import dovetail_server.playground as playground
from dovetail_server.playground import assets
from dovetail_server.testing import ScriptedServer

STATIC = Path(playground.__file__).parent / "static"
MOST_BYTES, MOST_BYTES_OF_FORMULAS = 320_000, 600_000
IMPORT = re.compile(r'\b(?:from|import)\s*"([^"]+)"')
LAZY = re.compile(r'import\("([^"]+)"\)')


def imports(name: str, pattern: re.Pattern[str] = IMPORT) -> set[str]:
    """Return the modules that a module imports, as paths below `static`."""
    text = (STATIC / name).read_text("utf-8")
    found = pattern.findall(text)
    return {str((STATIC / name).parent.joinpath(one).resolve().relative_to(STATIC.resolve())) for one in found}


def closure(name: str) -> set[str]:
    """Return all modules that a module brings with it."""
    found: set[str] = set()
    waiting = {name}
    while waiting:
        one = waiting.pop()
        found.add(one)
        waiting |= imports(one) - found
    return found


def test_the_page_is_small() -> None:
    """All its files, those of libraries too, stay under 320 KB, but for what is loaded with the first formula."""
    sizes = {name: len(asset.data) for name, asset in assets().items()}
    formulas = {name: size for name, size in sizes.items() if name.startswith("vendor/katex/")}
    assert sum(sizes.values()) - sum(formulas.values()) < MOST_BYTES
    assert sum(formulas.values()) < MOST_BYTES_OF_FORMULAS


def test_nothing_is_loaded_from_elsewhere() -> None:
    """No file of ours names another host, and the page has no script or style of its own in it."""
    for name in assets():
        if not name.startswith("vendor/") and name != "icon.svg":
            text = (STATIC / name).read_text("utf-8")
            assert not re.search(r"https?://[a-z]", text), name
    page = (STATIC / "index.html").read_text("utf-8")
    assert "<script>" not in page
    assert "<style" not in page
    assert not re.search(r"\son\w+=|\sstyle=", page)


def test_every_module_is_asked_for_at_once() -> None:
    """What the first page needs is named in its head, so that no import waits for another."""
    page = (STATIC / "index.html").read_text("utf-8")
    named = set(re.findall(r'rel="modulepreload" href="playground/([^"]+)"', page))
    assert named == closure("app.js") - {"app.js"}
    for name in re.findall(r'(?:src|href)="playground/([^"]+)"', page):
        assert name in assets(), name


def test_no_module_is_dead() -> None:
    """Every module is reached from the first, at once or when its page is opened."""
    reached: set[str] = set()
    waiting = {"app.js"}
    while waiting:
        found = closure(waiting.pop())
        reached |= found
        waiting |= {lazy for name in found for lazy in imports(name, LAZY)} - reached
    own = {name for name in assets() if name.endswith(".js") and not name.startswith("vendor/languages/")}
    assert own - reached == set()


def test_libraries_are_what_they_are_said_to_be() -> None:
    """Each file has the sum of its row, and each library its licence."""
    rows = re.findall(
        r"^\| ([\w./-]+\.\w+) \| (\S+) \|.*\| ([0-9a-f]{64}) \|$", (STATIC / "vendor/README.md").read_text(), re.M
    )
    assert {name for name, _, _ in rows} == {
        name.removeprefix("vendor/") for name in assets() if name.startswith("vendor/")
    }
    for name, package, digest in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest, name
        licence = {"@highlightjs/cdn-assets": "highlightjs"}.get(package, package)
        assert (STATIC / "vendor/licences" / licence).is_file()


def test_the_files_need_no_key_and_the_rest_does(dovetail_server: Callable[..., ScriptedServer]) -> None:
    """Somebody without a key gets the page, which asks for one; and nothing else."""
    server = dovetail_server(api_key=["secret"])
    assert server.get("/")[0] == 200
    for name in sorted(assets().keys() - {"index.html"}):
        assert server.get(f"/playground/{name}")[0] == 200, name
    for path in ("/v1/models", "/playground/index.html", "/playground/x.js", "/playground/vendor/README.md", "/docs"):
        assert server.get(path)[0] == 401, path


def test_only_the_assets_are_served(dovetail_server: Callable[..., ScriptedServer]) -> None:
    """Other files of the package, and other folders, are not reachable."""
    server = dovetail_server()
    for path in (
        "../__init__.py",
        "..%2f__init__.py",
        "vendor/licences/preact",
        "vendor/README.md",
        "index.html",
        "%00",
    ):
        assert server.get(f"/playground/{path}")[0] == 404, path


def test_it_can_be_switched_off(dovetail_server: Callable[..., ScriptedServer]) -> None:
    """`--disable-playground` leaves no route of it, and the address leads to the documentation again."""
    server = dovetail_server(disable_playground=True)
    assert server.get("/playground")[0] == 404
    assert server.get("/playground/app.js")[0] == 404
    status, page = server.get("/")
    assert status == 200
    assert "swagger" in page
