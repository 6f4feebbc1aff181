"""Settings of `dovetail serve`: the engine's, and those of the HTTP server. One field per flag.

Precedence: flags, then environment (`DOVETAIL_PORT`), then `--config file.yaml`, then the defaults here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, SecretStr, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from dovetail.base.config_file import read_config
from dovetail.base.settings import Names, Seconds, Settings, setting
from dovetail.processing.plugin_settings import ENV_PREFIX
from dovetail.processing.text_settings import TextSettings, read_object
from dovetail_server.compat.arguments import file_value
from dovetail_server.settings.types import Aliases, ApiKey, ApiKeys, Hosts, Origins

# Settings that say who may use the server.


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


# Settings that say what images requests may have, and where these may come from.


MOST = 1024
"""Images that an operator may allow a request."""
MAX_IMAGES = 16
"""Of a request, where the operator says nothing."""
KINDS = ("image", "video", "audio")
HINTS = ("count", "width", "height")
"""Keys of vLLM's form. It plans memory for an image of that size; here that is the largest one that is served."""


def count_of(value: object) -> object:
    """Accept `{"count": 2}` for 2."""
    if isinstance(value, bool):
        raise ValueError("is no number of images")
    if not isinstance(value, dict):
        return value
    if unknown := sorted(set(value) - set(HINTS)):
        raise ValueError(f"{unknown[0]!r} is unknown; possible: {', '.join(HINTS)}")
    if "count" not in value:
        raise ValueError('has no count; give {"count": N}')
    return value["count"]


def check_limits(limits: dict[str, int]) -> dict[str, int]:
    """Refuse limits of what is not there, and of videos and sound others than 0."""
    for kind, most in limits.items():
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is unknown; possible: {', '.join(KINDS)}")
        if kind != "image" and most:
            raise ValueError(f"{kind} is not read here; give it 0, or leave it out")
        if not 0 <= most <= MOST:
            raise ValueError(f"{kind} is {most}; possible: 0 to {MOST}")
    return limits


def check_folder(path: Path | None) -> Path | None:
    """Refuse what is no directory: a typing mistake would refuse every request."""
    if path is not None and not path.is_dir():
        raise ValueError(f"{path} is no directory; give one that is there, with images below it")
    return path


Count = Annotated[int, BeforeValidator(count_of)]
Limits = Annotated[dict[str, Count], NoDecode, BeforeValidator(read_object), AfterValidator(check_limits)]


class MediaSettings(Settings):
    """Images of requests."""

    limit_mm_per_prompt: Limits = setting(default_factory=lambda: {"image": MAX_IMAGES})
    """Maximum number of images in a request: {"image": N}, or vLLM's {"image": {"count": N}}, whose width and height
    change nothing; 0: none, and the model has no vision tower.
    """
    image_cache_bytes: int = setting(512 << 20, ge=0)
    """Maximum memory for decoded images that are kept for later requests; 0: none is."""
    allowed_media_domains: Hosts = setting(default_factory=list)
    """Hosts whose images at http and https URLs are fetched, such as img.example.org,*.cdn.example, comma-separated; *
    allows any. Only public addresses are connected to. Default: none.
    """
    allowed_local_media_path: Annotated[Path | None, AfterValidator(check_folder)] = setting(None)
    """Directory below which images at file:// URLs are read. Default: none."""


