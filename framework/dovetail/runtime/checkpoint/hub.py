"""Models by name: what is no folder is fetched from a hub, through `huggingface_hub` and its cache.

The hub's own settings hold: `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE`. Only safetensors, configuration,
tokenizer and chat template are fetched; what is in the cache already is not fetched again, and what was begun goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dovetail.base.settings import EngineSettings
from dovetail.checkpoint.formats import Formats
from dovetail.contracts.errors import ModelError
from dovetail.demo import BUNDLED, PREFIX

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""`owner/model`, as a hub names it."""
SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "chat_templates/*")
WEIGHTS = ("*.safetensors",)
NAMING_HEADERS = ("etag", "x-linked-etag", "x-repo-commit", "x-xet-hash")
NAMING_KEYS = frozenset({"sha", "path", "rfilename", "oid", "sha256", "xetHash"})
"""Where a hub says what the library calls files, and their folder."""
FILES = "/api/resolve-cache/"
"""Below it are files themselves."""
SHA256 = re.compile(r"[0-9a-f]{64}")
CHUNK = 1 << 22


def is_name(path: str) -> bool:
    """Tell whether a model path is a hub's name and no folder."""
    return NAME.fullmatch(path) is not None and not Path(path).exists()


def fetch(
    name: str, *, revision: str | None = None, cache: Path | None = None, weights: bool = True, flag: str = "model"
) -> Path:
    """Return the folder of a hub's model, after fetching what is not in the cache yet.

    Args:
        name: `owner/model`.
        revision: Branch, tag or commit; `main` if None.
        cache: Where models are kept; the hub's own cache if None.
        weights: Also fetch the weights; else what a tokenizer needs.
        flag: What the user gave it as, for messages.

    Raises:
        ModelError: It cannot be fetched, or what came is not what the hub announced; with the way out.
    """
    from huggingface_hub import snapshot_download

    where = f"{flag} {name!r}"
    known = _blobs(name, cache)
    try:
        with _checked_answers():
            folder = snapshot_download(
                name,
                revision=revision,
                cache_dir=cache,
                allow_patterns=[*SMALL, *(WEIGHTS if weights else ())],
                endpoint=os.environ.get("HF_ENDPOINT") or None,
                local_files_only=os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"},
            )
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    except Exception as error:
        raise ModelError(_reason(where, revision, error)) from None
    for blob in _blobs(name, cache) - known:
        _check(blob, where)
    return Path(folder)


@contextmanager
def _checked_answers() -> Iterator[None]:
    """Check each answer of the hub before the library makes names of files of it: it takes them as they are."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    factory = _http._GLOBAL_CLIENT_FACTORY

    def checked() -> Any:
        client = factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), check_answer]}
        return client

    set_client_factory(checked)
    try:
        yield
    finally:
        set_client_factory(factory)


def check_answer(response: Any) -> None:
    """Check what a hub's answer names: headers of a file, hashes and paths of a list.

    Args:
        response: Of httpx.

    Raises:
        ModelError: A name would lie outside of the folder that it is a name in.
    """
    named = [(key, response.headers.get(key)) for key in NAMING_HEADERS]
    if "/api/" in response.url.path and FILES not in response.url.path:  # read as JSON, whatever it says that it is
        try:
            waiting = [json.loads(response.read())]
        except (ValueError, RecursionError):  # the library says what is wrong with it
            waiting = []
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                named += [(key, value[key]) for key in NAMING_KEYS & value.keys()]
            waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for key, value in named:
        if isinstance(value, str) and not _is_name(value.removeprefix("W/").strip('"')):
            raise ModelError(f"the hub's answer names a file {value!r} ({key}), outside of the cache; use another hub")


def _is_name(name: str) -> bool:
    return "\0" not in name and not name.startswith("/") and ".." not in name.split("/")


S = TypeVar("S", bound=EngineSettings)


def with_folders(settings: S, *, weights: Callable[[], bool] | None = None) -> S:
    """Return the settings with the folders of what they name on a hub, or of bundled models.

    Args:
        settings: That may name a model there.
        weights: Says whether its weights are needed, where it has to be fetched; None: unless `--load-format` makes
            them up.

    Raises:
        ModelError: See `fetch`, or no such model is bundled.
    """
    needed = weights or (lambda: not Formats.installed(settings.load_format).is_filled)
    changes: dict[str, str] = {}
    for name, flag in (("model_path", "model"), ("tokenizer_path", "tokenizer")):
        given = getattr(settings, name)
        if given is not None and given.startswith(PREFIX) and not Path(given).exists():
            changes[name] = str(_bundled(given, flag))
        if given is None or not is_name(given):
            continue
        wants_weights = name == "model_path" and needed()
        revision = settings.revision if name == "model_path" else None
        folder = fetch(given, revision=revision, cache=settings.download_dir, weights=wants_weights, flag=flag)
        changes[name] = str(folder)
    return settings.model_copy(update=changes) if changes else settings


def _bundled(name: str, flag: str) -> Path:
    """Return the folder of a bundled model.

    Raises:
        ModelError: No such model is bundled.
    """
    if name not in BUNDLED:
        raise ModelError(f"{flag} {name!r}: no such model is bundled; possible: {', '.join(BUNDLED)}")
    return BUNDLED[name]


def _blobs(name: str, cache: Path | None) -> set[Path]:
    """Return the files of a model in the cache; those of weights are named after the hash of their content."""
    from huggingface_hub import constants

    folder = Path(cache or constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    return {path for path in folder.glob("*") if SHA256.fullmatch(path.name)}


def _check(blob: Path, where: str) -> None:
    """Compare a file that was just fetched with the hash that the hub gave.

    Raises:
        ModelError: They differ; the file is removed.
    """
    digest = hashlib.sha256()
    with blob.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != blob.name:
        blob.unlink()
        raise ModelError(
            f"{where}: a file came that is not what the hub announced (SHA-256 {digest.hexdigest()}, not {blob.name}); "
            "it was removed: start again"
        )


def _reason(where: str, revision: str | None, error: Exception) -> str:
    """Say in one line why a model could not be fetched, and what to do."""
    from huggingface_hub import errors

    at = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    local = "or give a folder with config.json, *.safetensors and tokenizer.json"
    if isinstance(error, errors.GatedRepoError):
        return f"{where}: {at} asks for its terms to be accepted there, and for a token of who did: set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{where}: {at} has no revision {revision or 'main'!r} of it; give another --revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{where}: no such folder, and {at} has no such model that this token may see; set HF_TOKEN, {local}"
    status = _status(error)
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled) and status is None:
        return f"{where}: no such folder, not in the cache, and {at} cannot be reached; fetch it where it can, {local}"
    if status in (401, 403):
        return f"{where}: {at} answers {status}; set HF_TOKEN to a token that may read it, {local}"
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return f"{where}: cannot be fetched from {at}: {reason}; start again, what has come is kept, {local}"


def _status(error: BaseException | None) -> int | None:
    while error is not None:
        response: Any = getattr(error, "response", None)
        if getattr(response, "status_code", None) is not None:
            return int(response.status_code)
        error = error.__cause__ or error.__context__
    return None
