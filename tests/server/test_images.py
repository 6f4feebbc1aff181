"""Images through a real server: its processes load them, and its engine gets arrays in files."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Harness
from PIL import Image
from seeing_server import CAT, DOG, PAD, SeeingHarness, data_url, part, png, write_seeing_model

from dovetail.messages import Submit
from dovetail.messages.media import read_arrays
from dovetail.processing.image_parts import PlainPlaceholders, surrounded
from dovetail.text.chat.template import ChatTemplate
from dovetail_parsers.tools.hermes import HermesTools
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.media import decode
from dovetail_server.media import folder as media_folder
from dovetail_server.media.folder import KEPT, MediaFiles, MediaFolder
from dovetail_server.media.rules import MediaAnswer, MediaFetched, MediaQuestion
from dovetail_server.reading.media import MAX_WAITING_FETCHES, MediaExchange
from dovetail_server.reading.turns import Turns


@pytest.fixture(scope="module")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def seeing(seeing_folder: Path) -> Iterator[SeeingHarness]:
    harness = SeeingHarness(
        seeing_folder,
        tools=HermesTools(),
        limit_mm_per_prompt={"image": 3},
        allowed_media_domains=["*"],
        allowed_local_media_path=seeing_folder,
        context_len=4096,
        max_body_bytes=64 << 20,
    )
    yield harness
    harness.close()


@pytest.fixture
def server(seeing: SeeingHarness) -> SeeingHarness:
    seeing.reset()
    return seeing


def ask(server: Harness, *content: Any, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": list(content)}], **fields}
    return server.post("/v1/chat/completions", body)


def events(stream: str) -> list[Any]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def submitted(server: Harness) -> Submit:
    return server.engine.submits[-1]


def prompt_of(server: Harness) -> str:
    return server.tokenizer.decode(submitted(server).prompt_ids, skip_special_tokens=False)


def files_in(server: Harness) -> list[str]:
    assert server.state.media is not None
    names = {path.name for path in server.state.media.path.iterdir()} - {"lock"}
    return sorted(name for name in names if name != KEPT)


def test_an_image(server: SeeingHarness) -> None:
    """Its place holds as many tokens as its size says, its arrays lie in a file, which is gone behind the reply."""
    seen: list[dict[str, Any]] = []

    def watch(submit: Submit) -> list[int]:
        seen.extend({**read_arrays(span.file, span.arrays)} for span in submit.media)
        return server.tokenizer.encode("A cat", add_special_tokens=False)

    server.engine.script = watch
    reply = ask(server, text("What is"), part(detail="high"), text("this?"))
    assert reply.status_code == 200, reply.text
    [span] = submitted(server).media
    assert (span.grid, span.num, span.num_patches) == ((1, 1, 2), 2, 8)
    assert f"What is<|vision_start|>{PAD}{PAD}<|vision_end|>this?" in prompt_of(server)
    assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "image_tokens": 2}
    [arrays] = seen
    assert {array.dtype for array in arrays.values()} <= {np.dtype("uint8"), np.dtype("int32")}
    server.eventually(lambda: files_in(server) == [])


def test_an_image_of_too_many_patches(seeing_folder: Path) -> None:
    """Beyond `--max-image-patches` a request gets 400 with what is possible; an image of as many is served."""
    server = SeeingHarness(seeing_folder, context_len=4096, max_image_patches=32)
    try:
        server.engine.script = lambda submit: server.tokenizer.encode("A cat", add_special_tokens=False)
        assert ask(server, part(data_url(png(112, 56)))).status_code == 200
        refused = ask(server, text("What is"), part(data_url(png(140, 56))))
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[1]")
        assert "an image of 140 x 56 pixels has 40 patches for this model; possible: 32" in error["message"]
        assert "shrink it to" in error["message"]
    finally:
        server.close()


def test_an_image_larger_than_the_context(seeing_folder: Path) -> None:
    """An image that no prompt has room for is refused as one, before it is cut into patches, with a size that fits."""
    server = SeeingHarness(seeing_folder, context_len=64)
    try:
        server.engine.script = lambda submit: server.tokenizer.encode("A cat", add_special_tokens=False)
        error = ask(server, text("What is"), part(data_url(png(280, 280)))).json()["error"]
        assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[1]")
        said = (
            "an image of 280 x 280 pixels has 100 tokens for this model; possible: 64, its context length; shrink it to"
        )
        assert said in error["message"]
        assert ask(server, part()).status_code == 200
        assert ask(server, part(data_url(png(224, 224)))).json()["error"]["code"] == "context_length_exceeded"
    finally:
        server.close()


def test_the_server_says_whether_its_model_sees(server: SeeingHarness, harness: Harness) -> None:
    """How many images a request may have, or why none; llama.cpp's name for it says the same."""
    for each, most, why in ((server, 3, None), (harness, 0, "this model is served for text only")):
        info = each.get("/model_info").json()
        assert (info["max_images"], info["no_images"]) == (most, why)
        assert info["max_image_patches"] == 0  # the scripted engine has no tower
        assert each.get("/props").json()["modalities"]["vision"] is bool(most)
        assert each.state.facts().sees is bool(most)


