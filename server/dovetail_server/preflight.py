"""What can be checked in milliseconds before anything heavy starts: model folder, plugins, files and the port."""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, ModelError
from dovetail_server.settings import ServeSettings

DEMO_NAME = "dovetail-demo"
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def with_demo(settings: ServeSettings) -> ServeSettings:
    """Fill in the demo model and its name where no model was given."""
    if settings.model_path is not None:
        return settings
    stray = next((name for name in settings.served_model_name if Path(name).is_dir()), None)
    if stray is not None:
        raise ConfigError(f"--served-model-name took {stray!r}, which is a folder; put the model path first")
    from dovetail.demo import MODEL_DIR

    changes: dict[str, Any] = {"model_path": str(MODEL_DIR)}
    if not settings.served_model_name:
        changes["served_model_name"] = [DEMO_NAME]
    filled = settings.model_copy(update=changes)
    filled.model_fields_set.difference_update(changes)  # the user gave none of these: plugins may propose others
    return filled


def check_model(settings: ServeSettings) -> str:
    """Return the architecture named in `config.json`.

    Raises:
        ModelError: The folder cannot be served, with the reason and the fix.
    """
    path = Path(settings.model_path or "")
    where = f"model path {str(path)!r}"
    if not path.is_dir():
        if path.suffix == ".gguf" or path.is_file():
            raise ModelError(f"{where}: is a file; give the folder with config.json and *.safetensors")
        hint = "give a folder with config.json and *.safetensors"
        if str(path).count("/") == 1 and not str(path).startswith((".", "/", "~")):
            hint = f"models are not downloaded; run `hf download {path} --local-dir DIR` and give DIR"
        raise ModelError(f"{where}: no such folder; {hint}")
    config = read_json(path / "config.json", where)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(
            f'{where}: config.json names no architecture; add for example "architectures": ["Qwen3ForCausalLM"]'
        )
    if settings.load_format != "dummy":
        check_weights(path, where)
    if settings.tokenizer_path is not None and not Path(settings.tokenizer_path).is_dir():
        raise ModelError(f"--tokenizer-path {settings.tokenizer_path!r}: no such folder; give one with tokenizer.json")
    if settings.chat_template is not None:
        from dovetail.text.templates import template_path

        template_path(settings.chat_template)
    return architectures[0]


def check_weights(path: Path, where: str) -> None:
    """Refuse a folder without safetensors, naming the converter where other weights are there."""
    if any(path.glob("*.safetensors")):
        return
    other = next((f.name for pattern in OTHER_WEIGHTS for f in sorted(path.glob(pattern))), None)
    if other is not None:
        raise ModelError(
            f"{where}: {other} is a pickle, which may run code when read and is never loaded; convert it with "
            "`transformers`: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR, safe_serialization=True)"
        )
    raise ModelError(f"{where}: no *.safetensors; finish the download, or use --load-format dummy for random weights")


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Read a JSON object from a model folder."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{where}: no {path.name}; give the folder that holds it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: {path.name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{where}: {path.name} is not a JSON object")
    return data


def bind(host: str, port: int) -> socket.socket:
    """Listen on the address, so that nobody else takes it while the model loads.

    Raises:
        ConfigError: In use, not allowed, or no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host {host!r}: no such address; give 127.0.0.1, 0.0.0.0 or one of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(bind_reason(error, host, port)) from None
    listener.setblocking(False)
    return listener


def bind_reason(error: OSError, host: str, port: int) -> str:
    """Word why an address cannot be listened on."""
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: already in use on {host}; stop the other server or give another --port"
    if error.errno == errno.EACCES:
        return f"--port {port}: not permitted; give a port of 1024 or above"
    return f"--host {host!r}: cannot listen there: {error.strerror}"
