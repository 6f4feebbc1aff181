"""What becomes of images and texts in a prompt: places, placeholders that users type, and too little room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from seeing_server import (
    CAT,
    PAD,
    SeeingHarness,
    ask,
    data_url,
    part,
    png,
    prompt_of,
    submitted,
    text,
)

from dovetail.processing.image_parts import PlainPlaceholders, surrounded
from dovetail.text.chat.template import ChatTemplate


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