def test_text_says_nothing_of_images(server: SeeingHarness) -> None:
    """A request without images costs none, and its usage has no word of them."""
    reply = ask(server, text("Hi"))
    assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert submitted(server).media == ()


def test_several(server: SeeingHarness) -> None:
    """In the order of the conversation; the same image is one digest and one file."""
    messages = [
        {"role": "user", "content": [part(CAT), text("and"), part(DOG)]},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": [part(CAT), text("again")]},
    ]
    reply = server.post("/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert reply.status_code == 200, reply.text
    cat, dog, again = submitted(server).media
    assert (cat.digest, cat.file) == (again.digest, again.file)
    assert cat.digest != dog.digest
    assert [span.num for span in (cat, dog, again)] == [2, 3, 2]
    ids = submitted(server).prompt_ids
    pad = server.tokenizer.added_tokens[PAD]
    assert all(ids[span.start : span.start + span.num] == [pad] * span.num for span in (cat, dog, again))


def test_what_open_webui_sends(server: SeeingHarness) -> None:
    """An image that was sent without a word, the reply to it, and the next turn; each turn sends all of them again."""
    first = {"role": "user", "content": [text(""), part(CAT)]}
    second = {"role": "user", "content": [text("And these?"), part(DOG), part(CAT)]}
    turns = [first, {"role": "assistant", "content": "A cat."}, second]
    title = [{"role": "user", "content": "### Task:\nGive a title.\nUSER: [image]"}]
    for messages, sizes in ((turns[:1], [2]), (turns, [2, 3, 2]), (title, [])):
        body = {"model": "tiny", "stream": True, "messages": messages, "stream_options": {"include_usage": True}}
        reply = server.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        assert reply.text.endswith("data: [DONE]\n\n")
        [usage] = [event["usage"] for event in events(reply.text) if event.get("usage")]
        assert usage["prompt_tokens_details"].get("image_tokens", 0) == sum(sizes)
        assert [span.num for span in submitted(server).media] == sizes
    server.eventually(lambda: files_in(server) == [])


def test_images_that_fill_the_context(server: SeeingHarness) -> None:
    """The error says what part of the prompt they are."""
    error = ask(server, part(data_url(png(280, 280))), part(CAT), text("a" * 4000)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].endswith("; 102 tokens of the prompt stand for its images")
    body = {"text": f"{PAD} {'a' * 4100}", "image_data": CAT}
    assert (
        server.post("/generate", body)
        .json()["error"]["message"]
        .endswith("; 2 tokens of the prompt stand for its images")
    )
    assert "images" not in ask(server, text("a" * 5000)).json()["error"]["message"]


def test_a_prompt_with_images_is_not_cut(server: SeeingHarness) -> None:
    """Part of an image is none: what cuts a text refuses such a prompt, and says what to do."""
    assert ask(server, text("a" * 40), truncate_prompt_tokens=9).status_code == 200
    error = ask(server, text("a" * 40), part(CAT), truncate_prompt_tokens=9).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    assert error["message"] == "a prompt with images is not cut; send less text or fewer images"
    assert ask(server, text("a"), part(CAT), truncate_prompt_tokens=-1).status_code == 200


def test_what_users_type_is_text(server: SeeingHarness) -> None:
    """A placeholder in a text is its characters, beside an image and without one."""
    said = f"a {PAD}{PAD} b"
    reply = ask(server, text(said), part(CAT), text(PAD))
    assert reply.status_code == 200, reply.text
    [span] = submitted(server).media
    pad = server.tokenizer.added_tokens[PAD]
    assert submitted(server).prompt_ids.count(pad) == span.num
    assert said in prompt_of(server)
    ask(server, text(said))
    assert pad not in submitted(server).prompt_ids
    assert said in prompt_of(server)


@pytest.mark.parametrize("texts", [("<|image", "_pad|>"), ("a<", "|image_", "pad|>b"), ("<|image_pad|", "", ">")])
def test_texts_that_make_a_placeholder_together(server: SeeingHarness, texts: tuple[str, ...]) -> None:
    """Parts that the template writes one behind the other are text, too, and nothing of them changes."""
    pad = server.tokenizer.added_tokens[PAD]
    for images in ([part(CAT)], []):
        reply = ask(server, *images, *map(text, texts))
        assert reply.status_code == 200, reply.text
        assert submitted(server).prompt_ids.count(pad) == sum(span.num for span in submitted(server).media)
        assert f"{''.join(texts)}<|im_end|>" in prompt_of(server)


def test_what_stands_beside_messages_is_text(server: SeeingHarness) -> None:
    """A placeholder in a tool, a document or a variable of the template is its characters, wherever it stands."""
    schema = {"type": "object", "properties": {PAD: {"description": PAD}}}
    tool = {"type": "function", "function": {"name": "f", "description": f"sees {PAD}", "parameters": schema}}
    fields = {"documents": [{PAD: f"of {PAD}"}], "chat_template_kwargs": {"note": PAD}}
    pad = server.tokenizer.added_tokens[PAD]
    for content in ([text("a"), part(CAT)], [text("a")]):
        reply = ask(server, *content, tools=[tool], **fields)
        assert reply.status_code == 200, reply.text
        assert submitted(server).prompt_ids.count(pad) == sum(span.num for span in submitted(server).media)
        said = prompt_of(server).partition("<|im_start|>")[0]
        for shown in (*fields["documents"], tool, fields["chat_template_kwargs"]["note"]):
            assert json.dumps(shown) in said


@pytest.mark.parametrize("printed", ["note | string", "note | tojson(ensure_ascii=True)", "[note]"])
def test_how_a_template_writes_a_text(seeing: SeeingHarness, printed: str) -> None:
    """A placeholder stays one, also where a template escapes what is not ASCII."""
    template = ChatTemplate({"default": "{{ " + printed + " }}"})
    plain = PlainPlaceholders(seeing.tools, seeing.tokenizer.added_tokens[PAD])
    [message] = plain.marked([{"role": "user", "content": PAD}])
    rendered = template.render([], template_kwargs={"note": message["content"]})
    assert PAD in plain.unmarked(rendered.text)


def test_texts_around_an_image(seeing: SeeingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tokenized with the text beside them; what a user typed has none, and a prompt of text has them, too."""
    tools, images = seeing.tools, seeing.tools.images
    assert images is not None
    monkeypatch.setattr(type(images), "around", ("[[", "]"))
    plain = PlainPlaceholders(tools, images.placeholder_id)
    written = f"a [{PAD}] b {PAD}"
    ids = plain.encode(written + plain.marked(f" c{PAD}d"), add_special_tokens=False, keeps=False)
    expected = f"a [[[{PAD}]] b [[{PAD}]"
    assert tools.tokenizer.decode(ids, skip_special_tokens=False) == f"{expected} c{PAD}d"
    assert ids.count(images.placeholder_id) == 2
    whole = tools.encode(f"{expected} c", "messages", add_special_tokens=False)
    assert ids[: len(whole)] == list(whole)
    assert surrounded(tools, written) == expected


def test_every_api(server: SeeingHarness) -> None:
    """Chat, responses and messages give the model the same prompt; tokens are counted with it."""
    source = {"type": "base64", "media_type": "image/jpeg", "data": CAT.partition(",")[2]}
    block = {"type": "image", "source": source}
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [text("a"), part(CAT)]}]},
        "/v1/responses": {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": CAT}],
                }
            ]
        },
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": [text("a"), block]}]},
    }
    prompts = set()
    for path, body in bodies.items():
        reply = server.post(path, {"model": "tiny", **body})
        assert reply.status_code == 200, reply.text
        prompts.add((prompt_of(server), submitted(server).media[0].digest))
    assert len(prompts) == 1
    num = len(submitted(server).prompt_ids)
    body = {"model": "tiny", "messages": bodies["/v1/messages"]["messages"]}
    assert server.post("/v1/messages/count_tokens", body).json() == {"input_tokens": num}
    assert (
        server.post("/v1/responses/input_tokens", {"model": "tiny", **bodies["/v1/responses"]}).json()["input_tokens"]
        == num
    )
    assert (
        server.post(
            "/tokenize", {"model": "tiny", **bodies["/v1/chat/completions"], "add_generation_prompt": True}
        ).json()["count"]
        == num
    )
    server.eventually(lambda: files_in(server) == [])


def test_generate(server: SeeingHarness) -> None:
    """Placeholders that the prompt has itself, with as many images; base64 needs no `data:`."""
    bare = CAT.partition(",")[2]
    for given in (CAT, [bare], {"url": CAT}):
        reply = server.post("/generate", {"text": f"see {PAD}!", "image_data": given})
        assert reply.status_code == 200, reply.text
        [span] = submitted(server).media
        assert (span.start, span.num) == (4, 2)
    reply = server.post("/generate", {"text": [f"{PAD}a", "b"], "image_data": [[DOG], None]})
    assert reply.status_code == 200, reply.text
    assert [len(submit.media) for submit in server.engine.submits[-2:]] == [1, 0]
    error = server.post("/generate", {"text": "no place", "image_data": CAT}).json()["error"]
    assert (error["param"], "0 image placeholders for 1 images" in error["message"]) == ("text", True)
    assert f"write {PAD} once for each image" in error["message"]
    error = server.post("/generate", {"text": PAD, "image_data": ["?"]}).json()["error"]
    assert error["param"] == "image_data[0]"
    error = server.post("/generate", {"text": ["a", "b"], "image_data": CAT}).json()["error"]
    assert error["param"] == "image_data"


def test_a_batch(server: SeeingHarness) -> None:
    """A line may have an image; one that cannot be had is that line's error."""
    bodies = [{"model": "tiny", "messages": [{"role": "user", "content": [part(url)]}]} for url in (CAT, "ftp://x")]
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for at, body in enumerate(bodies)
    ]
    files = {"file": ("lines.jsonl", "\n".join(lines).encode())}
    upload = server.http.post(f"{server.base}/v1/files", files=files, data={"purpose": "batch"}, timeout=60).json()
    fields = {"input_file_id": upload["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = server.post("/v1/batches", fields).json()
    server.eventually(lambda: server.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
    counts = server.get(f"/v1/batches/{batch['id']}").json()["request_counts"]
    assert counts == {"total": 2, "completed": 1, "failed": 1}
    server.eventually(lambda: files_in(server) == [])


def test_results_of_tools(server: SeeingHarness) -> None:
    """A screenshot is a result as a text is."""
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CAT.partition(",")[2]}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "shot", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [text("here"), block]}]},
    ]
    reply = server.post("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": messages})
    assert reply.status_code == 200, reply.text
    assert f"here<|vision_start|>{PAD}" in prompt_of(server)


