"""Models that see: their tokens are transformers', in chunks, beside text, after a hit and on two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import seeing
from families import make_checkpoint
from seeing import ODD, Prompts, picture, reference

from dovetail.contracts.errors import ConfigError
from dovetail.engine.core import EngineCore
from dovetail.messages import Submit, TokenDelta
from dovetail_testing.engine import make_core, serve, tokens

TEXTS = [[3, 9, 14, 60], [77, 5, 6], [81], [10, 11, 12, 13, 14], [44, 45]]


KINDS = [
    *("qwen2_5_vl", "qwen3_vl"),
    *(
        pytest.param(kind, marks=pytest.mark.full)
        for kind in ("gemma4", "llama4", "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm4v_moe")
    ),
    *("gemma3", "internvl", "mistral3", pytest.param("llava", marks=pytest.mark.full)),
]

ROOM = {"gemma3": 180, "gemma4": 220, "llama4": 160}
"""Tokens of a cache that is too small for four requests, where not 144."""


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, seeing.make_vl(folder, request.param)


def parts_of(num: int) -> list[Any]:
    """1 to 4 images between texts; the first one begins a prompt, the last one may end it."""
    found: list[Any] = []
    for i in range(num):
        found += [picture(*ODD[i], seed=i), TEXTS[i + 1]]
    return [TEXTS[0], *found] if num % 2 else found


def test_tokens_are_transformers(model: tuple[Path, Any], tmp_path: Path) -> None:
    """1 to 4 images of odd sizes between texts, and text alone, all at once and in chunks of 7 tokens."""
    folder, theirs = model
    prompts = Prompts(folder, tmp_path / "files")
    each = [parts_of(num) for num in range(5)]
    submits = [prompts.submit(parts or [TEXTS[0]], rid=str(i)) for i, parts in enumerate(each)]
    wanted = [reference(theirs, parts, submit) for parts, submit in zip(each, submits, strict=True)]
    for chunk in (None, 7):
        found = serve(folder, submits, chunked_prefill_size=chunk, page_size=4)
        assert [tokens(deltas) for deltas in found] == wanted


def test_the_tower_is_transformers(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Embeddings of images of odd sizes, with pixels normalized on the device, differ by rounding alone."""
    import torch

    folder, theirs = model
    core, prompts = make_core(folder), Prompts(folder, tmp_path / "files")
    encode = core.executor.runner.model.encode  # type: ignore[attr-defined]
    longest = 280 if theirs.config.model_type in seeing.PREPROCESSOR else 5600
    for size in (*ODD, (300, 29), (28, longest)):
        image = picture(*size)
        arrays = {name: torch.from_numpy(array) for name, array in prompts.processor.process(image).items()}
        wanted = seeing.seen(theirs, image)
        assert (encode(arrays) - wanted).abs().max() < 2e-5 * wanted.abs().max()


def run(core: EngineCore, submits: Sequence[Submit]) -> list[list[TokenDelta]]:
    """Serve requests by an engine without a loop."""
    found: dict[int, list[TokenDelta]] = {}
    for handle, submit in enumerate(submits, core.step_count + 1000):
        found[handle] = []
        core.handle(msgspec.structs.replace(submit, handle=handle))
    while core.has_work:
        for delta in core.step().deltas:
            found[delta.handle].append(delta)
    return list(found.values())


def num_encoded(core: EngineCore) -> int:
    assert core.scheduler.tower is not None
    return core.scheduler.tower.num_encoded


def test_a_second_turn_runs_no_tower(model: tuple[Path, Any], tmp_path: Path) -> None:
    """All full pages of the first turn are found, its images too, also where their files are gone; tokens are right."""
    folder, theirs = model
    core, prompts = make_core(folder, page_size=4), Prompts(folder, tmp_path / "files")
    first = prompts.submit(parts_of(3))
    [said] = run(core, [first])
    assert num_encoded(core) == 3
    ids = [*first.prompt_ids, *tokens(said), 5, 6, 7]
    second = msgspec.structs.replace(first, prompt_ids=ids)
    for file in {span.file for span in first.media}:
        Path(file).unlink()
    [again] = run(core, [second])
    assert num_encoded(core) == 3
    known = len(first.prompt_ids) + len(tokens(said))
    if not core.pages.states.groups:  # states are copied every 64 tokens only
        assert known - 4 <= (again[0].cached_tokens or 0) <= known
    assert tokens(again) == reference(theirs, parts_of(3), second)


