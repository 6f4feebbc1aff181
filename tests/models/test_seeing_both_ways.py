"""Images that see both ways: steps do not cut them, prefix hits may end within one, and backends must serve them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import seeing
import transformers
from image_references import gemma4_count
from seeing import ODD, Prompts, picture, reference
from test_seeing import TEXTS, parts_of, run

from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.engine.request import StepPlan
from dovetail.messages import Submit
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_models.gemma3_images import Gemma3Images
from dovetail_models.gemma3_vl import Gemma3_VL
from dovetail_models.gemma4_images import Gemma4Images
from dovetail_models.gemma4_vl import Gemma4_VL
from dovetail_testing.engine import make_core, serve, tokens

NUM = 16
"""Tokens of an image."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gemma3")
    return folder, seeing.make_vl(folder, "gemma3")


def wanted_of(theirs: Any, each: Sequence[Any], submits: Sequence[Submit]) -> list[list[int]]:
    return [reference(theirs, parts, submit) for parts, submit in zip(each, submits, strict=True)]


@pytest.mark.parametrize("chunk", [5, 23, 40])
def test_no_step_cuts_an_image(
    chunk: int, model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end between images; one that is more than a step may have is computed by a step of its own."""
    folder, theirs = model
    core, prompts = make_core(folder, page_size=4, chunked_prefill_size=chunk), Prompts(folder, tmp_path / "files")
    each = [parts_of(4), [TEXTS[0]], parts_of(3), [[*TEXTS[3]] * 4]]
    submits = [prompts.submit(parts) for parts in each]
    plans: list[StepPlan] = []
    schedule = core.scheduler.schedule

    def noted() -> StepPlan:
        plans.append(schedule())
        return plans[-1]

    monkeypatch.setattr(core.scheduler, "schedule", noted)
    assert [tokens(deltas) for deltas in run(core, submits)] == wanted_of(theirs, each, submits)
    num_longer = 0
    for plan in plans:
        if sum(one.num_new for one in plan.chunks) > chunk:
            assert [one.num_new for one in plan.chunks] == [NUM]
            num_longer += 1
        for one in plan.chunks:
            end, media = one.start + one.num_new, one.request.media
            assert not any(span.start < end < span.start + span.num for span in (media.spans if media else ()))
    assert num_longer == (7 if chunk < NUM else 0)


def test_a_hit_may_end_within_an_image(model: tuple[Path, Any], tmp_path: Path) -> None:
    """What is left of the image is computed with the cached tokens of it; its keys are right in every layer."""
    folder, theirs = model
    core, prompts = make_core(folder, page_size=4), Prompts(folder, tmp_path / "files")
    each = [[TEXTS[0], picture(57, 91)]] * 2 + [[TEXTS[0], picture(57, 91), TEXTS[3]]]
    submits = [prompts.submit(parts, num=8) for parts in each]
    [span] = submits[0].media
    found = [run(core, [submit])[0] for submit in submits]
    assert [tokens(deltas) for deltas in found] == wanted_of(theirs, each, submits)
    hits = [deltas[0].cached_tokens for deltas in found]
    assert hits[0] == 0
    assert span.start < (hits[1] or 0) < span.start + span.num


def test_a_chunk_without_room_ends_before_an_image(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a group of the cache has pages for a part of an image, the image waits for the next step."""
    folder, theirs = model
    core, prompts = make_core(folder, page_size=4), Prompts(folder, tmp_path / "files")
    fitting, given, most = core.pages.num_fitting, [], iter([9, 30, 9])
    monkeypatch.setattr(core.pages, "num_fitting", lambda request, num: min(fitting(request, num), next(most, num)))
    provide = core.pages.provide
    monkeypatch.setattr(core.pages, "provide", lambda request, num: (given.append(num), provide(request, num))[1])
    parts = [TEXTS[0], picture(*ODD[1]), TEXTS[1]]
    submit = prompts.submit(parts)
    [span] = submit.media
    assert [tokens(deltas) for deltas in run(core, [submit])] == wanted_of(theirs, [parts], [submit])
    assert given == [span.start, len(submit.prompt_ids) - span.start]


def test_a_backend_that_cannot_is_refused(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at the start, by name and by `auto`; the text part alone needs nothing special."""
    folder, _ = model
    monkeypatch.setattr(TorchNativeBackend, "caps", replace(TorchNativeBackend.caps, spans=False))
    why = "Gemma3ForConditionalGeneration needs attention in both directions within images, which it does not provide"
    for name in ("torch_native", "auto"):
        with pytest.raises(ConfigError, match=why):
            make_core(folder, attention_backend=name)
    core = make_core(folder, processor=None)
    assert not any(spec.spans for spec in core.executor.runner.config.layers)  # type: ignore[attr-defined]


def test_batch_invariant_attention_sees_both_ways(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where attention has the same bits whatever a step has."""
    folder, theirs = model
    monkeypatch.setattr(TorchNativeBackend, "batch_invariant", True)
    prompts = Prompts(folder, tmp_path / "files")
    each = [parts_of(2), parts_of(3)]
    submits = [prompts.submit(parts) for parts in each]
    found = serve(folder, submits, chunked_prefill_size=20, page_size=4)
    assert [tokens(deltas) for deltas in found] == wanted_of(theirs, each, submits)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a short window": ({"text_config": {"sliding_window": 15}}, "sliding_window is less than mm_tokens_per_image, 16"),
    "no square": ({"mm_tokens_per_image": 17}, "mm_tokens_per_image 17 of images of 56 pixels and patches of 7"),
    "no divisor": ({"mm_tokens_per_image": 9}, "give a square number whose root divides the patches of a row"),
    "uneven patches": ({"vision_config": {"patch_size": 9}}, "of images of 56 pixels and patches of 9"),
    "uneven heads": ({"vision_config": {"num_attention_heads": 3}}, "hidden_size 32 is no multiple of"),
    "grey": ({"vision_config": {"num_channels": 1}}, "num_channels 1: possible: 3"),
    "no number": ({"vision_config": {"num_hidden_layers": 0}}, "num_hidden_layers 0 of a model that sees"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_configuration_cannot_be(what: str, model: tuple[Path, Any]) -> None:
    """The key is named, and what is possible."""
    config = json.loads((model[0] / "config.json").read_text())
    changes, why = WRONG[what]
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ModelError, match=why):
        Gemma3_VL.config_from_hf(config)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan True is not supported; possible: False"),
        ({"size": {"height": 224, "width": 56}}, "the tower reads 56 x 56 pixels"),
        ({"image_seq_length": 256}, "image_seq_length 256: config.json has mm_tokens_per_image 16"),
        ({"resample": 3}, "resample 3 is not supported; possible: 2"),
    ],
)
def test_what_a_preprocessor_cannot_be(given: dict[str, Any], why: str, model: tuple[Path, Any]) -> None:
    """Likewise."""
    config = json.loads((model[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=why):
        Gemma3Images.from_config(config, given)


WRONG_4: dict[str, tuple[dict[str, Any], str]] = {
    "uneven heads": ({"vision_config": {"head_dim": 18}}, "head_dim 18 must be a multiple of 4"),
    "biases": ({"vision_config": {"attention_bias": True}}, "attention_bias True is not supported"),
    "another rope": (
        {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}},
        "rope_type 'yarn' is not supported",
    ),
    "no activation": ({"vision_config": {"hidden_activation": "x"}}, "hidden_activation 'x': possible: "),
    "padding": ({"text_config": {"pad_token_id": 131}}, "pad_token_id 131: possible: 0 to 130"),
}


@pytest.mark.full
@pytest.mark.parametrize("both_ways", [None, "vision"])
def test_gemma_4_is_as_its_configuration_says(both_ways: str | None, tmp_path: Path) -> None:
    """Its windows see both ways, or no layer does; chunks cut images then; what cannot be is named."""
    theirs = seeing.make_vl(tmp_path, "gemma4", use_bidirectional_attention=both_ways)
    prompts, parts = Prompts(tmp_path, tmp_path / "files"), parts_of(3)
    submit = prompts.submit(parts)
    [found] = serve(tmp_path, [submit], chunked_prefill_size=9, page_size=4)
    assert tokens(found) == reference(theirs, parts, submit)
    info = make_core(tmp_path).executor.info
    assert info.cuts_images == (both_ways is None)
    text = (tmp_path / "config.json").read_text()
    layers = Gemma4_VL.config_from_hf(json.loads(text)).layers
    assert [spec.spans for spec in layers] == [both_ways is not None and bool(spec.sliding_window) for spec in layers]
    for changes, why in WRONG_4.values():
        config = json.loads(text)
        for key, value in changes.items():
            config[key] = {**config[key], **value}
        with pytest.raises(ModelError, match=why):
            Gemma4_VL.config_from_hf(config)
    with pytest.raises(ModelError, match=r"max_soft_tokens 71: possible: \(70, 140"):
        Gemma4Images.from_config(json.loads(text), {"patch_size": 4, "max_soft_tokens": 71})
    if both_ways:
        with pytest.raises(ModelError, match="images see both ways within a sliding_window of 80"):
            Gemma4Images.from_config(json.loads(text), {"patch_size": 4, "max_soft_tokens": 140})


def test_what_stands_for_an_image_of_gemma_4_unless_it_is_said() -> None:
    """Transformers' tokens, and as many of them; an image that is a line has all in one row or column."""
    config, own = transformers.Gemma4Config(), Gemma4Images.from_config({}, {})
    ids = own.layout(768, 768).ids
    assert (ids[0], ids[-1]) == (config.boi_token_id, config.eoi_token_id)
    assert set(ids[1:-1]) == {config.image_token_id}
    for size in ((768, 768), (3, 30_000), (30_000, 3), (2, 500), (500, 2)):
        assert own.layout(*size).num_embeds == gemma4_count(None, *size)


def test_a_small_cache_has_room_for_an_image(model: tuple[Path, Any], tmp_path: Path) -> None:
    """With steps of few tokens, windows of one running request leave pages for a whole image."""
    folder, theirs = model
    small = {"max_running_requests": 1, "chunked_prefill_size": 5, "max_total_tokens": 160, "page_size": 4}
    prompts, parts = Prompts(folder, tmp_path / "files"), parts_of(4)
    submit = prompts.submit(parts)
    assert [tokens(deltas) for deltas in serve(folder, [submit], **small)] == wanted_of(theirs, [parts], [submit])
    seen, step = 7, NUM // 4 + 1
    assert make_core(folder, **small).executor.info.num_pages == (40, seen + 2 * step)