def test_a_response_that_continues(server: SeeingHarness) -> None:
    """The image of a stored response is seen again."""
    item = {"role": "user", "content": [{"type": "input_image", "image_url": CAT}]}
    first = server.post("/v1/responses", {"model": "tiny", "input": [item]}).json()
    reply = server.post("/v1/responses", {"model": "tiny", "input": "more", "previous_response_id": first["id"]})
    assert reply.status_code == 200, reply.text
    assert len(submitted(server).media) == 1
    assert reply.json()["usage"]["input_tokens_details"]["image_tokens"] == 2
    items = server.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert items[0]["content"] == [{"type": "input_image", "image_url": CAT, "detail": "auto"}]


def test_uploaded_files(server: SeeingHarness) -> None:
    """By identifier, in each API that has a word for it."""
    upload = server.http.post(
        f"{server.base}/v1/files", files={"file": ("cat.png", png())}, data={"purpose": "vision"}, timeout=60
    )
    file_id = upload.json()["id"]
    item = {"role": "user", "content": [{"type": "input_image", "file_id": file_id}]}
    assert server.post("/v1/responses", {"model": "tiny", "input": [item]}).status_code == 200
    digest = submitted(server).media[0].digest
    block = {"type": "image", "source": {"type": "file", "file_id": file_id}}
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    assert server.post("/v1/messages", body).status_code == 200
    assert submitted(server).media[0].digest == digest
    item["content"][0]["file_id"] = "file-none"
    reply = server.post("/v1/responses", {"model": "tiny", "input": [item]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "image_file_not_found")
    assert reply.json()["error"]["param"] == "input[0].content[0]"


def test_local_files(server: SeeingHarness, seeing_folder: Path) -> None:
    """Below the directory that the operator allows."""
    (seeing_folder / "cat.png").write_bytes(png())
    assert ask(server, part(f"file://{seeing_folder}/cat.png")).status_code == 200
    reply = ask(server, part("file:///etc/hostname"))
    assert "--allowed-local-media-path" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "param", "why"),
    [
        ([text("a"), part("data:image/png;base64,aGk=")], "messages[0].content[1]", "no image that is known"),
        ([part("data:image/png;base64,?")], "messages[0].content[0]", "base64"),
        ([part("http://127.0.0.1/x.png")], "messages[0].content[0]", "not public"),
        ([part("http://localhost:8080/x.png")], "messages[0].content[0]", "port 8080"),
        ([part("ftp://example.org/x")], "messages[0].content[0]", "scheme"),
        ([part("file:///etc/passwd")], "messages[0].content[0]", "outside"),
        ([part(CAT)] * 4, "messages[0].content[3]", "4 images; possible: 3"),
        ([{"type": "image_url"}], "messages[0].content[0]", "needs a URL"),
        ([part("")], "messages[0].content[0]", "not an empty one"),
        ([part(CAT.partition(",")[2])], "messages[0].content[0]", "no scheme"),
        ([part(CAT, detail="huge")], "messages[0].content[0]", "detail"),
        ([part(data_url(png(2000, 2)))], "messages[0].content[0]", "messages[0].content[0]: an image of 2000 x 2"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "messages[0].content[0].type", "no video"),
        ([{"type": "input_audio", "input_audio": {}}], "messages[0].content[0].type", "no audio"),
    ],
)
def test_what_is_refused(server: SeeingHarness, content: list[Any], param: str, why: str) -> None:
    """A 400 that names the part, in one line; no file stays."""
    reply = ask(server, *content)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert why in error["message"]
    assert "\n" not in error["message"]
    server.eventually(lambda: files_in(server) == [])


