"""What can be checked in milliseconds before anything heavy starts: model folder, plugins, files and the port."""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ConfigError
from dovetail.runtime.checkpoint.hub import with_folders
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.tenants.keys_file import read_keys_file

DEMO_NAME = "dovetail-demo"


def with_model(settings: ServeSettings) -> ServeSettings:
    """Fill in the demo model and its name where no model was given; fetch one that is a hub's name.

    Raises:
        ConfigError: The model's folder stands in the wrong place.
        ModelError: It cannot be fetched.
    """
    if settings.model_path is not None:
        found = with_folders(settings)
        if found.model_path != settings.model_path and not settings.served_model_name:
            found = found.model_copy(update={"served_model_name": [settings.model_path]})
            found.model_fields_set.discard("served_model_name")
        return found
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


def check_certificate(settings: ServeSettings) -> None:
    """Refuse a certificate or key that cannot be used.

    Raises:
        ConfigError: Naming the flag.
    """
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise ConfigError(f"--ssl-keyfile {str(settings.ssl_keyfile)!r}: give --ssl-certfile, too")
        return
    for name, path in (("--ssl-certfile", settings.ssl_certfile), ("--ssl-keyfile", settings.ssl_keyfile)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{name} {str(path)!r}: no such file")
    password = settings.ssl_keyfile_password
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            settings.ssl_certfile,
            settings.ssl_keyfile,
            password=lambda: "" if password is None else password.get_secret_value(),
        )
    except (ssl.SSLError, OSError) as error:
        text = f"--ssl-certfile {str(settings.ssl_certfile)!r}: certificate and key cannot be used: {error}"
        raise ConfigError(text) from None


def check_keys(settings: ServeSettings) -> None:
    """Refuse a file of keys that cannot be used.

    Raises:
        ConfigError: With the line of the file and the field.
    """
    if settings.keys_file is not None:
        read_keys_file(settings.keys_file)


def check_storage(settings: ServeSettings) -> None:
    """Refuse a database that batches cannot use; whether it answers shows when it is needed.

    Raises:
        ConfigError: Another kind of database, or its driver is missing.
    """
    if settings.database_url is not None:
        from dovetail_server.storage.database import database_url

        database_url(settings.database_url.get_secret_value(), Path())


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
