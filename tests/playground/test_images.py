"""Images in a conversation: by button, paste and drop where the model sees; refused in a line elsewhere."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from screen import LOOKS, Screen, expect

from dovetail.plugins import Registry, make_plan
from dovetail_server.testing import ScriptedServer

sys.path.append(str(Path(__file__).parents[1] / "server"))  # behind the helpers beside this file

from seeing_server import CAT, DOG, PAD, png, write_seeing_model

MOST = 3
GIVE = """([way, names, types, data]) => {
  const given = new DataTransfer();
  names.forEach((name, i) => {
    const bytes = Uint8Array.from(atob(data[i]), (one) => one.charCodeAt(0));
    given.items.add(new File([bytes], name, {type: types[i]}));
  });
  const options = {bubbles: true, cancelable: true};
  const target = document.getElementById("composer");
  target.dispatchEvent(way === "paste" ? new ClipboardEvent("paste", {...options, clipboardData: given})
    : new DragEvent("drop", {...options, dataTransfer: given}));
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server whose model sees, at most three images of a request; its engine is scripted."""
    folder = write_seeing_model(tmp_path_factory.mktemp("sees"))
    plan = make_plan(Registry.scan(), processor="qwen2-vl")
    server = ScriptedServer(
        folder,
        plan,
        "A red cat.",
        limit_mm_per_prompt={"image": MOST},
        file_storage_path=tmp_path_factory.mktemp("storage"),
    )
    server.engine.context_len = 8192
    server.state.text.with_engine_limits(server.engine.info, server.state.settings)
    yield server
    server.close()


@pytest.fixture
def screen(new_screen: Callable[..., Screen], seeing: ScriptedServer) -> Screen:
    """The page in front of it."""
    seeing.engine.submits.clear()
    return catch_choosers(new_screen(seeing.base)).ready()


def give(screen: Screen, way: str, **files: tuple[str, str]) -> None:
    """Paste or drop files, given by their names without the point's part as media type and base64."""
    names = [f"{name}.{kind.rpartition('/')[2]}" for name, (kind, _) in files.items()]
    kinds, data = [kind for kind, _ in files.values()], [data for _, data in files.values()]
    screen.page.evaluate(GIVE, [way, names, kinds, data])


def image(url: str = CAT) -> tuple[str, str]:
    """A PNG for `give`."""
    return "image/png", url.partition(",")[2]


def catch_choosers(screen: Screen) -> Screen:
    """Let the driver open dialogs for files. That takes a moment, so it comes well before one opens."""
    screen.page.on("filechooser", lambda chooser: None)
    return screen


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def words(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def test_images_go_along(screen: Screen, seeing: ScriptedServer, tmp_path: Path) -> None:
    """By button, paste and drop; before the text, to the model as pixels, and with the next question once more."""
    page = screen.page
    (tmp_path / "cat.png").write_bytes(png())
    button = page.get_by_role("button", name="Attach images")
    expect(button).to_have_attribute(
        "title", "Attach images: PNG, JPEG, WebP or GIF, up to 20 MiB each, 3 in a conversation"
    )
    with page.expect_file_chooser() as chooser:
        button.click()
    chooser.value.set_files(tmp_path / "cat.png")
    page.get_by_alt_text("Preview of cat.png").wait_for()
    give(screen, "paste", dog=image(DOG))
    page.get_by_alt_text("Preview of dog.png").wait_for()
    give(screen, "drop", bird=image())
    page.get_by_label("Remove bird.png").click()
    expect(page.locator(".files li")).to_have_count(2)
    assert screen.focused() == "Your message"
    expect(page.locator(".composer")).to_contain_text(
        "2 of 3 images of a conversation: PNG, JPEG, WebP or GIF, up to 20 MiB"
    )
    screen.ask("What are they?")
    asked = {"role": "user", "content": [part(CAT), part(DOG), words("What are they?")]}
    assert screen.bodies[-1]["messages"] == [asked]
    expect(screen.last()).to_contain_text("A red cat.")
    submit = seeing.engine.submits[-1]
    pad = seeing.state.text.tokenizer.added_tokens[PAD]
    assert submit.prompt_ids.count(pad) == 2 + 3  # of 56 x 28 and 28 x 84 pixels, one for 28 x 28
    expect(page.locator(".files")).to_have_count(0)
    expect(page.locator(".asked img")).to_have_count(2)
    screen.until("[...document.querySelectorAll('.asked img')].every((one) => one.naturalWidth > 0)")
    screen.ask("And their colours?")
    assert screen.bodies[-1]["messages"][0] == asked
    assert screen.bodies[-1]["messages"][2] == {"role": "user", "content": "And their colours?"}
    page.locator(".asked").first.hover()
    page.get_by_label("Edit", exact=True).first.click()
    page.get_by_label("Edit what you asked").fill("Which is larger?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".bubble >> text=Which is larger?")
    screen.done()
    content = [part(CAT), part(DOG), words("Which is larger?")]
    assert screen.bodies[-1]["messages"] == [{"role": "user", "content": content}]


def test_a_picture_to_try_it_with(screen: Screen, seeing: ScriptedServer) -> None:
    """An empty conversation offers a question with a picture of a number; one click sends both."""
    idea = screen.page.get_by_role("button", name="Which number is this? (with a picture)")
    idea.click()
    expect(screen.last()).to_contain_text("A red cat.")
    [asked] = screen.bodies[-1]["messages"]
    picture, question = asked["content"]
    assert question == words("Which number is this?")
    with Image.open(io.BytesIO(base64.b64decode(picture["image_url"]["url"].partition(",")[2]))) as found:
        assert (found.format, found.size) == ("PNG", (160, 96))
        assert found.convert("L").getextrema() == (0, 255)  # black on white: something is drawn
    expect(screen.page.get_by_alt_text("number.png")).to_be_visible()
    expect(idea).to_have_count(0)


def test_an_image_alone_and_the_code_of_its_request(screen: Screen) -> None:
    """No text is needed; the conversation has the image's name, and code that is shown has not its data."""
    page = screen.page
    give(screen, "paste", cat=image())
    page.get_by_label("Remove cat.png").wait_for()
    page.locator("#composer").press("Enter")
    page.locator(".reply footer").wait_for()
    assert screen.bodies[-1]["messages"] == [{"role": "user", "content": [part(CAT)]}]
    expect(page.locator("h1")).to_have_text("cat.png")
    expect(page.locator(".bubble")).to_have_count(0)
    screen.last().get_by_label("Show code").click()
    expect(page.locator("dialog pre")).to_contain_text("data:image/png;base64,…")
    expect(page.locator("dialog pre")).not_to_contain_text(CAT[:60])


def test_what_cannot_be_sent_is_said_before(screen: Screen) -> None:
    """Other formats, large files and more than the server takes stay out, each with its reason."""
    give(screen, "drop", logo=("image/bmp", "Qk0="), a=image(), b=image(DOG), c=image(), d=image())
    page = screen.page
    expect(page.locator(".files li")).to_have_count(MOST)
    said = page.locator(".composer [role=status]")
    expect(said).to_have_text(
        "logo.bmp is not a PNG, JPEG, WebP or GIF image and was left out. "
        "d.png was left out: a conversation may have 3 images."
    )
    screen.ask("Three")
    page.evaluate(
        """() => {
          const given = new DataTransfer();
          given.items.add(new File([new Uint8Array((20 << 20) + 1)], "large.png", {type: "image/png"}));
          const event = new ClipboardEvent("paste", {clipboardData: given, bubbles: true, cancelable: true});
          document.getElementById("composer").dispatchEvent(event);
        }"""
    )
    expect(said).to_have_text("large.png has more than 20 MiB and was left out.")
    give(screen, "paste", e=image())
    expect(said).to_have_text("e.png was left out: a conversation may have 3 images.")
    expect(page.locator(".files li")).to_have_count(0)


def test_images_that_are_too_much_for_a_request_are_said_before(screen: Screen) -> None:
    """Those that were sent go along each time: the page counts them, and what is attached, against its most."""
    page = screen.page
    page.evaluate(
        "async most => { (await import('/playground/core/facts.js')).facts.info.max_body_bytes = most; }",
        64 * 1024 + 600,
    )
    give(screen, "drop", a=image(), b=("image/png", "A" * 1200))
    said = page.locator(".composer [role=status]")
    why = "was left out: the images of a conversation go along with each request, which may have 65 KiB."
    expect(said).to_have_text(f"b.png {why}")
    expect(page.locator(".files li")).to_have_count(1)
    give(screen, "paste", c=("image/png", "A" * 600))
    expect(said).to_have_text(f"c.png {why}")
    screen.ask("One")
    give(screen, "paste", d=("image/png", "A" * 600))
    expect(said).to_have_text(f"d.png {why}")


def test_an_error_is_shown_at_its_image(screen: Screen) -> None:
    """What the server has against an image stands at that one, until it is sent with success."""
    page = screen.page
    screen.set("System prompt", "Be brief.")
    give(screen, "paste", good=image(), broken=("image/png", "AAAA"))
    page.get_by_label("Remove broken.png").wait_for()
    screen.ask("What is it?")
    pictures = page.locator(".pictures li")
    expect(pictures.nth(0).locator(".problem")).to_have_count(0)
    expect(pictures.nth(1).locator(".problem")).to_have_text(re.compile("^The data is no image"))
    expect(screen.last().locator(".problem")).to_have_text(re.compile("^broken.png: The data is no image"))
    screen.shot("image-refused")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n"))
    page.get_by_label("Try again").click()
    expect(page.locator(".pictures .problem")).to_have_count(0)


def test_an_edit_leaves_out_what_was_refused(screen: Screen) -> None:
    """So that a conversation goes on; the other images stay."""
    page = screen.page
    give(screen, "paste", broken=("image/png", "AAAA"), good=image())
    page.get_by_label("Remove good.png").wait_for()
    screen.ask("What is it?")
    expect(page.locator(".pictures .problem")).to_have_count(1)
    page.locator(".asked").hover()
    page.get_by_label("Edit", exact=True).click()
    page.get_by_label("Edit what you asked").fill("And now?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".reply >> text=A red cat.")
    content = [part(CAT), words("And now?")]
    assert screen.bodies[-1]["messages"] == [{"role": "user", "content": content}]


def test_images_end_with_the_window(screen: Screen) -> None:
    """What the browser stores has their names; afterwards page and model are told that they are gone."""
    page = screen.page
    give(screen, "paste", cat=image())
    page.get_by_label("Remove cat.png").wait_for()
    screen.ask("What is it?")
    screen.kept()
    assert CAT.partition(",")[2] not in json.dumps(screen.stored())
    page.reload()
    said = "cat.png is not in this window, and the model is told so."
    page.locator(".pictures", has_text=said).wait_for()
    screen.ask("And now?")
    content = [words("[The image cat.png is no longer available.]"), words("What is it?")]
    assert screen.bodies[-1]["messages"][0] == {"role": "user", "content": content}


def test_exported_conversations_have_names_of_images(screen: Screen) -> None:
    """What a file says else of them is not taken."""
    node = {
        "id": "n",
        "parent": "",
        "role": "user",
        "content": "Look",
        "images": [{"id": "x", "name": "cat.png"}, 3, {}],
    }
    data = {"id": "c", "title": "Look", "nodes": {"n": node}}
    script = """async (data) => {
      const {asFile, fromFile} = await import("./playground/core/transfer.js");
      return fromFile(await asFile([data]).text())[0].nodes.n.images;
    }"""
    assert screen.page.evaluate(script, data) == [{"id": "", "name": "cat.png", "type": ""}]


def test_a_window_holds_so_many(screen: Screen) -> None:
    """Beyond 256 MiB the oldest images are given up, and only those."""
    script = """async () => {
      const {hold, previewOf} = await import("./playground/core/images.js");
      for (const id of ["a", "b", "c"]) hold([{id, url: {length: 100 << 20}, preview: `blob:${id}`}]);
      return ["a", "b", "c"].map((id) => Boolean(previewOf({id})));
    }"""
    assert screen.page.evaluate(script) == [False, True, True]


def test_a_model_that_does_not_see(new_screen: Callable[..., Screen], server: ScriptedServer) -> None:
    """There is no button, and an image that is pasted or dropped is left out with the server's reason."""
    screen = new_screen(server.base).ready()
    page = screen.page
    expect(page.get_by_role("button", name="Attach images")).to_have_count(0)
    expect(page.get_by_role("button", name="(with a picture)")).to_have_count(0)
    for way in ("paste", "drop"):
        give(screen, way, **{way: image()})
        page.get_by_text(f"{way}.png was left out: this model is served for text only.").wait_for()
    expect(page.locator(".files li")).to_have_count(0)


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_images_have_no_obstacles(
    new_screen: Callable[..., Screen], seeing: ScriptedServer, scheme: str, width: int
) -> None:
    """The keyboard reaches the button and removes an image, and axe finds nothing, attached and sent."""
    screen = catch_choosers(new_screen(seeing.base, width=width, scheme=scheme)).ready()
    page = screen.page
    give(screen, "drop", cat=image(), dog=image(DOG))
    page.get_by_label("Remove dog.png").wait_for()
    screen.reach("Remove dog.png")
    page.keyboard.press("Enter")
    expect(page.locator(".files li")).to_have_count(1)
    assert screen.obstacles() == []
    screen.shot(f"images-attached-{scheme}-{width}")
    screen.reach("Attach images")
    with page.expect_file_chooser():
        page.keyboard.press("Enter")
    screen.ask("What is it?")
    assert screen.obstacles() == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screen.shot(f"images-sent-{scheme}-{width}")
