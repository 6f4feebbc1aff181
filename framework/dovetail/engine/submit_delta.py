"""What one request has in common with the one before it is sent to the engine once.

The choices of a request share their prompt, their grammar and nearly all parameters, and so do its prompts. Copies of
these would cost memory and time in proportion to the number of choices: 128 of a prompt of a million tokens 600 MB.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from dovetail.messages import Abort, Control, SamplerParams, Submit, ToEngine

OWN = frozenset({"seed", "max_tokens"})
"""Parameters that differ between choices."""
SHARED_PARAMS = tuple(name for name in SamplerParams.__struct_fields__ if name not in OWN)


class DeltaSubmit(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A `Submit` as the one before it on the same channel, but for what stands here. `prompt_ids` None: its prompt."""

    handle: int
    rid: str
    seed: int | None
    max_tokens: int
    prompt_ids: list[int] | None = None
    output_ids: list[int] = []
    cached_tokens: int | None = None
    num_retractions: int = 0
    grammar_option: int | None = None
    again: bool = False

    def after(self, before: Submit) -> Submit:
        """Return the request."""
        return replace(
            before,
            handle=self.handle,
            rid=self.rid,
            params=replace(before.params, seed=self.seed, max_tokens=self.max_tokens),
            prompt_ids=before.prompt_ids if self.prompt_ids is None else self.prompt_ids,
            output_ids=self.output_ids,
            cached_tokens=self.cached_tokens,
            num_retractions=self.num_retractions,
            grammar_option=self.grammar_option,
            again=self.again,
        )


SHARED = tuple(sorted(set(Submit.__struct_fields__) - set(DeltaSubmit.__struct_fields__) - {"params"}))


def is_alike(one: Submit, other: Submit) -> bool:
    """Whether two requests share what choices share, by identity: comparing may take as long as sending."""
    return all(getattr(one, name) is getattr(other, name) for name in SHARED) and all(
        getattr(one.params, name) is getattr(other.params, name) for name in SHARED_PARAMS
    )


class SubmitEncoder:
    """Encodes what goes to an engine through one channel."""

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._last: Submit | None = None

    def encode(self, message: ToEngine) -> bytes:
        """Return a message as it is sent."""
        if not isinstance(message, Submit):
            return self._encode(message)
        last, self._last = self._last, message
        if last is None or not is_alike(last, message):
            return self._encode(message)
        is_same = last.prompt_ids is message.prompt_ids
        return self._encode(
            DeltaSubmit(
                handle=message.handle,
                rid=message.rid,
                seed=message.params.seed,
                max_tokens=message.params.max_tokens,
                prompt_ids=None if is_same else message.prompt_ids,
                output_ids=message.output_ids,
                cached_tokens=message.cached_tokens,
                num_retractions=message.num_retractions,
                grammar_option=message.grammar_option,
                again=message.again,
            )
        )


class SubmitDecoder:
    """Decodes what a `SubmitEncoder` wrote, in its order."""

    def __init__(self) -> None:
        """Begin with nothing received."""
        self._decode = msgspec.msgpack.Decoder(Submit | DeltaSubmit | Abort | Control).decode
        self._last: Submit | None = None

    def decode(self, data: bytes) -> ToEngine:
        """Return a message.

        Raises:
            ValueError: It refers to a request before the first.
        """
        message: Submit | DeltaSubmit | Abort | Control = self._decode(data)
        if isinstance(message, DeltaSubmit):
            if self._last is None:
                raise ValueError("a request refers to the one before it, but is the first")
            message = message.after(self._last)
        if isinstance(message, Submit):
            self._last = message
        return message
