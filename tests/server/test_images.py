"""Images through a real server: its processes load them, and its engine gets arrays in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeing_server import (
    CAT,
    DOG,
    PAD,
    SeeingHarness,
    ask,
    data_url,
    files_in,
    part,
    png,
    prompt_of,
    submitted,
    text,
)

from dovetail.messages import Submit
from dovetail.messages.media import read_arrays


def events(stream: str) -> list[Any]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


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
    for none in ([], [None]):
        reply = server.post("/generate", {"text": "no place", "image_data": none})
        assert (reply.status_code, submitted(server).media) == (200, ()), reply.text
    reply = server.post("/generate", {"text": [f"{PAD}a", "b"], "image_data": [[None, DOG], []]})
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


@pytest.mark.parametrize("fields", [{}, {"truncation": "auto"}], ids=["whole", "shortened"])
def test_an_image_of_an_earlier_turn_that_is_gone(server: SeeingHarness, fields: dict[str, str]) -> None:
    """The error names a field that the request has: messages are the chat API's."""
    for image in ({"file_id": "file-none"}, {"image_url": "data:image/png;base64,aGk="}):
        item = {"type": "message", "role": "user", "content": [{"type": "input_image", **image}]}
        conversation = server.post("/v1/conversations", {"items": [item]}).json()["id"]
        body = {"model": "tiny", "conversation": conversation, "input": "more", **fields}
        error = server.post("/v1/responses", body).json()["error"]
        assert (error["param"], error["message"].partition(": ")[0]) == ("input", "input"), error


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