def test_names_of_other_apis(server: SeeingHarness) -> None:
    """The part is named as the client wrote it."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    items = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, image]},
    ]
    assert (
        server.post("/v1/responses", {"model": "tiny", "input": items}).json()["error"]["param"]
        == "input[1].content[1]"
    )
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": [text("b"), block]}]
    reply = server.post("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": said})
    assert reply.json()["error"]["message"].startswith("messages[1].content[1]: the data is no image")


def test_a_large_image(server: SeeingHarness) -> None:
    """A body that goes to another process at once; many pixels become few."""
    noise = io.BytesIO()
    Image.effect_noise((700, 500), 80).convert("RGB").save(noise, "PNG")
    reply = ask(server, part(data_url(noise.getvalue())))
    assert reply.status_code == 200, reply.text
    assert submitted(server).media[0].num <= 100


def test_a_bomb(server: SeeingHarness) -> None:
    """Pixels beyond the limit are refused, and what fits the limit fits the process's memory."""
    file = io.BytesIO()
    Image.new("RGBA", (8192, 8192), (1, 2, 3, 4)).save(file, "PNG", compress_level=1)
    assert ask(server, part(data_url(file.getvalue()))).status_code == 200
    file = io.BytesIO()
    Image.new("1", (16384, 8192)).save(file, "PNG")
    error = ask(server, part(data_url(file.getvalue()))).json()["error"]
    assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[0]")


