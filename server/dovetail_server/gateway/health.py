"""Asks workers whether they are ready, and refuses those that do not fit: another version, or another model."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import aiohttp

import dovetail
from dovetail.contracts.errors import ConfigError
from dovetail_server.gateway.fleet import Fleet, Worker
from dovetail_server.http.journal import KEY_HEADER, PATH

logger = logging.getLogger("dovetail.server")
STARTING_S = 0.1
READY_S = 0.5
"""Time between two questions."""
ANSWER_S = 5.0
"""A worker that does not answer for so long gets no new requests."""
SILENT = f"no answer in {ANSWER_S:g} s"
STUCK = 3
"""Questions without an answer after which what is open on a worker is given up."""
TIMEOUT = aiohttp.ClientTimeout(total=ANSWER_S)


@dataclass(slots=True)
class WorkerHealth:
    """Keeps `Worker.is_ready` true to what the workers say.

    Attributes:
        fleet: The workers.
        session: For the questions.
        key: A key that the workers know, if they ask for one.
        are_ours: They were started by this process, so that they are what it is.
    """

    fleet: Fleet
    session: aiohttp.ClientSession
    key: str | None
    are_ours: bool
    resume_key: str | None = None
    _models: list[str] | None = field(default=None)

    async def watch(self, worker: Worker) -> None:
        """Ask one worker, for ever."""
        num_silent = 0
        while True:
            why = await self.ask(worker)
            num_silent = num_silent + 1 if why == SILENT else 0
            if num_silent >= STUCK and worker.has_served:
                num_silent = 0
                logger.error(
                    "Worker %s is unresponsive: %d times %s. Moving its streams to other workers.",
                    worker.tag,
                    STUCK,
                    SILENT,
                )
                for give_up in list(worker.when_stuck):
                    give_up()
            if why is None and not worker.is_ready:
                why = await self._check(worker)
            if why is None:
                if not worker.is_ready:
                    self.fleet.is_now_ready(worker)
            else:
                if worker.is_ready:
                    logger.warning("Worker %s takes no requests: %s.", worker.tag, why)
                worker.is_lost(why)
            await asyncio.sleep(READY_S if worker.is_ready else STARTING_S)

    async def ask(self, worker: Worker) -> str | None:
        """Return why a worker takes no requests, or None."""
        try:
            async with self.session.get(f"{worker.url}/readyz", headers=self._headers(), timeout=TIMEOUT) as reply:
                if reply.status == 200:
                    return None
                body = await reply.json(content_type=None)
                return str(body.get("reason", f"/readyz says {reply.status}")) if isinstance(body, dict) else "unready"
        except TimeoutError:
            return SILENT
        except (aiohttp.ClientError, OSError) as error:
            return f"cannot be reached: {error}"
        except ValueError:
            return "/readyz answers no JSON; is it a Dovetail server?"

    async def _check(self, worker: Worker) -> str | None:
        """Return why a worker that has become ready does not fit."""
        if self.are_ours:
            return None
        try:
            await self.check(worker)
        except ConfigError as error:
            if worker.refusal is None:
                logger.error("%s", error)
            worker.refusal = str(error)
            return worker.refusal
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return f"cannot be asked what it is: {error}"
        worker.refusal = None
        return None

    async def check(self, worker: Worker) -> None:
        """Compare a worker with this process and with the worker that was the first to be ready.

        Raises:
            ConfigError: It has another version, another model, or does not know the key.
        """
        await self._check_resume(worker)
        version = (await self._get(worker, "/version")).get("version")
        if version != dovetail.__version__:
            raise ConfigError(
                f"--worker {worker.url}: it is Dovetail {version}, and this gateway {dovetail.__version__}; "
                "run one version on all hosts"
            )
        models = [str(model["id"]) for model in (await self._get(worker, "/v1/models"))["data"]]
        if self._models is None:
            self._models = models
        elif models != self._models:
            raise ConfigError(
                f"--worker {worker.url}: it serves {', '.join(models)}, and others {', '.join(self._models)}; "
                "give workers of one model, under one name (--served-model-name)"
            )

    async def _check_resume(self, worker: Worker) -> None:
        """See that a worker knows the resume key.

        Raises:
            ConfigError: It has none, or another one.
        """
        if self.resume_key is None:
            return
        headers = {**self._headers(), KEY_HEADER: self.resume_key}
        async with self.session.post(worker.url + PATH, data=b"", headers=headers, timeout=TIMEOUT) as reply:
            if reply.status in (403, 404):
                has = "has no --resume-key" if reply.status == 404 else "has another --resume-key"
                raise ConfigError(
                    f"--worker {worker.url}: it {has}; give it and this gateway the same, or none to both"
                )

    async def _get(self, worker: Worker, path: str) -> dict[str, Any]:
        async with self.session.get(worker.url + path, headers=self._headers(), timeout=TIMEOUT) as reply:
            if reply.status in (401, 403):
                raise ConfigError(
                    f"--worker {worker.url}: it does not take this gateway's key; give both the same --api-key, "
                    "or this gateway a key of the worker's --keys-file, which has only hashes, as --admin-api-key"
                )
            if reply.status != 200:
                raise ConfigError(f"--worker {worker.url}: {path} answers {reply.status}; is it a Dovetail server?")
            body = await reply.json(content_type=None)
            if not isinstance(body, dict):
                raise ConfigError(f"--worker {worker.url}: {path} answers no object; is it a Dovetail server?")
            return body

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}