def test_equal_sizes_are_not_equal_images(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Images of one size share the pages of the text before them, and no more; equal images share all."""
    folder, theirs = model
    core, prompts = make_core(folder, page_size=4), Prompts(folder, tmp_path / "files")
    long = list(range(3, 17))
    parts = [[long, picture(91, 57, seed=seed), TEXTS[1]] for seed in (1, 2, 1)]
    submits = [prompts.submit(part) for part in parts]
    found = [run(core, [submit])[0] for submit in submits]
    assert [tokens(deltas) for deltas in found] == [
        reference(theirs, p, s) for p, s in zip(parts, submits, strict=True)
    ]
    assert tokens(found[0]) != tokens(found[1])
    if not core.pages.states.groups:
        assert [deltas[0].cached_tokens for deltas in found[:2]] == [0, 12]
        assert found[2][0].cached_tokens == (len(submits[2].prompt_ids) - 1) // 4 * 4
    assert num_encoded(core) == 2


def test_output_of_the_tower_is_kept_without_pages(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Where nothing of a prompt is cached, the second request about an image still runs no tower."""
    folder, theirs = model
    core, prompts = make_core(folder, disable_radix_cache=True), Prompts(folder, tmp_path / "files")
    parts = [picture(91, 57), TEXTS[1]]
    submit = prompts.submit(parts)
    found = run(core, [submit, submit]) + run(core, [submit])
    assert [tokens(deltas) for deltas in found] == [reference(theirs, parts, submit)] * 3
    assert num_encoded(core) == 1


def test_a_salt_shares_no_output_of_the_tower(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Nobody learns from the time to a first token that a request with another salt had the same image."""
    folder, theirs = model
    core, prompts = make_core(folder), Prompts(folder, tmp_path / "files")
    parts = [picture(91, 57), TEXTS[1]]
    submits = [prompts.submit(parts, cache_salt=salt) for salt in ("", "a", "b", "a")]
    found = [run(core, [submit])[0] for submit in submits]
    assert [tokens(deltas) for deltas in found] == [reference(theirs, parts, submits[0])] * 4
    assert num_encoded(core) == 3


def test_retracted_and_beside_drafts(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Requests that gave way come back with their images and positions; drafts change nothing."""
    folder, theirs = model
    prompts = Prompts(folder, tmp_path / "files")
    each = [[TEXTS[i % 5], picture(57 + i, 91, seed=i), [3, 4, 3, 4, 3]] for i in range(4)]
    submits = [prompts.submit(parts, num=40) for parts in each]
    wanted = [reference(theirs, parts, submit, 40) for parts, submit in zip(each, submits, strict=True)]
    room = next((num for kind, num in ROOM.items() if kind in folder.name), 144)
    found = serve(folder, submits, max_total_tokens=room, page_size=4, max_running_requests=4)
    assert [tokens(deltas) for deltas in found] == wanted
    assert sum(deltas[-1].num_retractions for deltas in found) > 0
    if "qwen3_5" in folder.name:
        return  # no drafts with recurrent layers
    found = serve(folder, submits, speculator="ngram", page_size=4)
    assert [tokens(deltas) for deltas in found] == wanted


def test_two_ranks(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Each rank maps the arrays and encodes the whole image; tokens are those of one rank."""
    folder, theirs = model
    prompts = Prompts(folder, tmp_path / "files")
    each = [parts_of(2), [TEXTS[0]], parts_of(1)]
    submits = [prompts.submit(parts) for parts in each]
    wanted = [reference(theirs, parts, submit) for parts, submit in zip(each, submits, strict=True)]
    found = serve(folder, submits, tensor_parallel_size=2, chunked_prefill_size=16, page_size=4)
    assert [tokens(deltas) for deltas in found] == wanted


def test_a_step_encodes_a_budget(model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step encodes few images, a larger one alone, and text beside it goes on; little is kept where little may be."""
    folder, theirs = model
    monkeypatch.setattr("dovetail.engine.media.MAX_STEP_PATCHES", 40)
    monkeypatch.setattr("dovetail.engine.media.MIN_IMAGE_PATCHES", 1)
    monkeypatch.setattr("dovetail.engine.media.MAX_IMAGE_BYTES", 64 * 4 * 12)
    core, prompts = make_core(folder, page_size=4), Prompts(folder, tmp_path / "files")
    steps: list[list[int]] = []
    launch = core.executor.launch

    def noted(step: Any) -> None:
        steps.append([span.num_patches for span in step.encode])
        launch(step)

    monkeypatch.setattr(core.executor, "launch", noted)
    each = [parts_of(4), [TEXTS[0]], parts_of(3)]
    submits = [prompts.submit(parts) for parts in each]
    found = run(core, submits)
    assert [tokens(d) for d in found] == [reference(theirs, p, s) for p, s in zip(each, submits, strict=True)]
    assert all(sum(patches) <= 40 or len(patches) == 1 for patches in steps)
    assert sum(map(bool, steps)) in (3, 4)
    images = core.executor.runner.state.images  # type: ignore[attr-defined]
    assert images is not None
    kept = [rows.nbytes for rows in images._outputs.values()]
    assert sum(kept) <= max(64 * 4 * 12, *kept)


def test_text_gets_a_token_with_each_tower_run(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside two requests of many images, no step runs the tower for more than 8, and text decodes in each."""
    folder, _ = model
    core, prompts = make_core(folder), Prompts(folder, tmp_path / "files")
    core.handle(msgspec.structs.replace(prompts.submit([TEXTS[0]], num=30), handle=0))
    core.step()
    an_image = len(prompts.submit([picture(28, 28), TEXTS[1]]).prompt_ids)
    most = min(30, 900 // an_image)  # the context has room for so many
    images = [picture(28 + at % 5, 28, seed=at) for at in range(most + 10)]
    for handle, part in ((1, images[:most]), (2, images[most:])):
        core.handle(msgspec.structs.replace(prompts.submit([*part, TEXTS[1]], num=2), handle=handle))
    encoded: list[int] = []
    launch = core.executor.launch

    def noted(step: Any) -> None:
        encoded.append(len(step.encode))
        launch(step)

    monkeypatch.setattr(core.executor, "launch", noted)
    given_out = 0
    while sum(encoded) < len(images):
        given_out += sum(len(delta.ids) for delta in core.step().deltas if delta.handle == 0)
        assert given_out >= len(encoded) - 1
    assert max(encoded) <= 8
    assert len(encoded) >= len(images) // 8


def test_a_step_that_is_not_launched_encodes_nothing(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that gets no pages once its images were chosen leaves them: they are encoded with the next one."""
    folder, theirs = model
    core, prompts = make_core(folder), Prompts(folder, tmp_path / "files")
    provide, refused = core.pages.provide, [True, True]
    monkeypatch.setattr(
        core.pages, "provide", lambda request, num: 0 if refused and refused.pop() else provide(request, num)
    )
    submit = prompts.submit(parts_of(1))
    assert tokens(run(core, [submit])[0]) == reference(theirs, parts_of(1), submit)


def test_an_image_that_is_gone_ends_its_request(model: tuple[Path, Any], tmp_path: Path) -> None:
    """A request whose file is gone ends with the reason, and those beside it get their tokens."""
    folder, theirs = model
    core, prompts = make_core(folder), Prompts(folder, tmp_path / "files")
    parts = [[TEXTS[1], picture(57, 91)], [TEXTS[0], picture(91, 57)], [TEXTS[0]]]
    submits = [prompts.submit(each) for each in parts]
    Path(submits[0].media[0].file).unlink()
    found = run(core, submits)
    finish = found[0][-1].finish
    assert finish is not None
    assert "arrays of an image cannot be read" in str(finish.message)
    assert [tokens(d) for d in found[1:]] == [
        reference(theirs, p, s) for p, s in zip(parts[1:], submits[1:], strict=True)
    ]


def test_an_image_has_a_limit(model: tuple[Path, Any], tmp_path: Path) -> None:
    """An image of as many patches as are planned for is served, one of a patch more ends with the numbers."""
    folder, theirs = model
    prompts, parts = Prompts(folder, tmp_path / "files"), [picture(200, 31), TEXTS[1]]
    submit = prompts.submit(parts)
    num = submit.media[0].num_patches
    for limit in (num + 1, num):
        [found] = serve(folder, [submit], max_image_patches=limit)
        assert tokens(found) == reference(theirs, parts, submit)
    [found] = serve(folder, [submit], max_image_patches=num - 1)
    finish = found[-1].finish
    assert finish is not None
    assert finish.message == f"an image has {num} patches; at most {num - 1} are possible here"


def test_a_cpu_times_its_tower_and_says_what_is_slow(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Where it is to bound images, a start times the tower; a long step names the largest image that it reads."""
    folder, _ = model
    assert make_core(folder).info.timed_patches == 0
    core = make_core(folder, times_images=True)
    assert 0 < core.info.timed_patches <= core.info.max_image_patches
    submit = Prompts(folder, tmp_path / "files").submit([picture(200, 31), picture(28, 28)])
    said = []
    core.executor.launch = lambda step: said.append(core.why_slow())  # type: ignore[method-assign, assignment]
    assert core.why_slow() == ""
    core.handle(submit)
    core._launch(core.scheduler.schedule())
    patches = max(span.num_patches for span in submit.media)
    assert said == [f" Its vision tower reads an image of {patches} patches in this step: lower --max-image-patches."]


def test_text_alone_is_served_without_a_tower(model: tuple[Path, Any], tmp_path: Path) -> None:
    """With `--processor none` no tower is loaded, text is as before, and an image is refused with the reason."""
    folder, theirs = model
    core, prompts = make_core(folder, processor=None), Prompts(folder, tmp_path / "files")
    assert not hasattr(core.executor.runner.model, "tower")  # type: ignore[attr-defined]
    submits = [prompts.submit([TEXTS[0]]), prompts.submit(parts_of(1))]
    found = run(core, submits)
    assert tokens(found[0]) == reference(theirs, [], submits[0])
    finish = found[1][-1].finish
    assert finish is not None
    assert finish.message == "the model reads text only, and the prompt has images"


def test_a_processor_for_a_text_model_is_refused(tmp_path: Path) -> None:
    """A processor that is named, and whose images no tower would read, stops the start."""
    make_checkpoint(tmp_path, "qwen2")
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM is served as a text model, which takes no images"):
        make_core(tmp_path, processor="qwen2-vl")
