"""Settings that say who may use the server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from dovetail.base.settings import Settings, setting
from dovetail_server.settings.types import ApiKey, ApiKeys


class KeySettings(Settings):
    """Keys, and what is open without one."""

    api_key: ApiKeys = setting(default_factory=list, common=True)
    """Key that every request must carry; repeatable. Prefer the environment (DOVETAIL_API_KEY, comma-separated) or the
    file, because other users of the machine can read command lines.
    """
    admin_api_key: ApiKey = setting(None)
    """Key for /flush_cache, /start_profile and other admin routes; it opens everything else too."""
    resume_key: ApiKey = setting(None)
    """Key shared by this server and its gateways, which lets them move a stream here from a crashed server. Prefer the
    environment (DOVETAIL_RESUME_KEY).
    """
    keys_file: Path | None = setting(None)
    """YAML file with hashes of keys, their roles, weights and limits; read again when it changes. `dovetail hash-key`
    prints a key's hash.
    """
    isolate_prefix_cache: Literal["shared", "key"] = setting("shared")
    """`key`: no key reuses another key's cached prefixes. `shared`: all keys share the cache, which is visible in
    `cached_tokens` and TTFT.
    """
    closed_probes: bool = setting(False)
    """Require a key for /health, /readyz, /health_generate and /ping too; /livez never needs one."""
    open_metrics: bool = setting(False)
    """Serve /metrics without a key, for a scraper that has none."""

    @model_validator(mode="after")
    def check_distinct_keys(self) -> KeySettings:
        """Refuse an admin's key that is also a user's: it would protect nothing."""
        if self.admin_api_key is not None and self.admin_api_key in self.api_key:
            raise ValueError("--admin-api-key is one of the keys of --api-key; give the admin another key")
        return self