class ServeSettings(KeySettings, MediaSettings, TextSettings, BaseSettings):
    """What `dovetail serve` is started with."""

    model_config = SettingsConfigDict(
        extra="forbid", validate_default=True, env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    config: Path | None = setting(None, common=True)
    """YAML or TOML file with any of these settings. Flags and environment variables override it."""
    apis: Names = setting(default_factory=lambda: ["openai", "anthropic", "sglang"])
    """APIs to serve, by plugin name, comma-separated. Each one listed is served, so to add one such as `ollama`, list
    the built-in three too.
    """
    host: str = setting("127.0.0.1", common=True)
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = setting(30000, ge=0, le=65535, common=True)
    """Port to listen on; 0 selects a free one."""
    data_parallel_size: int = setting(1, "dp-size", "dp", ge=1, le=256, common=True)
    """Number of workers behind one address, each with the whole model and its own GPUs or cores. Needs
    dovetail-llm[gateway].
    """
    served_model_name: Names = setting(default_factory=list, common=True)
    """Names under which requests may select the model, comma-separated. Default: the model path."""
    model_aliases: Aliases = setting(default_factory=lambda: ["anthropic=claude-*", "openai=gpt-*"])
    """Names built into clients that mean the served model, comma-separated: API=PATTERN on the routes of openai,
    anthropic or sglang, PATTERN on all of them; * matches any characters. Responses carry the served name. []: none.
    """
    allow_origins: Origins = setting(..., "allowed-origins", default_factory=list)
    """Origins of web pages that may use this server, such as https://chat.example.org, comma-separated; * allows all.
    """
    allowed_hosts: Hosts = setting(default_factory=list)
    """Host names that clients may use, such as chat.example.org,*.lan, comma-separated; * allows any. This machine's
    own names (localhost) always work. Default: any; on a loopback address without --api-key only this machine's own,
    because a web page can point its name there.
    """
    max_connections: int | None = setting(None, ge=1, le=1 << 20)
    """Maximum concurrent connections; further ones get 503. Default: what the open-file limit allows."""
    max_connections_per_address: int | None = setting(None, ge=1, le=1 << 20)
    """Maximum concurrent connections from one IPv4 address or IPv6 /64. Default: three quarters of --max-connections.
    """
    header_timeout: Seconds = setting(30.0)
    """Maximum time to receive a request's headers; 0: no limit."""
    body_timeout: Seconds = setting(30.0)
    """Maximum pause within a request's body, and the time after which --min-body-rate applies. A body that is no upload
    has ten times this in total. 0: no limit.
    """
    min_body_rate: int = setting(1024, ge=0, le=1 << 30)
    """Minimum average rate of a request's body; 0: no limit."""
    # Longer than clients' pools keep theirs (5 to 60 s): who sends while the server closes meets a reset.
    keep_alive_timeout: int = setting(75, "timeout-keep-alive", ge=1, le=86400)
    """Time before an idle connection is closed. Gateways and clients should close theirs earlier."""
    websocket_idle_timeout: Seconds = setting(600.0)
    """Maximum time without a complete message between two responses on a WebSocket at /v1/responses; 0: no limit."""
    root_path: str = setting("", "fastapi-root-path", pattern=r"^(/[^/?#]+)*$")
    """Path under which a proxy exposes this server, such as /llm."""
    ssl_certfile: Path | None = setting(None)
    """Certificate chain in PEM form; the server then uses HTTPS."""
    ssl_keyfile: Path | None = setting(None)
    """Private key of --ssl-certfile. Default: in the same file."""
    ssl_keyfile_password: SecretStr | None = setting(None)
    """Password of --ssl-keyfile. Prefer the environment (DOVETAIL_SSL_KEYFILE_PASSWORD)."""
    max_queued_tokens: int | None = setting(None, "max-num-queued-tokens", ge=1, le=1 << 40)
    """Maximum total prompt tokens of running and queued requests; beyond it, requests get 429. Default: 8 times the KV
    cache.
    """
    max_queued_bytes: int = setting(256 << 20, ge=1024, le=1 << 40)
    """Maximum total body size of running and queued requests; beyond it, requests get 429."""
    body_processes: int | None = setting(None, ge=0, le=256)
    """Number of processes that parse, template and tokenize request bodies over 64 KiB, and read images; each can be
    killed. Default: a quarter of the cores, 2 to 8. 0: the server process does it.
    """
    body_cpu_limit: float = setting(30.0, ge=0.1, le=86400, allow_inf_nan=False)
    """Maximum CPU time of such a process per request."""
    metrics_style: Literal["dovetail", "vllm", "sglang"] = setting("dovetail")
    """Metric names to add at GET /metrics, for existing dashboards."""
    max_body_bytes: int = setting(32 << 20, ge=1024, le=1 << 34)
    """Maximum size of a request body."""
    stream_interval: int = setting(1, ge=1, le=1 << 16)
    """Tokens per event of a stream, after the first event. More means fewer events and less CPU time."""
    stream_response_default_include_usage: bool = setting(False, "enable-force-include-usage")
    """End streams with a usage chunk, unless the request sets it."""
    stream_keep_alive: Seconds = setting(15.0, "sse-keep-alive-interval")
    """Idle time before a stream sends an SSE comment, so that no intermediary times it out. Also the maximum wait for
    the first event before the status is sent. 0: no limit.
    """
    stream_write_timeout: Seconds = setting(60.0)
    """Time after which a client that reads nothing from its stream is disconnected; 0: no limit."""
    drain_timeout: Seconds = setting(30.0, "shutdown-timeout", common=True)
    """Time for running requests to finish after SIGTERM."""
    drain_grace: Seconds = setting(5.0)
    """Time after SIGTERM, within --drain-timeout, during which new requests are still served, /health is 503 and
    clients keep their connections. A router that checks health this often loses no request.
    """
    max_engine_restarts: int = setting(16, ge=0, le=10000, common=True)
    """Maximum engine restarts after a crash or hang within --engine-restart-window. Beyond it, the server exits with an
    error code; 0: at the first crash. Crashes attributed to a single request do not count.
    """
    engine_restart_window: float = setting(600.0, gt=0, le=86400, allow_inf_nan=False)
    """Time window in which engine restarts are counted."""
    engine_hang_timeout: float = setting(30.0, ge=0.5, le=86400, allow_inf_nan=False)
    """Maximum time for a busy engine to compute a step, or a layer of a long step. Beyond it, the engine is killed and
    restarted.
    """
    file_storage_path: Path | None = setting(None, common=True)
    """Directory of uploaded files and batches, created at first use. Default: dovetail in the user's data directory."""
    database_url: SecretStr | None = setting(None)
    """PostgreSQL database for files and batches, shared by several servers: postgresql+psycopg://user@host/name.
    Default: SQLite in --file-storage-path.
    """
    max_file_bytes: int = setting(512 << 20, ge=1, le=1 << 34)
    """Maximum size of an uploaded file."""
    max_storage_bytes: int | None = setting(None, ge=1, le=1 << 50)
    """Maximum total size of all files. Default: the disk."""
    min_free_disk_bytes: int = setting(256 << 20, ge=0, le=1 << 50)
    """Minimum free disk space; below it, uploads get 507 and batches pause."""
    max_batch_lines: int = setting(50_000, ge=1, le=1 << 20)
    """Maximum number of requests in one batch."""
    max_batch_requests: int | None = setting(None, ge=1, le=65536)
    """Maximum concurrent requests of batches. Default: a quarter of --max-running-requests."""
    max_stored_responses: int = setting(20_000, ge=0, le=1 << 30)
    """Maximum stored responses of /v1/responses per key; the newest are retained. 0: none."""
    max_stored_response_bytes: int = setting(1 << 30, ge=1 << 20, le=1 << 50)
    """Maximum total size of stored responses per key."""
    stored_response_ttl: int = setting(30 * 24 * 3600, ge=1, le=1 << 31)
    """Time that a response is stored."""
    unservable_tools: Literal["drop", "refuse"] = setting("drop")
    """Optional tools in a request that this server cannot run, such as `web_search`: drop them and name them in the
    response, or reject the request.
    """
    unknown_fields: Literal["warn", "refuse"] = setting("refuse")
    """Request fields that Dovetail does not know: drop and count them at /metrics, or reject the request with 400."""
    disable_playground: bool = setting(False)
    """Do not serve the playground at / and /playground; / then redirects to /docs."""
    profile_dir: Path | None = setting(None)
    """Directory for profiles of engine steps; required by POST /start_profile and /stop_profile."""
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", common=True)
    """Minimum level of log lines."""
    log_format: Literal["text", "json"] = setting("text")
    """Format of log lines; `json`: one JSON object per line from every process, including tracebacks and warnings."""
    log_requests: bool = setting(False, "enable-log-requests", common=True)
    """Log start and end of each generation request: client, hashed key, sizes, times; never its text."""
    log_slow_requests: Seconds = setting(0.0)
    """Log a time breakdown of generation requests that take at least this long; 0: off."""
    disable_access_log: bool = setting(False, "disable-uvicorn-access-log")
    """Do not log a line per HTTP request."""

    @model_validator(mode="after")
    def without_images(self) -> ServeSettings:
        """Serve the text part of a model that sees, without its tower, where no request may have an image."""
        if not self.limit_mm_per_prompt.get("image", 1):
            self.processor = None
        self.times_images |= self.max_image_patches is None
        self.model_fields_set.discard("times_images")  # nobody gave it: a gateway passes on what was given
        return self

    @property
    def no_decoder(self) -> str:
        """The flag that leaves none."""
        has_images = self.limit_mm_per_prompt.get("image", 1)
        flag = "--body-processes 0" if has_images else '--limit-mm-per-prompt {"image": 0}'
        return f"this server was started with {flag}" if self.body_processes == 0 or not has_images else ""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, configuration file, in this order."""
        return init_settings, env_settings, ConfigFileSource(settings_cls)


class ConfigFileSource(PydanticBaseSettingsSource):
    """Reads the file that `--config` or `DOVETAIL_CONFIG` names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Not used: the file is read whole."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """Return the file's settings under their field names."""
        path = self.current_state.get("config")
        return read_config(Path(path), ServeSettings, file_value) if path else {}
