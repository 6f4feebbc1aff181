"""Settings of `dovetail serve`: the engine's, and those of the HTTP server. One field per flag.

Precedence: flags, then environment (`DOVETAIL_PORT`), then `--config file.yaml`, then the defaults here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from dovetail.base.config_file import read_config
from dovetail.base.settings import Names, flag
from dovetail.processing.plugin_settings import ENV_PREFIX
from dovetail.processing.text_settings import TextSettings
from dovetail_server.compat.arguments import file_value
from dovetail_server.settings.keys import KeySettings
from dovetail_server.settings.media import MediaSettings
from dovetail_server.settings.types import Aliases, Hosts, Origins


class ServeSettings(KeySettings, MediaSettings, TextSettings, BaseSettings):
    """What `dovetail serve` is started with."""

    model_config = SettingsConfigDict(
        extra="forbid", validate_default=True, env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    config: Path | None = Field(
        None,
        description="YAML or TOML file with any of these settings. Flags and environment variables override it.",
        json_schema_extra=flag(common=True),
    )
    apis: Names = Field(
        default_factory=lambda: ["openai", "anthropic", "sglang"],
        description="APIs to serve, by plugin name, comma-separated. Each one listed is served, so to add one such "
        "as `ollama`, list the built-in three too.",
        json_schema_extra=flag(),
    )
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 for every interface.",
        json_schema_extra=flag(common=True),
    )
    port: int = Field(
        30000,
        ge=0,
        le=65535,
        description="Port to listen on; 0 selects a free one.",
        json_schema_extra=flag(common=True),
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        le=256,
        description="Number of workers behind one address, each with the whole model and its own GPUs or cores. "
        "Needs dovetail-llm[gateway].",
        json_schema_extra=flag("dp-size", "dp", common=True),
    )
    served_model_name: Names = Field(
        default_factory=list,
        description="Names under which requests may select the model, comma-separated. Default: the model path.",
        json_schema_extra=flag(common=True),
    )
    model_aliases: Aliases = Field(
        default_factory=lambda: ["anthropic=claude-*", "openai=gpt-*"],
        description="Names built into clients that mean the served model, comma-separated: API=PATTERN on the "
        "routes of openai, anthropic or sglang, PATTERN on all of them; * matches any characters. "
        "Responses carry the served name. []: none.",
        json_schema_extra=flag(),
    )
    allow_origins: Origins = Field(
        default_factory=list,
        description="Origins of web pages that may use this server, such as https://chat.example.org, "
        "comma-separated; * allows all.",
        json_schema_extra=flag("allowed-origins"),
    )
    allowed_hosts: Hosts = Field(
        default_factory=list,
        description="Host names that clients may use, such as chat.example.org,*.lan, comma-separated; * allows "
        "any. This machine's own names (localhost) always work. Default: any; on a loopback address "
        "without --api-key only this machine's own, because a web page can point its name there.",
        json_schema_extra=flag(),
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="Maximum concurrent connections; further ones get 503. Default: what the open-file limit allows.",
        json_schema_extra=flag(),
    )
    max_connections_per_address: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="Maximum concurrent connections from one IPv4 address or IPv6 /64. Default: three quarters of "
        "--max-connections.",
        json_schema_extra=flag(),
    )
    header_timeout: float = Field(
        30.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Maximum time to receive a request's headers; 0: no limit.",
        json_schema_extra=flag(),
    )
    body_timeout: float = Field(
        30.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Maximum pause within a request's body, and the time after which --min-body-rate applies. A "
        "body that is no upload has ten times this in total. 0: no limit.",
        json_schema_extra=flag(),
    )
    min_body_rate: int = Field(
        1024,
        ge=0,
        le=1 << 30,
        description="Minimum average rate of a request's body; 0: no limit.",
        json_schema_extra=flag(),
    )
    keep_alive_timeout: int = Field(
        75,  # longer than clients' pools keep theirs (5 to 60 s): who sends while the server closes meets a reset
        ge=1,
        le=86400,
        description="Time before an idle connection is closed. Gateways and clients should close theirs earlier.",
        json_schema_extra=flag("timeout-keep-alive"),
    )
    websocket_idle_timeout: float = Field(
        600.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Maximum time without a complete message between two responses on a WebSocket at /v1/responses; "
        "0: no limit.",
        json_schema_extra=flag(),
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[^/?#]+)*$",
        description="Path under which a proxy exposes this server, such as /llm.",
        json_schema_extra=flag("fastapi-root-path"),
    )
    ssl_certfile: Path | None = Field(
        None, description="Certificate chain in PEM form; the server then uses HTTPS.", json_schema_extra=flag()
    )
    ssl_keyfile: Path | None = Field(
        None, description="Private key of --ssl-certfile. Default: in the same file.", json_schema_extra=flag()
    )
    ssl_keyfile_password: SecretStr | None = Field(
        None,
        description="Password of --ssl-keyfile. Prefer the environment (DOVETAIL_SSL_KEYFILE_PASSWORD).",
        json_schema_extra=flag(),
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="Maximum total prompt tokens of running and queued requests; beyond it, requests get 429. "
        "Default: 8 times the KV cache.",
        json_schema_extra=flag("max-num-queued-tokens"),
    )
    max_queued_bytes: int = Field(
        256 << 20,
        ge=1024,
        le=1 << 40,
        description="Maximum total body size of running and queued requests; beyond it, requests get 429.",
        json_schema_extra=flag(),
    )
    body_processes: int = Field(
        2,
        ge=0,
        le=256,
        description="Number of processes that parse, template and tokenize request bodies over 64 KiB; each can be "
        "killed. 0: the server process does it.",
        json_schema_extra=flag(),
    )
    body_cpu_limit: float = Field(
        30.0,
        ge=0.1,
        le=86400,
        allow_inf_nan=False,
        description="Maximum CPU time of such a process per request.",
        json_schema_extra=flag(),
    )
    metrics_style: Literal["dovetail", "vllm", "sglang"] = Field(
        "dovetail",
        description="Metric names to add at GET /metrics, for existing dashboards.",
        json_schema_extra=flag(),
    )
    max_body_bytes: int = Field(
        32 << 20, ge=1024, le=1 << 34, description="Maximum size of a request body.", json_schema_extra=flag()
    )
    stream_interval: int = Field(
        1,
        ge=1,
        le=1 << 16,
        description="Tokens per event of a stream, after the first event. More means fewer events and less CPU time.",
        json_schema_extra=flag(),
    )
    stream_response_default_include_usage: bool = Field(
        False,
        description="End streams with a usage chunk, unless the request sets it.",
        json_schema_extra=flag("enable-force-include-usage"),
    )
    stream_keep_alive: float = Field(
        15.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Idle time before a stream sends an SSE comment, so that no intermediary times it out. Also the "
        "maximum wait for the first event before the status is sent. 0: no limit.",
        json_schema_extra=flag("sse-keep-alive-interval"),
    )
    stream_write_timeout: float = Field(
        60.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Time after which a client that reads nothing from its stream is disconnected; 0: no limit.",
        json_schema_extra=flag(),
    )
    drain_timeout: float = Field(
        30.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Time for running requests to finish after SIGTERM.",
        json_schema_extra=flag("shutdown-timeout", common=True),
    )
    drain_grace: float = Field(
        5.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Time after SIGTERM, within --drain-timeout, during which new requests are still served, "
        "/health is 503 and clients keep their connections. A router that checks health this often "
        "loses no request.",
        json_schema_extra=flag(),
    )
    max_engine_restarts: int = Field(
        16,
        ge=0,
        le=10000,
        description="Maximum engine restarts after a crash or hang within --engine-restart-window. Beyond it, the "
        "server exits with an error code; 0: at the first crash. Crashes attributed to a single request "
        "do not count.",
        json_schema_extra=flag(common=True),
    )
    engine_restart_window: float = Field(
        600.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="Time window in which engine restarts are counted.",
        json_schema_extra=flag(),
    )
    engine_hang_timeout: float = Field(
        30.0,
        ge=0.5,
        le=86400,
        allow_inf_nan=False,
        description="Maximum time for a busy engine to compute a step, or a layer of a long step. Beyond it, the "
        "engine is killed and restarted.",
        json_schema_extra=flag(),
    )
    file_storage_path: Path | None = Field(
        None,
        description="Directory of uploaded files and batches, created at first use. Default: dovetail in the user's "
        "data directory.",
        json_schema_extra=flag(common=True),
    )
    database_url: SecretStr | None = Field(
        None,
        description="PostgreSQL database for files and batches, shared by several servers: "
        "postgresql+psycopg://user@host/name. Default: SQLite in --file-storage-path.",
        json_schema_extra=flag(),
    )
    max_file_bytes: int = Field(
        512 << 20, ge=1, le=1 << 34, description="Maximum size of an uploaded file.", json_schema_extra=flag()
    )
    max_storage_bytes: int | None = Field(
        None,
        ge=1,
        le=1 << 50,
        description="Maximum total size of all files. Default: the disk.",
        json_schema_extra=flag(),
    )
    min_free_disk_bytes: int = Field(
        256 << 20,
        ge=0,
        le=1 << 50,
        description="Minimum free disk space; below it, uploads get 507 and batches pause.",
        json_schema_extra=flag(),
    )
    max_batch_lines: int = Field(
        50_000, ge=1, le=1 << 20, description="Maximum number of requests in one batch.", json_schema_extra=flag()
    )
    max_batch_requests: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Maximum concurrent requests of batches. Default: a quarter of --max-running-requests.",
        json_schema_extra=flag(),
    )
    max_stored_responses: int = Field(
        20_000,
        ge=0,
        le=1 << 30,
        description="Maximum stored responses of /v1/responses per key; the newest are retained. 0: none.",
        json_schema_extra=flag(),
    )
    max_stored_response_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        le=1 << 50,
        description="Maximum total size of stored responses per key.",
        json_schema_extra=flag(),
    )
    stored_response_ttl: int = Field(
        30 * 24 * 3600, ge=1, le=1 << 31, description="Time that a response is stored.", json_schema_extra=flag()
    )
    unservable_tools: Literal["drop", "refuse"] = Field(
        "drop",
        description="Optional tools in a request that this server cannot run, such as `web_search`: drop them and "
        "name them in the response, or reject the request.",
        json_schema_extra=flag(),
    )
    unknown_fields: Literal["warn", "refuse"] = Field(
        "refuse",
        description="Request fields that Dovetail does not know: drop and count them at /metrics, or reject the "
        "request with 400.",
        json_schema_extra=flag(),
    )
    disable_playground: bool = Field(
        False,
        description="Do not serve the playground at / and /playground; / then redirects to /docs.",
        json_schema_extra=flag(),
    )
    profile_dir: Path | None = Field(
        None,
        description="Directory for profiles of engine steps; required by POST /start_profile and /stop_profile.",
        json_schema_extra=flag(),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum level of log lines.", json_schema_extra=flag(common=True)
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="Format of log lines; `json`: one JSON object per line from every process, including tracebacks "
        "and warnings.",
        json_schema_extra=flag(),
    )
    log_requests: bool = Field(
        False,
        description="Log start and end of each generation request: client, hashed key, sizes, times; never its text.",
        json_schema_extra=flag("enable-log-requests", common=True),
    )
    log_slow_requests: float = Field(
        0.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Log a time breakdown of generation requests that take at least this long; 0: off.",
        json_schema_extra=flag(),
    )
    disable_access_log: bool = Field(
        False,
        description="Do not log a line per HTTP request.",
        json_schema_extra=flag("disable-uvicorn-access-log"),
    )

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
