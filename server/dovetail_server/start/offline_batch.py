"""A batch without a server: an engine, a storage folder that lives as long as the run, and one input file."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.contracts.errors import ConfigError
from dovetail_server.apis.loaded import apis_of, of_batches
from dovetail_server.batches.model import ENDPOINTS, endpoint_of
from dovetail_server.batches.service import StorageService
from dovetail_server.schema.batches import Batch, BatchRequest, decode_line
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.run import load_text, make_engine
from dovetail_server.start.startup import StartupTimer
from dovetail_server.state import ServerState
from dovetail_server.storage.disk import copy, write_whole

if TYPE_CHECKING:
    from dovetail.processing.prepare import StartPreparation

POLL_S = 0.1


async def run_file(prepared: StartPreparation[ServeSettings], source: Path, target: Path, shows_progress: bool) -> int:
    """Answer the requests of `source` and write the replies to `target`, in order.

    Returns:
        0 if every request was answered, 1 if some were refused or failed.

    Raises:
        ConfigError: The file is refused; the message says where and why.
        EngineError: The engine could not start.
    """
    settings, plan = prepared.settings, prepared.plan
    apis = apis_of(plan)
    endpoint = endpoint_of_file(source, of_batches(apis))
    with tempfile.TemporaryDirectory(prefix=".dovetail-", dir=target.absolute().parent) as folder:
        changes: dict[str, Any] = {"file_storage_path": Path(folder), "database_url": None}
        if settings.max_batch_requests is None:
            changes["max_batch_requests"] = settings.max_running_requests
        settings = settings.model_copy(update=changes)
        hooks = ApiHooks.start(plan)
        engine = make_engine(settings, plan)
        try:
            state = ServerState(settings, engine, hooks, apis=apis)
            text = await asyncio.to_thread(load_text, settings, plan, prepared.model, StartupTimer())
            state.ready_with(text.with_engine_limits(await engine.start(), settings))
            try:
                service = await state.storage.get()
                batch = await run_batch(service, source, endpoint, shows_progress)
                check(batch)
                await asyncio.to_thread(write_results, service, batch, source, target)
            finally:
                await state.storage.close()
                state.close_children()
        finally:
            await engine.close()
            hooks.stop()
    return 0 if batch.request_counts.failed == 0 else 1


def endpoint_of_file(source: Path, others: Collection[str]) -> str:
    """Return the endpoint that the file's first request names; `others` are paths of packages' APIs.

    Raises:
        ConfigError: It has none that batches run.
    """
    with source.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        url = decode_line(first).url
    except msgspec.DecodeError as error:
        raise ConfigError(f"-i {str(source)!r}: the first request cannot be read: {error}") from None
    found = endpoint_of(url, others)
    if found is None:
        raise ConfigError(f"-i {str(source)!r}: url {url[:128]!r} is none of {', '.join((*ENDPOINTS, *others))}")
    return found


async def run_batch(service: StorageService, source: Path, endpoint: str, shows_progress: bool) -> Batch:
    """Take the file in as an upload is, and wait for the batch to end."""
    from tqdm import tqdm

    temp = service.layout.new_temp()
    await asyncio.to_thread(copy, source, temp)
    size = temp.stat().st_size
    row = await service.files.add(temp, owner="", filename=source.name, purpose="batch", size=size, expires_s=None)
    request = BatchRequest(input_file_id=str(row["id"]), endpoint=endpoint, completion_window="24h")
    batch = await service.create("", request)
    with tqdm(total=0, unit="request", disable=not shows_progress, file=sys.stderr) as bar:
        while batch.status in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(POLL_S)
            batch = await service.get("", batch.id)
            bar.total = batch.request_counts.total
            bar.update(batch.request_counts.completed + batch.request_counts.failed - bar.n)
    return batch


def check(batch: Batch) -> None:
    """Refuse a file that validation refused.

    Raises:
        ConfigError: With the first mistakes.
    """
    if batch.errors is not None:
        shown = [f"line {e.line}: {e.message}" if e.line else e.message for e in batch.errors.data[:3]]
        more = len(batch.errors.data) - len(shown)
        raise ConfigError("; ".join(shown) + (f"; and {more} more" if more else ""))


def write_results(service: StorageService, batch: Batch, source: Path, target: Path) -> None:
    """Put output and error lines together in the order of the input, and publish them."""
    files = [open_lines(service, file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
    heads = [next(lines, None) for lines in files]

    def merged() -> Iterator[bytes]:
        with source.open("rb") as file:
            for raw in file:
                if not raw.strip():
                    continue
                custom_id = decode_line(raw).custom_id
                for i, head in enumerate(heads):
                    if head is not None and head[0] == custom_id:
                        yield head[1]
                        heads[i] = next(files[i], None)
                        break

    write_whole(target, target.with_name(f".{target.name}.tmp"), merged())


class NamedModel(msgspec.Struct):
    """The part of a result that says whose it is."""

    custom_id: str


def open_lines(service: StorageService, file_id: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield custom_id and bytes of every line of a result file."""
    if file_id is None:
        return
    with service.layout.file(file_id).open("rb") as file:
        for raw in file:
            yield msgspec.json.decode(raw, type=NamedModel).custom_id, raw
