"""Settings that say who may use the server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from dovetail.settings import flag
from dovetail_server.setting_types import ApiKey, ApiKeys


class KeySettings(BaseModel):
    """Keys, and what is open without one."""

    api_key: ApiKeys = Field(
        default_factory=list,
        description="Key that every request must carry; may be given several times. Better in the environment "
        "(DOVETAIL_API_KEY, comma-separated) or the file: other users of the machine see command lines.",
        json_schema_extra=flag(common=True),
    )
    admin_api_key: ApiKey = Field(
        None,
        description="Key that /flush_cache, /start_profile and other admin routes need; it opens everything else too.",
        json_schema_extra=flag(),
    )
    resume_key: ApiKey = Field(
        None,
        description="Key that this server and the gateways before it share, so that these can move a stream here from "
        "a server that is gone. Better in the environment (DOVETAIL_RESUME_KEY).",
        json_schema_extra=flag(),
    )
    keys_file: Path | None = Field(
        None,
        description="YAML file with the hashes of keys, their roles, weights and limits; read again when it changes. "
        "`dovetail hash-key` prints a key's hash.",
        json_schema_extra=flag(),
    )
    isolate_prefix_cache: Literal["shared", "key"] = Field(
        "shared",
        description="`key`: what one key's prompts left in the prefix cache is not found by another key's. Default: "
        "all keys share the cache, which `cached_tokens` and times to the first token show.",
        json_schema_extra=flag(),
    )
    closed_probes: bool = Field(
        False,
        description="Let /health, /readyz, /health_generate and /ping ask for a key, too; /livez never does.",
        json_schema_extra=flag(),
    )
    open_metrics: bool = Field(
        False,
        description="Let /metrics answer without a key, for a scraper that has none.",
        json_schema_extra=flag(),
    )

    @model_validator(mode="after")
    def check_distinct_keys(self) -> KeySettings:
        """Refuse an admin's key that is also a user's: it would protect nothing."""
        if self.admin_api_key is not None and self.admin_api_key in self.api_key:
            raise ValueError("--admin-api-key is one of the keys of --api-key; give the admin another key")
        return self
