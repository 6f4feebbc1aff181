"""`make docs` builds the whole documentation without a warning, and the built site needs no other host."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from build_site import list_versions
from flowchart import draw
from stage import GENERATED, pages, with_links

from dovetail.base.distribution import DISTRIBUTION

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "docs/site/zensical.toml").read_text("utf-8"))
needs_zensical = "zensical is not installed; run `make setup`"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built site, two versions of it."""
    pytest.importorskip("zensical", reason=needs_zensical)
    output = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "docs/site/build_site.py"), "--output", str(output), "--version", "0.1"]
    done = subprocess.run(command, cwd=output, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return output


def in_navigation(items: list[Any]) -> Iterator[str]:
    """Yield the pages of the navigation."""
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            for value in item.values():
                yield from in_navigation(value if isinstance(value, list) else [value])


def test_every_page_is_in_the_navigation_once() -> None:
    """A page that nobody can reach is no page; a new one has to be given to a kind of reader."""
    listed = list(in_navigation(CONFIG["project"]["nav"]))
    assert sorted(listed) == sorted({*pages(ROOT).values(), *GENERATED})


@pytest.mark.full
def test_every_page_is_built(site: Path) -> None:
    """The navigation leads to files."""
    for page in in_navigation(CONFIG["project"]["nav"]):
        assert (site / "0.1" / page).with_suffix(".html").is_file(), page


@pytest.mark.full
def test_no_page_loads_from_another_host(site: Path) -> None:
    """Scripts, styles, fonts and pictures stand in the site."""
    found = []
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*>", page.read_text("utf-8")):
            found += [
                (page.name, tag) for url in re.findall(r"(?:src|href|data)=[\"']?([^\"' >]+)", tag) if "//" in url
            ]
    assert found == []
    styles = [path.read_text("utf-8") for path in site.rglob("*.css")]
    assert styles
    assert [text for text in styles if re.search(r"url\([\"']?(?:https?:)?//|@import", text)] == []


@pytest.mark.full
def test_the_reference_has_every_setting_route_kind_and_model(site: Path) -> None:
    """What is generated holds what the code has."""
    from importlib.metadata import entry_points

    import dovetail_testing as testing
    from dovetail.plugins import KINDS
    from dovetail_server.cli.options import flag_names, has_flag
    from dovetail_server.settings.serve import ServeSettings

    def text(name: str) -> str:
        return (site / f"0.1/reference/{name}.html").read_text("utf-8")

    classes = [getattr(testing, name) for name in testing.__all__ if name.endswith("Conformance")]
    fields = ServeSettings.model_fields.items()
    flags = [flag for name, field in fields if has_flag(field) for flag in flag_names(name, field)]
    assert [flag for flag in flags if f"<code>{flag}</code>" not in text("settings")] == []
    assert "<code>POST /v1/chat/completions</code>" in text("routes")
    assert "<code>chat_template_kwargs</code>" in text("routes")
    tests = {name for cls in classes for name in dir(cls) if name.startswith("test_")}
    assert [name for name in tests if f"<code>{name}</code>" not in text("conformance")] == []
    assert [kind for kind in KINDS if f"<code>{kind}</code>" not in text("plugins")] == []
    ours = [
        point for point in entry_points(group="dovetail.models.v1") if point.dist and point.dist.name == DISTRIBUTION
    ]
    names = {point.name for point in ours} - {"transformers"}
    assert [name for name in names if f"<code>{name}</code>" not in text("models")] == []
    names = {point.name for point in entry_points(group="dovetail.quantizations.v1") if "_backends" in point.value}
    assert [name for name in names if f"<code>{name}</code>" not in text("quantizations")] == []


def test_a_link_to_what_is_no_page_is_refused() -> None:
    """With the page and the link."""
    source = ROOT / "docs/index.md"
    with pytest.raises(ValueError, match=r"docs/index.md: ../Makefile: no page of the site"):
        with_links(source, "See [it](../Makefile).", "index.md", pages(ROOT), ROOT)


def test_links_lead_where_the_pages_stand() -> None:
    """A page of the root, an example's README and a folder of the tree; what stands in code is left alone."""
    text = "[a](../../CONTRIBUTING.md#x) [b](../examples/dovetail-desk/README.md) [c](../examples/dovetail-desk)\n"
    code = "```text\n[a](nothing.md)\n```\n"
    found = with_links(ROOT / "docs/tutorials/model.md", text + code, "tutorials/model.md", pages(ROOT), ROOT)
    desk = "../examples/dovetail-desk.md"
    assert found == f"[a](../contributing.md#x) [b]({desk}) [c]({desk})\n{code}"


@pytest.mark.parametrize("link", ["other.md", "index.md#nothing"])
def test_a_dead_link_or_anchor_ends_the_build(tmp_path: Path, link: str) -> None:
    """The build is strict."""
    pytest.importorskip("zensical", reason=needs_zensical)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# A page\n\n[a link]({link})\n")
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "A"\n')
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode != 0


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    """By number, not by letter, with what is no release last; the page at the top leads to the newest."""
    for name in ("0.9", "0.10", "dev", "0.2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("")
    (tmp_path / "empty").mkdir()
    list_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [item["version"] for item in listed] == ["0.10", "0.9", "0.2", "dev"]
    assert "url=0.10/" in (tmp_path / "index.html").read_text()


def test_a_flowchart_that_is_not_understood_is_refused() -> None:
    """Neither half a picture nor an endless one."""
    with pytest.raises(ValueError, match="is not understood"):
        draw("flowchart TD\na -.-> b\n")
    with pytest.raises(ValueError, match="circle"):
        draw("flowchart TD\na --> b\nb --> a\n")


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and says nothing."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site over HTTP."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.full
@pytest.mark.parametrize("way", ["http", "file"])
def test_search_works_without_a_network(chromium: Browser, site: Path, address: str, way: str) -> None:
    """Over HTTP and where pages are opened as files; nothing is asked of another host."""
    base = address if way == "http" else site.as_uri()
    page: Page = chromium.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{base}/0.1/tutorials/index.html")
    page.locator("button.md-search__button").click()
    box = page.get_by_placeholder("Search")
    box.wait_for(state="visible")
    box.fill("schedule-conservativeness")
    page.get_by_text(re.compile(r"^\d+ results?$")).wait_for(state="visible")
    page.locator("a[href*='migrate.html'][href*='#from-sglang']:visible").first.wait_for()
    page.close()
    assert [url for url in asked if not url.startswith((base, "data:", "blob:", "about:"))] == []
    if way == "http":
        assert f"{base}/versions.json" in asked
