"""Ray's own front of `ray.serve.llm`, where FastAPI is 0.137 or newer: `ingress_cls="dovetail.ray:Ingress"`.

Ray tells FastAPI by the signatures of the front's methods that `self` is the replica. It sets them in the process that
starts the application; a replica imports the same methods anew, without them. FastAPI 0.137 began to read signatures
when the first request comes, in the replica, and then asks the client for a parameter `self`: every request gets a 400.
So the replica makes the front once more for itself, which sets them there.
"""

from __future__ import annotations

from typing import Any

from dovetail_server.ray.llm_server import types

types()  # says what to install; the next line would fail without it
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress  # noqa: E402


class Ingress(OpenAiIngress):  # type: ignore[misc, unused-ignore]  # Ray need not be installed
    """Ray's `OpenAiIngress`, with methods whose signatures FastAPI can read in a replica."""

    def __init__(self, *args: Any, **more: Any) -> None:
        make_fastapi_ingress(Ingress)
        super().__init__(*args, **more)
