"""`/v1/embeddings`: refused by every model that this server runs.

An embedding is what an embedding model was trained to give; the hidden state of a generative model's last token is not
one. The engine runs generative architectures only, so the honest answer is an error that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.errors import RequestError
from dovetail_server.openai.embeddings import EmbeddingRequest

if TYPE_CHECKING:
    from dovetail_server.state import ServerState


def refusal(state: ServerState, request: EmbeddingRequest) -> RequestError:
    """Return the error for a well-formed request.

    Raises:
        RequestError: 404, the model is not served.
    """
    name = state.check_model(request.model)
    text = (
        f"the model {name!r} ({state.info.architecture}) generates text and gives no embeddings; "
        "this server runs generative models only: send the request to a server of an embedding model"
    )
    return RequestError(text, param="model", code="unsupported_model")
