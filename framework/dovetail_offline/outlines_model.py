"""`LLM` as a model of Outlines: `outlines.Generator(llm, Type)` and `llm("prompt", Type)`, by Dovetail's own masks.

Outlines knows two sorts of models: those whose logits it masks itself, one row at a time, and those that get an output
type and see to it. `LLM` is of the second sort.
"""

from __future__ import annotations

import asyncio
import queue
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from dovetail.contracts.errors import RequestError
from dovetail.messages import TokenDelta
from dovetail.text.parsing.stream import OutputStream
from dovetail_offline.arguments import listed

if TYPE_CHECKING:
    from dovetail_offline.types import GeneratedReply, SamplingParams


class OutlinesModel:
    """The methods that Outlines calls. A prompt is a text, or an `outlines.inputs.Chat`."""

    @abstractmethod
    def _continued(self, prompts: Sequence[str], params: SamplingParams) -> list[GeneratedReply]:
        """Continue prompts."""

    @abstractmethod
    def _answered(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], params: SamplingParams
    ) -> list[GeneratedReply]:
        """Answer conversations."""

    @abstractmethod
    def _pieces(self, prompt: str | Sequence[Mapping[str, Any]], params: SamplingParams) -> Iterator[str]:
        """Yield the content of one reply as it comes."""

    def __call__(self, prompt: Any, output_type: Any = None, backend: str | None = None, **params: Any) -> Any:
        """Return the text of a reply of a type; `params` are fields of `SamplingParams`.

        Raises:
            RequestError: A backend is named: choose it for the whole `LLM`, with `grammar_backend`.
        """
        _no_backend(backend)
        return self._typed(prompt, output_type, params)

    def batch(self, prompts: Sequence[Any], output_type: Any = None, backend: str | None = None, **params: Any) -> Any:
        """Return the texts of several replies; see `__call__`."""
        _no_backend(backend)
        return self.generate_batch(prompts, output_type, **params)

    def stream(self, prompt: Any, output_type: Any = None, backend: str | None = None, **params: Any) -> Iterator[str]:
        """Yield the text of a reply piece by piece; see `__call__`."""
        _no_backend(backend)
        return self.generate_stream(prompt, output_type, **params)

    def generate_batch(self, prompts: Sequence[Any], output_type: Any = None, **params: Any) -> list[Any]:
        """Return the texts of several replies: what an Outlines generator's `batch` calls."""
        return self._texts(listed(prompts, "prompts", "a list of texts, or of chats"), output_type, params)

    def generate_stream(self, prompt: Any, output_type: Any = None, **params: Any) -> Iterator[str]:
        """Yield a reply's text piece by piece: what an Outlines generator's `stream` calls."""
        return self._pieces(_messages(prompt) or _text(prompt), _params(output_type, params))

    def _typed(self, prompt: Any, output_type: Any, params: Mapping[str, Any]) -> Any:
        """Return a text, or with `n` a list of them."""
        [found] = self._texts([prompt], output_type, params)
        return found

    def _texts(self, prompts: list[Any], output_type: Any, params: Mapping[str, Any]) -> list[Any]:
        made = _params(output_type, params)
        chats = [_messages(prompt) for prompt in prompts]
        if all(chat is not None for chat in chats):
            replies = self._answered([chat for chat in chats if chat is not None], made)
        elif any(chat is not None for chat in chats):
            raise RequestError("a batch holds texts or chats, not both")
        else:
            replies = self._continued([_text(prompt) for prompt in prompts], made)
        for reply in replies:
            if reply.finish_reason == "abort":
                raise RequestError(reply.message or "the request was aborted")
        texts = [reply.text for reply in replies]
        return texts if made.n == 1 else [texts[i : i + made.n] for i in range(0, len(texts), made.n)]


def pieces_of(
    loop: asyncio.AbstractEventLoop, deltas: AsyncGenerator[TokenDelta, None], output: OutputStream
) -> Iterator[str]:
    """Yield the content of one reply, which comes on an event loop of another thread; leaving early aborts it.

    Raises:
        RequestError: The engine gave it up.
    """
    pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    async def run() -> None:
        sent = 0
        try:
            async with aclosing(deltas) as stream:
                async for delta in stream:
                    output.feed(delta)
                    pieces.put(output.text[sent:])
                    sent = len(output.text)
                    if output.finish is not None:
                        break
        finally:
            pieces.put(None)

    running = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        while (piece := pieces.get()) is not None:
            if piece:
                yield piece
        running.result()
    finally:
        running.cancel()
    if output.finish is not None and output.finish.reason == "abort":
        raise RequestError(output.finish.message or "the request was aborted")


def register(model: type[OutlinesModel]) -> None:
    """Have Outlines take a class for one of its models that are given output types."""
    from outlines.models.vllm_offline import VLLMOffline  # takes a second

    VLLMOffline.register(model)


def _no_backend(backend: str | None) -> None:
    if backend is not None:
        raise RequestError("a backend is chosen for the whole LLM, with grammar_backend", param="backend")


def _params(output_type: Any, params: Mapping[str, Any]) -> SamplingParams:
    from dovetail_offline.types import SamplingParams

    try:
        return SamplingParams(**params, output_type=output_type)
    except TypeError as error:
        raise RequestError(f"SamplingParams: {error}") from None


def _messages(prompt: Any) -> list[Mapping[str, Any]] | None:
    """Return a chat's messages, None of a text."""
    found = getattr(prompt, "messages", None)
    return list(found) if isinstance(found, list) else None


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise RequestError(f"a prompt is a text or an outlines.inputs.Chat, not {type(prompt).__name__}")
    return prompt
