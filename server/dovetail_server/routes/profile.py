"""`/start_profile` and `/stop_profile`: what the engine's steps do, as a trace that Perfetto opens."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.errors import RequestError
from dovetail.messages import MAX_PROFILE_STEPS, ProfileSpec
from dovetail_server.errors import catalogue as errors
from dovetail_server.http.auth import admin_only
from dovetail_server.openapi.document import FAILURES, json_route
from dovetail_server.reading.request import raw_body, read
from dovetail_server.schema.common import RequestModel
from dovetail_server.state import ReadyState, ServerState

router = APIRouter(tags=["server"], dependencies=[Depends(admin_only)])
OFF = "profiles are off; start the server with --profile-dir DIR, where they are written"
PREFIX = re.compile(r"[\w.-]{1,64}")


class ProfileRequest(RequestModel):
    """What to record; all of it may be left out, and the body too."""

    output_dir: str | None = Field(
        None, max_length=1024, description="Folder below `--profile-dir` that the files go to; that one if not given."
    )
    num_steps: int | None = Field(
        None,
        ge=1,
        le=MAX_PROFILE_STEPS,
        description=f"Steps after which it ends by itself; {MAX_PROFILE_STEPS} if not given.",
    )
    start_step: int | None = Field(
        None,
        ge=0,
        le=1 << 62,
        description="Value of the engine's step counter (`dovetail_engine_step`) at which it begins; now.",
    )
    activities: list[Literal["CPU", "GPU"]] | None = Field(
        None, min_length=1, max_length=2, description="What is recorded; what the device has if not given."
    )
    with_stack: bool | None = Field(None, description="Record where in Python each operation was called; costs time.")
    record_shapes: bool | None = Field(None, description="Record the shapes of inputs.")
    profile_prefix: str | None = Field(None, max_length=64, description="What the files' names begin with.")
    profile_by_stage: bool | None = Field(None, description="Not supported: steps mix prompts and tokens.")
    merge_profiles: bool | None = Field(None, description="Not supported: each rank has a file.")


async def profile_body(request: Request) -> ProfileRequest:
    """Read the body, which may be missing."""
    return await read(await raw_body(request) or b"{}", ProfileRequest)


@json_route(router, "/start_profile", body=ProfileRequest)
async def start_profile(body: Annotated[ProfileRequest, Depends(profile_body)], state: ReadyState) -> Response:
    """Begin to record what the engine's steps do."""
    base = profile_dir(state)
    if body.profile_by_stage:
        raise errors.unsupported("profile_by_stage", "a step computes prompts and tokens together")
    if body.merge_profiles:
        raise errors.unsupported("merge_profiles", "each rank writes a file; Perfetto opens one after the other")
    if body.profile_prefix is not None and not PREFIX.fullmatch(body.profile_prefix):
        text = "profile_prefix takes letters, digits, '.', '_' and '-', up to 64"
        raise RequestError(text, param="profile_prefix", code="invalid_value")
    folder = await asyncio.to_thread(folder_below, base, body.output_dir)
    spec = ProfileSpec(
        folder=str(folder),
        name=f"{body.profile_prefix or 'dovetail'}-{time.time_ns() // 1_000_000}",
        num_steps=body.num_steps,
        start_step=body.start_step,
        activities=tuple(body.activities or ()),
        with_stack=bool(body.with_stack),
        record_shapes=bool(body.record_shapes),
    )
    found = await state.engine.control("start_profile", spec)
    return answer({"message": "Recording.", "output_dir": str(folder), "name": spec.name, **found})


@router.post("/stop_profile", response_model=None, responses=FAILURES)
async def stop_profile(state: ReadyState) -> Response:
    """End the profile, and answer when its files are written: one for each rank. Requests wait meanwhile."""
    profile_dir(state)
    return answer({"message": "Written.", **await state.engine.control("stop_profile")})


def profile_dir(state: ServerState) -> Path:
    """Return where profiles may be written.

    Raises:
        RequestError: Nowhere.
    """
    if state.settings.profile_dir is None:
        raise RequestError(OFF, code="unsupported_route", status=404)
    return state.settings.profile_dir


def folder_below(base: Path, given: str | None) -> Path:
    """Return the folder that a request names, which is made.

    Raises:
        RequestError: It is not below `base`, wherever links lead, or cannot be made.
    """
    try:
        base = base.resolve()
        folder = (base / (given or "")).resolve()
        if not folder.is_relative_to(base):
            text = f"output_dir must be a folder below --profile-dir; {given!r} is not"
            raise RequestError(text, param="output_dir", code="invalid_value")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        text = f"output_dir {given or ''!r} cannot be used: {getattr(error, 'strerror', None) or error}"
        raise RequestError(text, param="output_dir", code="invalid_value") from None
    return folder


def answer(found: dict[str, object]) -> Response:
    """Return what the engine said.

    Raises:
        RequestError: It could not do it.
    """
    if "error" in found:
        raise RequestError(str(found["error"]), code="profile_failed", status=409)
    return Response(msgspec.json.encode(found), media_type="application/json")
