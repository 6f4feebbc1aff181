"""`dovetail run-batch --ray`: the lines of files, answered by actors of a Ray cluster, each with its own engine.

Ray starts an actor again that ends, and gives it what it had: a chunk of lines is answered anew as a whole, and its
results are written here, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail_server.apis.loaded import named_apis, of_batches
from dovetail_server.batches.execute import run_to_end
from dovetail_server.batches.model import endpoint_of
from dovetail_server.batches.result import Result
from dovetail_server.ray.batch_files import CHUNK_LINES, BatchFile, LineChunk, files_of, look_through
from dovetail_server.ray.options import ClusterNode, RayModel, RayOptions, actor_options, cluster_nodes, replica_values
from dovetail_server.ray.replica import ReplicaServer
from dovetail_server.schema.batches import decode_line
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from tqdm import tqdm

MAX_TRIES = 3
"""A chunk on which so many actors end is what ends them."""
WAIT_S = 1.0
NOT_RESULTS = frozenset(
    {"num_threads", "device", "log_level", "log_format", "file_storage_path", "max_running_requests"}
)
"""Settings that may differ between a run and the one that goes on with it."""
Work = tuple[BatchFile, LineChunk]


def run_files(
    settings: ServeSettings, source: Path, target: Path, num_replicas: int | None, shows_progress: bool
) -> int:
    """Answer all requests of a file, or of the `*.jsonl` of a folder; goes on where a run before has ended.

    Args:
        settings: Of the model.
        source: A file, or a folder.
        target: A file, or a folder that exists.
        num_replicas: Actors; as many as the cluster has devices for if None.
        shows_progress: Draw a bar of the requests.

    Returns:
        0 if every request was answered, 1 if some were refused or failed.

    Raises:
        ConfigError: An input, a setting or the cluster has to be changed.
        DovetailError: Actors end on the same requests again and again.
    """
    from tqdm import tqdm

    pairs = files_of(source, target)
    others = of_batches(named_apis(settings))
    files = [BatchFile(one, out, look_through(one, settings.max_body_bytes, others)) for one, out in pairs]
    model = RayModel(settings, RayOptions.model_validate({}))
    nodes = cluster_nodes()
    reserved, follows = actor_options(model, nodes, is_command=True)
    values = replica_values(model, follows, resume_key=None)
    for file in files:
        file.open(described(values))
    total = sum(file.num_lines for file in files)
    left = [(file, chunk) for file in files for chunk in file.chunks if chunk.number not in file.done]
    with tqdm(total=total, unit="request", disable=not shows_progress, file=sys.stderr) as bar:
        bar.update(total - sum(chunk.num_lines for _, chunk in left))
        if left:
            actors = start_actors(values, reserved, min(num_replicas or room_for(nodes, reserved), len(left)))
            try:
                work_off(actors, left, depth(settings), bar)
            finally:
                for actor in actors:
                    ray.kill(actor)
    for file in files:
        file.finish()
    return 0 if not any(file.num_failed for file in files) else 1


def described(values: dict[str, Any]) -> str:
    """Return what results depend on, as a digest: keys and passwords are among settings."""
    results = {name: value for name, value in values.items() if name not in NOT_RESULTS}
    return hashlib.sha256(json.dumps(results, sort_keys=True, default=str).encode()).hexdigest()


def depth(settings: ServeSettings) -> int:
    """Return how many chunks an actor has at a time: its engine is full while results travel."""
    return 1 + -(-settings.max_running_requests // CHUNK_LINES)


def room_for(nodes: list[ClusterNode], reserved: dict[str, Any]) -> int:
    """Return how many actors the cluster has devices for, at least one."""
    gpus, cpus = reserved["num_gpus"], reserved["num_cpus"]
    return max(1, sum(int(min(node.gpus // gpus if gpus else 1 << 20, node.cpus // cpus)) for node in nodes))


def start_actors(values: dict[str, Any], reserved: dict[str, Any], num: int) -> list[Any]:
    """Start actors, and wait until the first one serves.

    Raises:
        ConfigError: What the user can fix.
        DovetailError: The engine cannot start.
    """
    made = ray.remote(BatchReplica).options(**reserved, max_restarts=-1, max_task_retries=MAX_TRIES - 1)
    actors = [made.remote(values) for _ in range(num)]
    ready = [actor.ready.remote() for actor in actors]
    try:
        done, _ = ray.wait(ready, num_returns=1)
        ray.get(done)
    except BaseException as error:
        for actor in actors:
            ray.kill(actor)
        raise own_error(error) from None
    return actors


def own_error(error: BaseException) -> BaseException:
    """Return what an actor raised, where that was an error of ours."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, DovetailError):
        return cause
    return DovetailError(str(error).strip()) if isinstance(error, RayTaskError | RayActorError) else error


def work_off(actors: list[Any], left: list[Work], per_actor: int, bar: tqdm[Any]) -> None:
    """Give chunks to actors as these are done with others, and keep their results.

    Raises:
        DovetailError: A chunk cannot be answered.
    """
    chunks: Iterator[Work] = iter(left)
    given: dict[Any, tuple[Any, Work]] = {}

    def give(actor: Any) -> None:
        if (work := next(chunks, None)) is not None:
            file, chunk = work
            given[actor.answer.remote(file.lines(chunk))] = (actor, work)

    for actor in [actor for _ in range(per_actor) for actor in actors]:
        give(actor)
    while given:
        done, _ = ray.wait(list(given), num_returns=1, timeout=WAIT_S)
        for reference in done:
            actor, (file, chunk) = given.pop(reference)
            try:
                results, num_failed = ray.get(reference)
            except RayActorError as error:
                where = f"{str(file.source)!r}, chunk {chunk.number} of {CHUNK_LINES} lines"
                text = f"{MAX_TRIES} actors ended on {where}: {str(error).strip().splitlines()[-1]}"
                raise DovetailError(f"{text}; what is answered is kept, and the same command goes on") from None
            except RayTaskError as error:
                raise own_error(error) from None
            file.save(chunk, results, num_failed)
            bar.update(chunk.num_lines)
            give(actor)


class BatchReplica:
    """An actor: a server with its own engine, which answers chunks of lines."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Note the settings; the first call starts the server, also after Ray has started the actor again."""
        self._values = values
        self._tasks = Supervisor()
        self._start: asyncio.Task[ReplicaServer] | None = None

    async def ready(self) -> None:
        """Start.

        Raises:
            ConfigError: What the user can fix.
            EngineError: The engine cannot start.
        """
        await self._server()

    async def answer(self, data: bytes) -> tuple[bytes, int]:
        """Answer lines; returns their results in the same order, and how many were refused or failed.

        Raises:
            EngineDeadError: The engine is gone for good.
        """
        server = await self._server()
        room = asyncio.Semaphore(server.settings.max_running_requests)

        async def one(raw: bytes) -> Result:
            line = decode_line(raw)
            endpoint = endpoint_of(line.url, server.running.routes)
            if endpoint is None:
                raise ConfigError(f"url {line.url[:128]!r} is no endpoint of batches")
            async with room:
                return await run_to_end(server.running, endpoint, line.custom_id, raw)

        results = await asyncio.gather(*(one(raw) for raw in data.splitlines(keepends=True) if raw.strip()))
        return b"".join(result.text for result in results), sum(result.is_error for result in results)

    async def _server(self) -> ReplicaServer:
        if self._start is None:
            self._start = self._tasks.start("server start", self._started(), is_awaited=True)
        return await asyncio.shield(self._start)

    async def _started(self) -> ReplicaServer:
        server = ReplicaServer(ServeSettings(**self._values))
        await server.start()
        return server
