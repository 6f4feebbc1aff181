"""Images of a model whose tokenizer alone says which tokens stand between the rows of an image, through a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from seeing_server import TEMPLATE, SeeingHarness, data_url, part, png
from server_tiny import write_model

TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


class RowsHarness(SeeingHarness):
    """A server with Pixtral's image processor."""

    target = "dovetail_models.pixtral_images:PixtralImages"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowsHarness]:
    folder: Path = write_model(tmp_path_factory.mktemp("rows"), more=TOKENS)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mistral3", "image_token_index": 256 + 2 + 4, "spatial_merge_size": 2}
    config["vision_config"] = {"model_type": "pixtral", "patch_size": 14}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 280}}))
    (folder / "chat_template.jinja").write_text(
        TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]")
    )
    harness = RowsHarness(folder, context_len=4096)
    yield harness
    harness.close()


def test_rows_have_breaks(server: RowsHarness) -> None:
    """Each row ends with a break, the last one with the end; usage counts embeddings; a typed token is text."""
    content = [{"type": "text", "text": "a[IMG]b"}, part(data_url(png(70, 40))), {"type": "text", "text": "c"}]
    reply = server.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": content}]})
    assert reply.status_code == 200, reply.text
    submit = server.engine.submits[-1]
    row = "[IMG]" * 3
    prompt = server.tokenizer.decode(submit.prompt_ids, skip_special_tokens=False)
    assert f"a[IMG]b{row}[IMG_BREAK]{row}[IMG_END]c" in prompt
    assert [(span.num, span.first, span.grid) for span in submit.media] == [(3, 0, (1, 2, 3)), (3, 3, (1, 2, 3))]
    assert reply.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 6
