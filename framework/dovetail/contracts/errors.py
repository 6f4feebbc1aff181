"""What an author raises where a request asks for what is not served; its message goes to the client."""

from __future__ import annotations

from dovetail.errors import RequestError as RequestError
