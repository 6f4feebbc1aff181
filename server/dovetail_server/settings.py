"""Settings of `dovetail serve`: the engine's, and those of the HTTP server. One field per flag.

Precedence: flags, then environment (`DOVETAIL_PORT`), then `--config file.yaml`, then the defaults here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from dovetail.config_file import read_config
from dovetail.plugin_settings import ENV_PREFIX
from dovetail.processing.text_settings import TextSettings
from dovetail.settings import Names, flag
from dovetail_server.key_settings import KeySettings
from dovetail_server.peers.arguments import file_value
from dovetail_server.setting_types import Aliases, Hosts, Origins


class ServeSettings(KeySettings, TextSettings, BaseSettings):
    """What `dovetail serve` is started with."""

    model_config = SettingsConfigDict(
        extra="forbid", validate_default=True, env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    config: Path | None = Field(
        None,
        description="YAML or TOML file with any of these settings; flags and environment variables win over it.",
        json_schema_extra=flag(common=True),
    )
    apis: Names = Field(
        default_factory=lambda: ["openai", "anthropic", "sglang"],
        description="APIs to serve, by plugin name, comma-separated: those that generate; an installed one more, such "
        "as `ollama`, is added to the three built-in ones by naming all.",
        json_schema_extra=flag(),
    )
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 for every interface.",
        json_schema_extra=flag(common=True),
    )
    port: int = Field(
        30000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.", json_schema_extra=flag(common=True)
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        le=256,
        description="Workers behind this address, each with the whole model and its own share of the GPUs or cores; "
        "needs dovetail-llm[gateway].",
        json_schema_extra=flag("dp-size", "dp", common=True),
    )
    served_model_name: Names = Field(
        default_factory=list,
        description="Names under which requests may ask for the model, comma-separated; the model path if not given.",
        json_schema_extra=flag(common=True),
    )
    model_aliases: Aliases = Field(
        default_factory=lambda: ["anthropic=claude-*", "openai=gpt-*"],
        description="Names that clients have built in and that mean the served model, comma-separated: API=PATTERN on "
        "the routes of openai, anthropic or sglang, PATTERN on all of them; * stands for any characters. Replies carry "
        "the served name. [] for none.",
        json_schema_extra=flag(),
    )
    allow_origins: Origins = Field(
        default_factory=list,
        description="Origins of web pages that may use this server, such as https://chat.example.org, "
        "comma-separated; * for all.",
        json_schema_extra=flag("allowed-origins"),
    )
    allowed_hosts: Hosts = Field(
        default_factory=list,
        description="Names under which clients reach this server, such as chat.example.org,*.lan, comma-separated; * "
        "for any. This machine's own (localhost) always work. If not given: any, but on a loopback address without "
        "--api-key this machine's own only, since web pages can give their names that address.",
        json_schema_extra=flag(),
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="Most connections at once; beyond it new ones get 503. What the limit of open files allows, if not "
        "given.",
        json_schema_extra=flag(),
    )
    max_connections_per_address: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="Most connections from one address (an IPv6 network of 64 bits is one); three quarters of "
        "--max-connections if not given, so that a gateway in front gets nearly all.",
        json_schema_extra=flag(),
    )
    header_timeout: float = Field(
        30.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds that a connection gets to send a request's headers; 0 for no limit.",
        json_schema_extra=flag(),
    )
    body_timeout: float = Field(
        30.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds that a request's body may pause, and after which --min-body-rate counts; one that is no "
        "upload gets ten times that in all. 0 for no limit.",
        json_schema_extra=flag(),
    )
    min_body_rate: int = Field(
        1024,
        ge=0,
        le=1 << 30,
        description="Bytes per second that a request's body comes at, at least, on average; 0 for no limit.",
        json_schema_extra=flag(),
    )
    keep_alive_timeout: int = Field(
        75,  # longer than clients' pools keep theirs (5 to 60 s): who sends while the server closes meets a reset
        ge=1,
        le=86400,
        description="Seconds that an idle connection is kept for another request. A gateway should give its own up "
        "earlier.",
        json_schema_extra=flag("timeout-keep-alive"),
    )
    websocket_idle_timeout: float = Field(
        600.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds that a WebSocket at /v1/responses may go without a whole message between two responses; "
        "0 for no limit.",
        json_schema_extra=flag(),
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[^/?#]+)*$",
        description="Path under which a proxy in front shows this server, such as /llm.",
        json_schema_extra=flag("fastapi-root-path"),
    )
    ssl_certfile: Path | None = Field(
        None,
        description="Certificate chain in PEM form; the server then speaks HTTPS.",
        json_schema_extra=flag(),
    )
    ssl_keyfile: Path | None = Field(
        None,
        description="Private key of --ssl-certfile; in the same file if not given.",
        json_schema_extra=flag(),
    )
    ssl_keyfile_password: SecretStr | None = Field(
        None,
        description="Password of --ssl-keyfile. Better in the environment (DOVETAIL_SSL_KEYFILE_PASSWORD).",
        json_schema_extra=flag(),
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="Most prompt tokens of all requests that run or wait; beyond it a request gets 429. 8 times the "
        "KV cache if not given.",
        json_schema_extra=flag("max-num-queued-tokens"),
    )
    max_queued_bytes: int = Field(
        256 << 20,
        ge=1024,
        le=1 << 40,
        description="Most bytes of the bodies of all requests that run or wait; beyond it a request gets 429.",
        json_schema_extra=flag(),
    )
    body_processes: int = Field(
        2,
        ge=0,
        le=256,
        description="Requests of more than 64 KiB that are parsed, rendered and tokenized at a time, each in a process "
        "that can be killed; 0 does it in the server's own.",
        json_schema_extra=flag(),
    )
    body_cpu_limit: float = Field(
        30.0,
        ge=0.1,
        le=86400,
        allow_inf_nan=False,
        description="Seconds of processor time that such a process may take for one request.",
        json_schema_extra=flag(),
    )
    metrics_style: Literal["dovetail", "vllm", "sglang"] = Field(
        "dovetail",
        description="Whose names GET /metrics uses beside Dovetail's own, for dashboards that know them.",
        json_schema_extra=flag(),
    )
    max_body_bytes: int = Field(
        32 << 20, ge=1024, le=1 << 34, description="Largest request body.", json_schema_extra=flag()
    )
    stream_interval: int = Field(
        1,
        ge=1,
        le=1 << 16,
        description="Tokens per event of a stream, after the first event; more make longer intervals and less work.",
        json_schema_extra=flag(),
    )
    stream_response_default_include_usage: bool = Field(
        False,
        description="End streams with a chunk that holds the usage, unless a request says whether it wants one.",
        json_schema_extra=flag("enable-force-include-usage"),
    )
    stream_keep_alive: float = Field(
        15.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds of silence after which a stream gets a comment, so that nobody between here and the "
        "client gives it up; also how long a stream's status waits for its first event. 0 for no limit.",
        json_schema_extra=flag("sse-keep-alive-interval"),
    )
    stream_write_timeout: float = Field(
        60.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds after which a client that reads nothing of its stream is cut off; 0 for no limit.",
        json_schema_extra=flag(),
    )
    drain_timeout: float = Field(
        30.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds that running requests get to finish after SIGTERM.",
        json_schema_extra=flag("shutdown-timeout", common=True),
    )
    drain_grace: float = Field(
        5.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds after SIGTERM, of --drain-timeout, in which new requests are still served while /health "
        "says 503 and clients hold connections open: a router that looks at it as often loses no request.",
        json_schema_extra=flag(),
    )
    max_engine_restarts: int = Field(
        16,
        ge=0,
        le=10000,
        description="Times that an engine which died or hung is started again within --engine-restart-window; beyond "
        "that the server ends, with an exit code that is not 0. 0: the first death ends it. Deaths of which one "
        "request is found guilty do not count.",
        json_schema_extra=flag(common=True),
    )
    engine_restart_window: float = Field(
        600.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds in which restarts of the engine are counted.",
        json_schema_extra=flag(),
    )
    engine_hang_timeout: float = Field(
        30.0,
        ge=0.5,
        le=86400,
        allow_inf_nan=False,
        description="Seconds within which a busy engine must compute a step, or a layer of a long one; else it counts "
        "as hanging, and is ended and started again.",
        json_schema_extra=flag(),
    )
    file_storage_path: Path | None = Field(
        None,
        description="Folder of uploaded files and batches, created when first used; dovetail in the user's data "
        "folder if not given.",
        json_schema_extra=flag(common=True),
    )
    database_url: SecretStr | None = Field(
        None,
        description="PostgreSQL for what is known of files and batches, shared by several servers: "
        "postgresql+psycopg://user@host/name; SQLite in --file-storage-path if not given.",
        json_schema_extra=flag(),
    )
    max_file_bytes: int = Field(
        512 << 20, ge=1, le=1 << 34, description="Largest uploaded file.", json_schema_extra=flag()
    )
    max_storage_bytes: int | None = Field(
        None,
        ge=1,
        le=1 << 50,
        description="Most bytes of all files together; as the disk allows if not given.",
        json_schema_extra=flag(),
    )
    min_free_disk_bytes: int = Field(
        256 << 20,
        ge=0,
        le=1 << 50,
        description="Space kept free on the disk: with less, uploads get 507 and batches pause.",
        json_schema_extra=flag(),
    )
    max_batch_lines: int = Field(
        50_000, ge=1, le=1 << 20, description="Most requests in one batch.", json_schema_extra=flag()
    )
    max_batch_requests: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Requests of batches that run at once; a quarter of --max-running-requests if not given.",
        json_schema_extra=flag(),
    )
    max_stored_responses: int = Field(
        20_000,
        ge=0,
        le=1 << 30,
        description="Replies of /v1/responses that are kept per key, the newest; 0 keeps none.",
        json_schema_extra=flag(),
    )
    max_stored_response_bytes: int = Field(
        1 << 30, ge=1 << 20, le=1 << 50, description="Most bytes of kept replies per key.", json_schema_extra=flag()
    )
    stored_response_ttl: int = Field(
        30 * 24 * 3600, ge=1, le=1 << 31, description="Seconds that a reply is kept.", json_schema_extra=flag()
    )
    unservable_tools: Literal["drop", "refuse"] = Field(
        "drop",
        description="Optional tools that a request has and this server cannot run, such as `web_search`: left out and "
        "named in the reply, or refused.",
        json_schema_extra=flag(),
    )
    unknown_fields: Literal["warn", "refuse"] = Field(
        "refuse",
        description="Fields of requests that nobody here knows: left out and counted at /metrics, or a 400.",
        json_schema_extra=flag(),
    )
    disable_playground: bool = Field(
        False,
        description="Do not serve the page for people at / and /playground; / then leads to /docs.",
        json_schema_extra=flag(),
    )
    profile_dir: Path | None = Field(
        None,
        description="Folder for profiles of the engine's steps: POST /start_profile and /stop_profile need it.",
        json_schema_extra=flag(),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="What is logged.", json_schema_extra=flag(common=True)
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="`json` makes every line of every process one JSON object, tracebacks and warnings too.",
        json_schema_extra=flag(),
    )
    log_requests: bool = Field(
        False,
        description="Log start and end of each generation request: client, hashed key, sizes, times; not its text.",
        json_schema_extra=flag("enable-log-requests", common=True),
    )
    log_slow_requests: float = Field(
        0.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds from which on a generation request gets a line that says where its time went; 0 for none.",
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
