"""How much memory a model's weights will take, before they are loaded. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.base.model_files import check_is_file
from dovetail.checkpoint.formats import StoredFormat
from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.runtime.checkpoint.weight_files import WeightFiles
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import ITEM_BYTES, some

if TYPE_CHECKING:
    from dovetail.sdk.quantization.forms import Form

PLAIN_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
"""Types of weights that are converted to the engine's."""


HEAD = re.compile(r"(?:language_model\.)?lm_head\..+")
"""What an output head of its own is called."""
MAX_TENSORS = 1 << 19
"""Of a checkpoint: twice as many as models of 400 experts in 60 layers have, with the scales of each."""
MAX_AXES = 8
MAX_HEADER_BYTES = 64 << 20
"""Of a file: some 400,000 tensors."""
COMPARED_BYTES = 4 << 20
"""Of two tensors, which are compared at a time."""


class WeightSize(NamedTuple):
    """Bytes in the engine's dtype; `repacked_bytes` of them are copies that are made after loading."""

    num_bytes: int
    repacked_bytes: int


def weight_size(
    headers: Iterable[TensorHeader] | None,
    config: ModelConfig,
    dtype: str,
    *,
    head_row_bytes: int = 0,
    built: int | None = None,
    num_ranks: int = 1,
) -> WeightSize:
    """Size the weights: from the safetensors headers, from the config where there are none to read, or as `built`.

    Args:
        headers: Of what is loaded; None: nothing is, the engine fills the weights itself.
        config: The model's facts.
        dtype: Name of the engine's dtype.
        head_row_bytes: Of the copy that is made of an output head, see `head_row_bytes`: of a tied one the embedding
            stays beside it, another one's own weight goes.
        built: Bytes of the model's parameters, which only building it tells of packed dummies and of a rank's share.
        num_ranks: Ranks that divide the model; what is returned is one rank's.
    """
    item = ITEM_BYTES[dtype]
    rows = -(-config.vocab_size // num_ranks) if config.generates and head_row_bytes else 0
    extra = rows * head_row_bytes if config.tie_word_embeddings else 0
    own = 0 if config.tie_word_embeddings else rows * (head_row_bytes - config.hidden_size * item)
    if built is not None:
        return WeightSize(built + extra + own, extra)
    if headers is None:
        return WeightSize(dense_numel(config) * item + extra + own, extra)
    numel = packed = 0
    for header in headers:
        if config.tie_word_embeddings and HEAD.fullmatch(header.name):
            continue
        if config.not_loaded and re.fullmatch(config.not_loaded, header.name):
            continue
        is_scale = header.is_made and header.name.endswith("scale")
        if rows and HEAD.fullmatch(header.name) and header.dtype in PLAIN_DTYPES and len(header.shape) == 2:
            packed += header.shape[0] * head_row_bytes
        elif header.dtype in PLAIN_DTYPES and not is_scale:
            numel += prod(header.shape)
        else:
            packed += header.num_bytes  # quantised: kept as it is stored
    return WeightSize(numel * item + packed + extra, extra)


def head_row_bytes(form: Form | None, config: ModelConfig, dtype: str, *, is_repacked: bool) -> int:
    """Return the bytes of a row of the copy that is made of an output head; 0: none is made.

    Args:
        form: In which it is packed, None: the model's dtype.
        config: The model's facts.
        dtype: Name of the engine's dtype.
        is_repacked: A kernel set repacks it in the model's dtype.
    """
    if form is not None:
        tensors = form.tensors(config.hidden_size).values()
        return sum(number.itemsize * (config.hidden_size // granule) for number, granule in tensors)
    return config.hidden_size * ITEM_BYTES[dtype] if is_repacked else 0


def headers_of(folder: Path, files: WeightFiles) -> list[TensorHeader]:
    """Return the headers of all tensors of a checkpoint's files.

    Raises:
        ModelError: The checkpoint cannot be read, a file lacks tensors that the index says it has, or two have one that
            the index does not tell apart.
    """
    found: list[TensorHeader] = []
    present: dict[str, str] = {}
    for file in files.files:
        name = str(file.relative_to(folder))
        inside = [header for header in headers(file) if files.names.get(header.name, name) == name]
        if (twice := next((header.name for header in inside if header.name in present), None)) is not None:
            text = f"{folder}: {twice} stands in {present[twice]} and in {name}; remove the file that is too many"
            raise ModelError(text)
        found += inside
        present.update((header.name, name) for header in inside)
        if len(found) > MAX_TENSORS:
            raise ModelError(f"{folder}: its files claim more than {MAX_TENSORS:,} tensors, which no model has")
    lost = sorted(f"{name} ({file})" for name, file in files.names.items() if present.get(name) != file)
    if lost:
        raise ModelError(f"{folder}: the index names tensors that their files lack: {some(lost)}; download them again")
    return found


def has_own_head(headers: Sequence[TensorHeader]) -> bool:
    """Whether a checkpoint has an output head that is no copy of its embedding.

    Args:
        headers: Of all its tensors.

    Raises:
        ModelError: A file cannot be read.
    """
    found = [header for header in headers if HEAD.fullmatch(header.name)]
    if len(found) != 1:
        return bool(found)  # in several parts it is quantised, or has a bias: embeddings are not, and have none
    head = found[0]
    alike = (each for each in headers if (each.shape, each.dtype) == (head.shape, head.dtype) and each is not head)
    return not any(_is_equal(head, other) for other in alike)


def _is_equal(one: TensorHeader, other: TensorHeader) -> bool:
    """Whether two tensors of one size have the same bytes; those that have not differ in the first part already."""
    try:
        with one.file.open("rb") as first, other.file.open("rb") as second:
            first.seek(one.start)
            second.seek(other.start)
            for begin in range(0, one.num_bytes, COMPARED_BYTES):
                num = min(COMPARED_BYTES, one.num_bytes - begin)
                if first.read(num) != second.read(num):
                    return False
    except OSError as error:
        raise ModelError(f"{one.file} cannot be read: {error}") from error
    return True


def headers(file: Path) -> list[TensorHeader]:
    """Return names, shapes and sizes of the tensors in a safetensors file; reads its header only.

    Raises:
        ModelError: It is not a safetensors file, or it is cut short.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_is_file(file)
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
        if size > MAX_HEADER_BYTES:
            why = f"it claims a header of {size:,} bytes, and at most {MAX_HEADER_BYTES:,} are read"
            raise ModelError(f"{file}: broken safetensors file ({why}); download it again")
        with safe_open(file, framework="np"), file.open("rb") as opened:  # it checks all that is read here
            opened.seek(8)
            entries: dict[str, Any] = json.loads(opened.read(size))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: broken safetensors file ({error}); download it again") from None
    found = [
        TensorHeader(name, file, tuple(each["shape"]), each["dtype"], start=8 + size + each["data_offsets"][0])
        for name, each in entries.items()
        if name != "__metadata__"
    ]
    return sorted(found, key=lambda header: header.start)


def stored_headers(stored: StoredFormat) -> list[TensorHeader]:
    """Return the headers that a format of the plugin kind reads, held against its files.

    Raises:
        ModelError: A tensor lies outside of its file, is there twice, or has no possible shape; there are too many, or
            they take more bytes than there are.
        PluginError: The format fails, or gives something else than headers.
    """
    sizes = {file: file.stat().st_size for file in stored.files}
    left, found = dict(sizes), dict[str, TensorHeader]()
    for header in stored.each("headers"):
        if not isinstance(header, TensorHeader) or header.file not in sizes:
            raise PluginError(f"--load-format: {stored.name} gives {header!r}, no header of a tensor in its files")
        where = f"{header.file}: the tensor {header.name}"
        if header.name in found:
            raise ModelError(f"{where} is there twice; get the file again")
        if len(found) >= MAX_TENSORS:
            raise ModelError(f"{stored.folder}: its files claim more than {MAX_TENSORS:,} tensors, which no model has")
        axes = (*header.shape, *header.numbers, header.start, header.stored_bytes)
        if len(header.shape) > MAX_AXES or not all(type(size) is int and size >= 0 for size in axes):
            raise ModelError(f"{where} has the shape {some([str(size) for size in header.shape])}; get the file again")
        end = header.start + header.stored_bytes
        if end > sizes[header.file]:
            raise ModelError(f"{where} ends at byte {end:,} of {sizes[header.file]:,}; get the file again")
        found[header.name] = header
        left[header.file] -= header.stored_bytes
    for file, size in left.items():
        if size < 0:
            raise ModelError(f"{file}: its tensors take {-size:,} bytes more than it has: they lie on one another")
    return list(found.values())
