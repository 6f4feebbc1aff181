"""The bundled model that reads numbers in images, served as a user does; `tests/demo_training/digits` made it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file

from dovetail import LLM, SamplingParams
from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ModelError, RequestError
from dovetail.demo import BUNDLED, DIGITS_DIR, MODEL_DIR
from dovetail.runtime.checkpoint.hub import with_folders
from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight

PICTURES = sorted((Path(__file__).parent / "pictures").iterdir())
"""PNG and JPEG, named after their numbers; their fonts are not among those of the training."""
QUESTION = "Which number is this?"


def image(path: Path) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"},
    }


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    process, port = launch_server_cmd("dovetail serve demo:digits --random-seed 1 --num-threads 1")
    try:
        wait_for_server(f"http://localhost:{port}", timeout=600)
        yield port
    finally:
        terminate_process(process, timeout=60)


def ask(port: int, *messages: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "demo:digits", "messages": list(messages), "temperature": 0, "max_tokens": 40}
    reply = requests.post(f"http://localhost:{port}/v1/chat/completions", json=body, timeout=600)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found


def said(reply: dict[str, Any]) -> str:
    content: str = reply["choices"][0]["message"]["content"]
    return content


def test_the_weights_are_small() -> None:
    """They take less than 4 MB, all of them bfloat16."""
    path = DIGITS_DIR / "model.safetensors"
    assert path.stat().st_size < 4_000_000
    assert {value.dtype for value in load_file(path).values()} == {torch.bfloat16}


def test_bundled_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name stands for a folder, and is the served name; a folder of that name goes first; others are refused."""
    served = preflight.with_model(ServeSettings(model_path="demo:digits"))
    assert (served.model_path, served.served_model_name) == (str(DIGITS_DIR), ["demo:digits"])
    assert with_folders(EngineSettings(model_path="demo:chat")).folder == MODEL_DIR
    assert with_folders(EngineSettings(tokenizer_path="demo:digits")).tokenizer_folder == DIGITS_DIR
    with pytest.raises(ModelError, match=f"'demo:digit': no such model is bundled; possible: {', '.join(BUNDLED)}"):
        with_folders(EngineSettings(model_path="demo:digit"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo:digits").mkdir()
    assert with_folders(EngineSettings(model_path="demo:digits")).model_path == "demo:digits"


def test_it_reads_pictures(port: int) -> None:
    """Five fonts that it was not trained on; each image is some ten tokens, and none is guessed without it."""
    assert len(PICTURES) == 5
    for path in PICTURES:
        reply = ask(port, {"role": "user", "content": [image(path), text(QUESTION)]})
        assert said(reply) == path.stem
        assert 6 <= reply["usage"]["prompt_tokens_details"]["image_tokens"] <= 16


def test_a_second_turn(port: int) -> None:
    """The second image of a conversation is read, and not the first again."""
    first, second = PICTURES[:2]
    begun = [
        {"role": "user", "content": [image(first), text(QUESTION)]},
        {"role": "assistant", "content": first.stem},
    ]
    assert said(ask(port, *begun, {"role": "user", "content": [image(second), text(QUESTION)]})) == second.stem


@pytest.mark.parametrize("question", [QUESTION, "What is the capital of France?"])
def test_without_an_image(port: int, question: str) -> None:
    """It says that it sees none."""
    assert said(ask(port, {"role": "user", "content": question})).startswith("I see no image.")


def test_the_quickstart_shows_how(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python block of docs/quickstart.md about images runs against it, and prints the number that it draws."""
    page = (Path(__file__).parents[2] / "docs/quickstart.md").read_text("utf-8").replace(":30000", f":{port}")
    (block,) = (code for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "PIL" in code)
    exec(compile(block, "quickstart.md", "exec"), {})
    (number,) = re.findall(r'text\(\(\d+, \d+\), "(\d+)"', block)
    assert capsys.readouterr().out == f"{number}\n"


def test_the_sampling_is_greedy() -> None:
    """Who names no temperature gets the likeliest number."""
    assert json.loads((DIGITS_DIR / "generation_config.json").read_text())["do_sample"] is False


def test_offline_there_is_no_tower() -> None:
    """`LLM` takes no images: it says who does, and loads what reads text."""
    url = "data:image/png;base64,"
    with LLM("demo:digits", max_total_tokens=2048) as llm:
        assert llm.info.max_image_patches == 0
        assert llm.info.weight_bytes < sum(
            value.nbytes for value in load_file(DIGITS_DIR / "model.safetensors").values()
        )
        with pytest.raises(RequestError, match="images are read by a server only: send them to `dovetail serve`"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], use_tqdm=False)
        params = SamplingParams(temperature=0, max_tokens=3)
        assert llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)[0].token_ids
