"""What the author of an image processor implements: `ImageProcessor`, and what it says of an image.

```python
class Acme(ImageProcessor):
    @classmethod
    def from_config(cls, config, preprocessor):
        return cls(side=preprocessor.get("patch_size", 16), token=config["image_token_id"])

    ...
```

The class is named in the entry-point group `dovetail.processors.v1`, and its manifest says which architectures it
`matches`. Its module imports neither torch nor transformers: the HTTP process and its decoding processes load it.
`layout` runs in the HTTP process, so it is integer arithmetic; `process` runs in a decoding process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    from typing import Self

    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

Arrays = Mapping[str, "npt.NDArray[np.uint8] | npt.NDArray[np.int32]"]
"""Arrays of one image by name, C-contiguous, uint8 or int32: they travel as bytes of shared memory."""
MAX_IMAGE_PIXELS = 64 << 20
"""Pixels of the largest image that a server decodes; 192 MiB once decoded."""


class ImageLayout(NamedTuple):
    """What an image becomes in a prompt. It follows from the image's size alone."""

    ids: tuple[int, ...]
    """Token ids in place of the placeholder; those equal to `ImageProcessor.embed_id` stand for tower output."""
    grid: tuple[int, int, int]
    """Frames, rows and columns of the embeddings. Models with multimodal rotary positions compute these from it."""
    num_patches: int
    """Patches that the vision tower reads: the cost of the image."""

    @property
    def num_embeds(self) -> int:
        """Embeddings that the tower returns for the image."""
        frames, rows, columns = self.grid
        return frames * rows * columns


class ImageProcessor(Configurable, ABC):
    """Turns images into what a model's vision tower reads. One object serves a model; its methods change nothing.

    Attributes:
        placeholder_id: Token id that the chat template writes, once for each image.
        embed_id: Token id whose embedding is replaced by tower output.
        token_texts: Texts of added tokens by key of `config`. A key that `config.json` lacks gets the token's id in the
            model's tokenizer; where that has no such token, the key stays away.
        around: Texts before and behind the placeholder of every image, which are tokenized with the text beside them.
    """

    placeholder_id: int
    embed_id: int
    token_texts: ClassVar[Mapping[str, str]] = MappingProxyType({})
    around: ClassVar[tuple[str, str]] = ("", "")

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """Make the processor of a model.

        Args:
            config: The parsed `config.json`, with ids of `token_texts`.
            preprocessor: The parsed `preprocessor_config.json`, or `image_processor` of `processor_config.json`; empty
                where the model's folder has neither.

        Raises:
            ModelError: A value that the processor cannot serve, naming the key and what is possible.
        """

    @abstractmethod
    def layout(self, width: int, height: int) -> ImageLayout:
        """Return what an image of this size becomes.

        Args:
            width: In pixels, 1 or more.
            height: Likewise.

        Raises:
            RequestError: The model takes no image of this size; the message says which sizes it takes.
        """

    @abstractmethod
    def process(self, image: Image) -> Arrays:
        """Return the arrays of an image, not normalized: the tower does that on its device.

        Args:
            image: Decoded and upright, of mode `RGB`. Its size is the one that `layout` was asked for.

        Raises:
            RequestError: As of `layout`.
        """

    def max_patches(self) -> int | None:
        """Return the maximum of patches that `layout` gives an image of any size; None: it has no bound of its own.

        The memory plan counts the vision tower for such an image, or for one that fills the context length. A number
        that is too small ends a request with a larger image.
        """
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that differs where `process` would return other arrays for an image: its options' values."""
