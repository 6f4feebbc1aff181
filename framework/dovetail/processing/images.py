"""Images of prompts: the model's image processor, and the token ids that stand in place of placeholders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from dovetail.contracts.errors import ConfigError, DovetailError, PluginError, RequestError
from dovetail.contracts.processor import ImageLayout, ImageProcessor
from dovetail.messages.media import ArrayRef, MediaSpan
from dovetail.plugins import LoadedPlugins, PluginPlan
from dovetail.plugins.loader import describe
from dovetail.plugins.time_limit import time_limit
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.image_processor import KIND, preprocessor_config, processor_of

ORDINARY = (64, 512)
"""Sides in pixels of square images; any limit must allow one of these."""


class PreparedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that a decoding process has read: its layout, its digest, and the file with its arrays."""

    width: int
    height: int
    digest: bytes
    file: str
    arrays: tuple[ArrayRef, ...]


Message = Mapping[str, Any]
ImageLoader = Callable[[Sequence[tuple[Message, str]], str], Sequence[PreparedImage]]
"""Loads the images of content parts, each with its place in the request, in order; behind them the request's salt."""


class ExpandedPrompt(NamedTuple):
    """A prompt's token ids with images, and where these stand."""

    ids: list[int]
    media: tuple[MediaSpan, ...]


def make_image_processor(
    plugins: LoadedPlugins, model: ModelFolder, added_tokens: Mapping[str, int]
) -> ImageProcessor | None:
    """Return the first processor of the plan that serves the model; None where the plan has none.

    Args:
        plugins: The plan's.
        model: What the model's folder says.
        added_tokens: The tokenizer's, by text.

    Raises:
        ModelError: The model's configuration has a value that the processor cannot serve.
    """
    for _, found in plugins.candidates(KIND):
        cls: type[ImageProcessor] = found
        missing = {key: text for key, text in cls.token_texts.items() if model.config.get(key) is None}
        ids = {key: added_tokens[text] for key, text in missing.items() if text in added_tokens}
        return cls.from_config({**model.config, **ids}, preprocessor_config(model.path))
    return None


def max_patches_of(plan: PluginPlan, model: ModelFolder, asked: int | None) -> int | None:
    """Return the most patches of an image that is served, by the plan's processor and by what was asked for.

    None: neither has a bound, or the plan has no processor, which `asked` then is for the engine to refuse.

    Args:
        plan: The plugins.
        model: What the model's folder says.
        asked: As `--max-image-patches`.

    Raises:
        ModelError: The model's configuration has a value that the processor cannot serve.
        PluginError: The processor raises, or gives a bound that is none.
        ConfigError: Fewer were asked for than any image has.
    """
    if (found := processor_of(plan, model)) is None:
        return asked
    planned = plan.of_kind(KIND)[0]
    label = describe(planned)
    try:
        with time_limit(f"{label}: asking how large images may be", plan.timeout_s):
            own, least = found.max_patches(), _least_patches(found)
    except DovetailError:
        raise
    except Exception as error:  # a stranger's code; the cause is kept
        raise PluginError(f"{label}: asked how large images may be, it raised {error!r}") from error
    if own is not None and (type(own) is not int or not max(least, 1) <= own < 1 << 63):
        small = f"small images have {least}" if least else "an image has some"
        raise PluginError(f"{label}: max_patches() returned {own!r}, and {small}; return an int of as many, or None")
    if asked is not None and asked < least:
        raise ConfigError(f"--max-image-patches {asked}: small images have {least} here; give at least as many")
    return min((num for num in (own, asked) if num is not None), default=None)


def _least_patches(processor: ImageProcessor) -> int:
    """Return how many patches the smallest of a few ordinary images has."""
    found = []
    for side in ORDINARY:
        with suppress(RequestError):
            found.append(processor.layout(side, side).num_patches)
    return min(found, default=0)


def expand(ids: Sequence[int], processor: ImageProcessor, images: Sequence[PreparedImage]) -> ExpandedPrompt:
    """Put the ids of each image in place of its placeholder, in order.

    Args:
        ids: As the chat template made them; text that users typed holds no placeholder.
        processor: The model's.
        images: In the order of the conversation.

    Raises:
        RequestError: The template wrote another number of placeholders than there are images.
    """
    num = ids.count(processor.placeholder_id)
    if num != len(images):
        raise RequestError(f"the prompt has {num} image placeholders for {len(images)} images", code="invalid_image")
    made: list[int] = []
    media: list[MediaSpan] = []
    rest = iter(images)
    for token in ids:
        if token != processor.placeholder_id:
            made.append(token)
            continue
        image = next(rest)
        layout = processor.layout(image.width, image.height)
        first = 0
        for start, num in _runs(layout, processor.embed_id):
            media.append(
                MediaSpan(
                    start=len(made) + start,
                    num=num,
                    first=first,
                    grid=layout.grid,
                    num_patches=layout.num_patches,
                    digest=image.digest,
                    file=image.file,
                    arrays=image.arrays,
                )
            )
            first += num
        made += layout.ids
    return ExpandedPrompt(made, tuple(media))


def _runs(layout: ImageLayout, embed_id: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of each run of embeddings among an image's ids."""
    if layout.num_embeds == len(layout.ids):
        yield 0, len(layout.ids)
        return
    at = 0
    for token, run in itertools.groupby(layout.ids):
        num = len(list(run))
        if token == embed_id:
            yield at, num
        at += num
