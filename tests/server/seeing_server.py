"""A real HTTP server whose model sees: its processes load images, and a scripted engine gets what they made."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Harness
from PIL import Image
from server_tiny import write_model

from dovetail.messages import Submit
from dovetail.plugins import PluginPlan, Registry, load
from dovetail.plugins.plan import as_planned
from dovetail.processing.images import make_image_processor
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail_parsers.tools.hermes import HermesTools
from dovetail_server.media.folder import KEPT

PAD = "<|image_pad|>"
TEMPLATE = """\
{%- for shown in (tools or []) + (documents or []) + [note] if shown %}{{ shown | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TARGET = "dovetail_models.qwen2_vl_images:Qwen2VLImages"


def png(width: int = 56, height: int = 28, colour: Any = (200, 30, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


CAT, DOG = data_url(png()), data_url(png(28, 84, (0, 90, 200)))


def part(url: str = CAT, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def write_seeing_model(path: Path) -> Path:
    """Write a model folder without weights whose image processor is that of Qwen2.5-VL, at small sizes."""
    more = ["<|vision_start|>", "<|vision_end|>", PAD]
    folder = write_model(path, more=more)
    ids = {token: 256 + 2 + 4 + at for at, token in enumerate(more)}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2_5_vl", "image_token_id": ids[PAD]}
    config["vision_config"] = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"min_pixels": 784, "max_pixels": 100 * 784, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class SeeingHarness(Harness):
    """A server whose model sees: a plan with an image processor, for its processes, too."""

    target = TARGET

    def make_ready(self) -> None:
        [record] = [record for record in Registry.scan().records if record.target == self.target]
        setup = self.tools._setup
        assert setup is not None
        plan = PluginPlan(plugins=(*setup.plan.plugins, as_planned(record)))
        model = ModelFolder(Path(self.settings.model_path))
        self.tools.images = make_image_processor(load(plan, "api"), model, self.tools.tokenizer.added_tokens)
        self.tools._setup = type(setup)(folder=setup.folder, model=setup.model, plan=plan)
        super().make_ready()


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
    """The file's server that sees, over a fresh engine; files with other servers have a fixture of this name."""
    seeing.reset()
    return seeing


def ask(server: Harness, *content: Any, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": list(content)}], **fields}
    return server.post("/v1/chat/completions", body)


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
