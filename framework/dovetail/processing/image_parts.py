"""Images of conversations: their parts are loaded, shown to the chat template, and put into the prompt."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import asdict, replace

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Ids
from dovetail.messages.media import MediaSpan
from dovetail.processing.images import ExpandedPrompt, ImageLoader, Message, PreparedImage, expand
from dovetail.text.chat.messages import IMAGE_PARTS, ImagePart, place_of

if TYPE_CHECKING:
    from dovetail.contracts.processor import ImageProcessor
    from dovetail.processing.processor import Processor


T = TypeVar("T")


class ImageIds(Ids, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A prompt with images. Only what runs here makes one: its files are handed to the engine.

    `keeper` holds the images' files; they may be removed once it is gone. None where nobody has taken them yet.
    """

    media: tuple[MediaSpan, ...] = ()
    keeper: Any = None


def image_parts(messages: Iterable[Message]) -> Iterator[tuple[Message, str]]:
    """Yield the parts of a conversation that are images and have not been loaded, each with its place."""
    for at, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) or not isinstance(content, Sequence):
            continue
        for i, part in enumerate(content):
            if _is_image(part):
                yield part, f"messages[{at}].content[{i}]"


def with_images(messages: list[dict[str, Any]], load: ImageLoader, salt: str) -> list[dict[str, Any]]:
    """Return a conversation with its images loaded; one without is returned as it is.

    Args:
        messages: The conversation.
        load: Loads them.
        salt: Requests with different ones share nothing that is kept.

    Raises:
        RequestError: An image cannot be had, or is none; `param` names its part.
    """
    found = list(image_parts(messages))
    if not found:
        return messages
    loaded = iter([ImagePart(image) for image in load(found, salt)])
    return [
        {**message, "content": [next(loaded) if _is_image(part) else part for part in message["content"]]}
        if any(True for _ in image_parts((message,)))
        else message
        for message in messages
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and type(part) is not ImagePart and part.get("type") in IMAGE_PARTS


def images_of(messages: Iterable[Message]) -> list[PreparedImage]:
    """Return the loaded images of a conversation, in order."""
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    return [part["image"] for part in parts if type(part) is ImagePart]


class PlainPlaceholders:
    """Keeps what users typed from becoming image placeholders: in the template, a mark stands for such text."""

    def __init__(self, processor: Processor, placeholder_id: int) -> None:
        """Take the text that the template writes for an image."""
        self._processor = processor
        self._text = processor.tokenizer.token_text(placeholder_id)
        self._cut = secrets.token_hex(16)  # stands where two texts of a message would make a placeholder together
        self._mark = secrets.token_hex(16)  # ASCII letters and digits: templates print it as it is, also in JSON

    def marked(self, value: T) -> T:
        """Return what a template is given with marks in place of what users typed; mostly the value itself."""
        return self._marked(value) if self._is_in(value) else value

    def unmarked(self, text: str) -> str:
        """Undo that in a text which the template made."""
        return text.replace(self._mark, self._text).replace(self._cut, "")

    def encode(self, text: str, *, add_special_tokens: bool, keeps: bool) -> list[int]:
        """Tokenize a rendered conversation: a mark becomes the tokens of its text, none of which is special."""
        text = surrounded(self._processor, text)  # what users typed is a mark
        head, *rest = text.replace(self._cut, f"{self._mark}{self._cut}").split(self._mark)
        ids = self._encoded(head, add_special_tokens, keeps)
        if rest:
            self._processor.begun = None  # the parts behind are no beginning
        for piece in rest:
            # Its first character apart: so the tokenizer does not meet the special token that the whole would be.
            typed = () if piece.startswith(self._cut) else (self._text[:1], self._text[1:])
            for part in (*typed, piece.removeprefix(self._cut)):
                ids += self._encoded(part, False, keeps) if part else []
        return ids

    def _encoded(self, text: str, special: bool, keeps: bool) -> list[int]:
        return list(self._processor.encode(text, "messages", add_special_tokens=special, keeps=keeps))

    def _is_in(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._text in value
        if isinstance(value, Mapping):
            return any(map(self._is_in, (*value, *value.values())))
        return isinstance(value, (list, tuple)) and (any(map(self._is_in, value)) or any(self._cuts(value)))

    def _cuts(self, parts: Sequence[Any]) -> list[bool]:
        """Tell behind which parts of a content a text goes on that would become a placeholder with theirs."""
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        return [
            isinstance(a, str) and isinstance(b, str) and self._would_join(a, b)
            for a, b in itertools.zip_longest(texts, texts[1:])
        ]

    def _would_join(self, a: str, b: str) -> bool:
        pieces = ((self._text[:at], self._text[at:]) for at in range(1, len(self._text)))
        return any(a.endswith(left) and (b.startswith(right) or right.startswith(b)) for left, right in pieces)

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(self._text, self._mark)
        if type(value) is ImagePart:
            return value
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if not isinstance(value, (list, tuple)):
            return value
        made = [self._marked(item) for item in value]
        for at, is_cut in enumerate(self._cuts(value)):
            if is_cut:
                made[at]["text"] += self._cut
        return made


def expanded(
    ids: Sequence[int], processor: ImageProcessor, images: Sequence[PreparedImage], name: str, hint: str
) -> ExpandedPrompt:
    """As `expand`; what is refused names the prompt, and says why or what to do.

    Raises:
        RequestError: The prompt has another number of placeholders than there are images.
    """
    try:
        return expand(ids, processor, images)
    except RequestError as error:
        raise RequestError(f"{error.message}; {hint}", param=name, code=error.code) from None


def surrounded(processor: Processor, text: str) -> str:
    """Return a text that is to be tokenized, with the model's texts around each placeholder of an image."""
    if processor.images is None or not any(processor.images.around):
        return text
    placeholder = processor.tokenizer.token_text(processor.images.placeholder_id)
    return text.replace(placeholder, placeholder.join(processor.images.around))


def shown(processor: Processor, prompt: Ids, parts: Sequence[Message], name: str, salt: str) -> Ids:
    """Return a prompt with the images of parts in place of its placeholders, in order.

    Args:
        processor: The model's.
        prompt: As tokens; its images are not looked at.
        parts: Content parts, each with its place in the request as `param`.
        name: What the API calls the prompt.
        salt: As of `with_images`.

    Raises:
        RequestError: The model sees nothing, an image cannot be had, or there are more or fewer placeholders.
        InlineCostError: Images are not loaded here.
    """
    placed = [(part, place_of(part, name)) for part in parts]
    if processor.images is None:
        text = f"{placed[0][1]}: an image cannot be read here: {processor.template.no_images}; send text"
        raise RequestError(text, param=placed[0][1], code="unsupported")
    hint = f"write {processor.tokenizer.token_text(processor.images.placeholder_id)} once for each image"
    made = expanded(prompt.ids, processor.images, processor.load_images(placed, salt), name, hint)
    return with_media(replace(prompt, ids=made.ids), made.media)


def of_images(error: RequestError, media: Sequence[MediaSpan]) -> RequestError:
    """Return the refusal of a prompt that is too long, with what its images have of it."""
    num = sum(span.num for span in media)
    text = f"{error.message}; {num} tokens of the prompt stand for its images"
    return RequestError(text, param=error.param, code=error.code)


def cuts_images(name: str) -> RequestError:
    """Return the refusal of a prompt with images that is too long, and was to be cut."""
    text = "a prompt with images is not cut; send less text or fewer images"
    return RequestError(text, param=name, code="invalid_value")


def with_media(prompt: Ids, media: tuple[MediaSpan, ...]) -> Ids:
    """Return a prompt whose images stand at `media`; without any, the prompt itself."""
    return ImageIds(**{**asdict(prompt), "media": media}) if media else prompt


def media_of(prompt: Ids) -> tuple[MediaSpan, ...]:
    """Return where the images of a prompt stand."""
    return prompt.media if isinstance(prompt, ImageIds) else ()


def kept(prompt: Ids, keeper: object) -> Ids:
    """Return a prompt whose images' files `keeper` holds."""
    return replace(prompt, keeper=keeper) if isinstance(prompt, ImageIds) else prompt