def test_a_client_that_leaves(server: SeeingHarness) -> None:
    """No file stays of what nobody waits for."""
    server.engine.delay_s = 5.0
    with pytest.raises(Exception, match="timed out"):
        server.http.post(
            f"{server.base}/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": [part(CAT)]}]},
            timeout=1.0,
        )
    server.eventually(lambda: files_in(server) == [])


def test_without_processes(make_harness: Callable[..., Harness], seeing_folder: Path) -> None:
    """Nothing decodes in the server's own process: images are then refused, with the flag."""
    harness = SeeingHarness(seeing_folder, body_processes=0)
    try:
        reply = ask(harness, part(CAT))
        assert reply.status_code == 400
        assert "--body-processes" in reply.json()["error"]["message"]
    finally:
        harness.close()


def test_without_pillow(seeing_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Start and request say what to install; texts are served, also those that other processes read."""
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    check_without_pillow(SeeingHarness(seeing_folder, context_len=1 << 20))
    assert "The model sees images" in caplog.text
    assert "dovetail-llm[vision]" in caplog.text


def test_a_pillow_that_cannot_be_imported(
    seeing_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Installed is not importable: the processes that read bodies start all the same."""
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").write_text("raise ImportError('libjpeg is gone')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_without_pillow(SeeingHarness(seeing_folder, context_len=1 << 20))
    assert "requests with images are refused" in capfd.readouterr().err


def check_without_pillow(harness: SeeingHarness) -> None:
    try:
        assert ask(harness, text("word " * 100_000)).status_code == 200
        reply = ask(harness, part(CAT))
        assert reply.status_code == 400, reply.text
        assert "pip install 'dovetail-llm[vision]'" in reply.json()["error"]["message"]
    finally:
        harness.close()


def test_a_model_that_reads_text_only(make_harness: Callable[..., Harness]) -> None:
    """The reason is the model."""
    error = ask(make_harness(), part(CAT)).json()["error"]
    assert (error["param"], "this model is served for text only" in error["message"]) == (
        "messages[0].content[0].type",
        True,
    )


@pytest.mark.parametrize(
    ("flag", "value", "shown"),
    [
        ("processor", None, "--processor none"),
        ("limit_mm_per_prompt", {"image": 0}, '--limit-mm-per-prompt {"image": 0}'),
    ],
)
def test_a_server_that_was_told_not_to_see(
    flag: str, value: Any, shown: str, make_harness: Callable[..., Harness]
) -> None:
    """The reason is the flag, which whoever started the server may leave out. Nothing is planned for images."""
    server = make_harness(**{flag: value})
    assert server.settings.processor is None
    why = f"this server was started with {shown}"
    assert f"{why}; send text" in ask(server, part(CAT)).json()["error"]["message"]
    assert server.get("/model_info").json()["no_images"] == why


def test_a_folder_of_a_killed_server_is_removed(tmp_path: Path) -> None:
    """The next one does it; a living server's stays."""
    living, other = MediaFolder(tmp_path), tmp_path / "dovetail-media-old"
    other.mkdir()
    (other / "lock").touch()
    (other / "1-0").write_bytes(b"x")
    third = MediaFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, third.path])
    assert living.path.stat().st_mode & 0o777 == 0o700
    living.close()
    third.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("least", "writable", "is_memory"), [(0, True, True), (1 << 62, True, False), (0, False, False)]
)
def test_arrays_lie_in_memory_where_they_may(
    least: int, writable: bool, is_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory file system that is small, or may not be written, is left to others."""
    memory, other = tmp_path / "memory", tmp_path / "other"
    memory.mkdir()
    other.mkdir()
    monkeypatch.setattr(media_folder, "MEMORY", memory)
    monkeypatch.setattr(media_folder, "MIN_BYTES", least + 1)
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    monkeypatch.setattr(os, "access", lambda path, mode: writable)  # whoever is root may write everywhere
    folder = MediaFolder()
    assert folder.path.parent == (memory if is_memory else other)
    folder.close()


def test_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    """A request's files stay for as long as it does; what is left behind goes later."""
    folder = MediaFolder(tmp_path)
    held, left = folder.path / "1-0", folder.path / "1-1"
    held.touch()
    left.touch()
    files = MediaFiles([str(held)])
    folder.sweep()
    assert left.exists()
    folder.sweep(age_s=-1)
    assert (held.exists(), left.exists()) == (True, False)
    files.close()
    assert not held.exists()
    folder.close()


def test_fetching_takes_no_turn() -> None:
    """While images are fetched others compute; so many fetch, and beyond those of an owner that wait it is a 429."""

    async def run() -> None:
        turns, fetches = Turns(1), Turns(1)
        question = MediaQuestion(files=[], fetches=True)
        async with turns.turn("a", is_background=False) as turn:
            exchange = MediaExchange(fetches, turn, None)
            assert await exchange.answer(question) == MediaAnswer([])
            async with turns.turn("b", is_background=False) as other:
                second = MediaExchange(fetches, other, None)
                waits = asyncio.create_task(second.answer(question))
                await asyncio.sleep(0)
                assert not waits.done()
                assert await exchange.answer(MediaFetched()) == MediaAnswer([])
                await waits
                second.close()
            exchange.close()
        async with turns.turn("c", is_background=False) as turn:
            crowd = [asyncio.create_task(fetches.turn("c", is_background=False).__aenter__()) for _ in range(100)]
            await asyncio.sleep(0)
            with pytest.raises(ServiceError, match="try again later") as found:
                await MediaExchange(fetches, turn, None).answer(question)
            assert found.value.status == 429
            assert fetches.has_room("d", MAX_WAITING_FETCHES)  # another's may wait all the same
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(run())
