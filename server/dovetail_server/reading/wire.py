"""What travels between the server and the processes that read bodies; see `dovetail.base.forks`."""

from __future__ import annotations

import array
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from dovetail.contracts import requests
from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Ids, Request
from dovetail.messages.media import MediaSpan
from dovetail.processing.image_parts import kept, media_of, with_media
from dovetail.processing.processor import ProcessorStart
from dovetail.text.chat.messages import NO_IMAGES
from dovetail.text.chat.template import FAILED as TEMPLATE_FAILED
from dovetail.text.tokenizer.cuts import shared
from dovetail.text.tokenizer.tokenizer import FAILED as TOKENIZER_FAILED
from dovetail_server.media.folder import MediaFiles
from dovetail_server.media.rules import MediaRules
from dovetail_server.serving.prompts import Prompt, Prompts
from dovetail_server.serving.served import Served

LARGE = 1 << 16
"""Bodies above this many bytes go to another process: what is smaller is mostly read in less time than that takes."""
MAX_BESIDE = 1 << 20
"""Bytes of what stands beside a prompt, such as tools and schemas: the server's own process reads it again."""
ID = "i"
"""Token ids travel as packed numbers: as msgpack they would take Python's lock for as long as parsing them."""


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the process that makes the others.

    Attributes:
        processor: What a prompt depends on beside its request.
        served: The model's names.
        num_threads: A copy tokenizes with so many.
        num_cores: Its images may keep so many busy, whatever the environment says of the tokenizer's threads.
        media: What images may be; None where there can be none, …
        no_images: … and why.
    """

    processor: ProcessorStart
    served: Served
    num_threads: int = 1
    num_cores: int = 1
    media: MediaRules | None = None
    no_images: str = NO_IMAGES


class BodyJob(msgspec.Struct, frozen=True, kw_only=True):
    """Read one body, which follows this message.

    Attributes:
        task: What for; a key of `TASKS`.
        num_bytes: The body's size.
        is_line: It is a line of a batch, with the body in it.
        cpu_s: Processor time that it may take.
        context: What the task needs beside the body, such as the identifier of a response.
        leaves_out: Unknown fields are left out, as `--unknown-fields warn` says.
        keeps: As of `Tokenizer.encode`, but for requests with a salt.
        media: What files of images begin with, …
        media_cpu_s: … and processor time that it may take if it loads any.
    """

    task: str
    num_bytes: int
    is_line: bool
    cpu_s: float
    context: str = ""
    leaves_out: bool = False
    keeps: bool = False
    media: str = ""
    media_cpu_s: float = 0.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A `RequestError`."""

    message: str
    param: str | None
    code: str | None
    status: int


PARTS = {"chat template": TEMPLATE_FAILED, "tokenizer": TOKENIZER_FAILED}
"""What of a model's files a process runs, with the code of errors that are its fault."""
IMAGES = "images"
"""In place of one of them: the request's images."""


def too_costly(what: str, num_bytes: int, part: str | None = None) -> Refusal:
    """Word the refusal of a body that takes too much.

    Args:
        what: Time or memory.
        num_bytes: The body's size. A small one is not at fault, but the model's files.
        part: What took it, of `PARTS` or `IMAGES`, if that is known.
    """
    if part == IMAGES:
        text = f"the images of this request take too much {what} to decode; send fewer or smaller ones"
        return Refusal(message=text, param=None, code="image_too_large", status=400)
    if num_bytes > LARGE:
        text = f"reading this request takes too much {what}; make it smaller"
        return Refusal(message=text, param=None, code="body_too_costly", status=400)
    named = part or " or ".join(PARTS)
    text = f"the model's {named} takes too much {what}; the request is not at fault: serve with another"
    return Refusal(message=text, param=None, code=PARTS.get(part or "", "body_too_costly"), status=500)


def is_short(refusal: Refusal | None, num_bytes: int) -> bool:
    """Whether a body of so many bytes was refused for want of memory."""
    return refusal in [too_costly("memory", num_bytes, part) for part in (None, IMAGES, *PARTS)]


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process has taken its job."""

    pid: int


class PromptBegun(msgspec.Struct, frozen=True, tag=True):
    """The next tokens of the request's only prompt, whose rest is being tokenized; there is no answer.

    Attributes:
        ids: Packed: those behind the ones sent before.
        num_about: About how many tokens the prompt will have.
        seconds: How long it took so far.
        priority: The request's.
        cache_salt: The request's own.
    """

    ids: memoryview
    num_about: int
    seconds: float
    priority: int
    cache_salt: str


class Question(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a response refers to is asked for.

    Attributes:
        light: The body without its input.
        references: Identifiers of stored items in the input, each with its place.
    """

    light: bytes
    references: list[tuple[str, int]]


class PackedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request's prompts, with token ids as packed numbers.

    Attributes:
        at: Which of the different requests it is, but for …
        rid: … its identifier, and …
        prompts: … its prompts: ids, of `Ids` text, suffix and tail, and images.
    """

    at: int
    rid: str | None
    prompts: list[tuple[memoryview, str, str, str | None, tuple[MediaSpan, ...]]]

    @classmethod
    def of(cls, at: int, request: Request) -> PackedRequest:
        """Pack a request, all of whose prompts are token ids."""
        prompts = [
            (
                packed(prompt.ids),
                prompt.text,
                prompt.suffix,
                prompt.tail,
                media_of(prompt),
            )
            for prompt in request.prompts
            if isinstance(prompt, Ids)
        ]
        return cls(at, request.rid, prompts)

    def unpacked(self, bare: Request) -> Request:
        """Put it together again."""
        prompts: list[requests.Prompt] = []
        for ids, text, suffix, tail, media in self.prompts:
            made = Ids(ids=shared(unpacked(ids)), text=text, suffix=suffix, tail=tail)
            if media:
                made = kept(with_media(made, media), MediaFiles(span.file for span in media))
            prompts.append(made)
        return replace(bare, rid=self.rid, prompts=prompts)


class BodyResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What became of a job: a refusal, a fault of ours, a whole reply, or prompts with the rest of the request.

    Attributes:
        refusal: Why the request cannot be served.
        fault: A traceback.
        reply: The reply's body.
        light: The request's body without what the prompts were made of.
        prompts: Ids, packed, and the rest of each.
        is_batch: See `Prompts`.
        items: Of a response or a conversation to be compacted: what is stored, JSON.
        plan: What becomes of a summary: see `ReadItems`.
        requests: Requests without their prompts, JSON, each that differs once; …
        packed: … and their prompts.
        left_out: Unknown fields that were left out.
        cpu_s: Processor time that it took.
        grown_bytes: By how much its process grew at most.
        stays: Its process waits for another job, …
        is_bound: … of the same owner.
    """

    refusal: Refusal | None = None
    fault: str | None = None
    reply: bytes | None = None
    light: bytes = b""
    prompts: list[tuple[memoryview, str, int]] = []
    is_batch: bool = False
    items: bytes = b""
    plan: bytes = b""
    requests: bytes = b""
    packed: list[PackedRequest] = []
    left_out: list[str] = []
    cpu_s: float = 0.0
    grown_bytes: int = 0
    stays: bool = False
    is_bound: bool = False

    @classmethod
    def of(cls, found: Prompts, light: bytes) -> BodyResult:
        """Pack prompts."""
        prompts = [(packed(p.ids), p.text, p.second) for p in found.prompts]
        return cls(light=light, prompts=prompts, is_batch=found.is_batch)

    @classmethod
    def of_requests(
        cls, rendered: Sequence[Request], *, light: bytes = b"", items: bytes = b"", plan: bytes = b""
    ) -> BodyResult:
        """Pack requests whose prompts are token ids; `light`, `items` and `plan` where the API needs them, too.

        Raises:
            RequestError: What stands beside the prompts is large, too.
        """
        different: list[Request] = []
        packed = []
        for request in rendered:
            bare = replace(request, prompts=[], rid=None, names=replace(request.names, prompt=""))
            if not different or bare != different[-1]:
                different.append(bare)
            packed.append(PackedRequest.of(len(different) - 1, request))
        beside = msgspec.json.encode(different)
        if len(beside) > MAX_BESIDE:
            text = f"the fields beside the prompt have {len(beside)} bytes; at most {MAX_BESIDE} are allowed"
            raise RequestError(text, code="body_too_large", status=413)
        return cls(requests=beside, packed=packed, light=light, items=items, plan=plan)

    @property
    def files(self) -> set[str]:
        """Those of the prompts' images."""
        return {span.file for one in self.packed for *_, media in one.prompts for span in media}

    def read_requests(self) -> list[Request]:
        """Unpack them; takes a while for many."""
        different = msgspec.json.decode(self.requests, type=list[Request])
        return [one.unpacked(different[one.at]) for one in self.packed]

    def read_prompts(self) -> Prompts:
        """Unpack them; takes a while for many."""
        prompts = [Prompt(shared(unpacked(ids)), text, second) for ids, text, second in self.prompts]
        return Prompts(prompts=prompts, is_batch=self.is_batch)


def packed(ids: list[int]) -> memoryview:
    """Return numbers as they travel."""
    return memoryview(array.array(ID, ids)).cast("B")


def unpacked(ids: memoryview) -> array.array[int]:
    """Return packed numbers as numbers."""
    found = array.array(ID)
    found.frombytes(ids)
    return found
