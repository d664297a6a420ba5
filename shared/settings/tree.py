"""Every setting of every process, in one frozen tree.

Built once in `main` and handed down by sub-tree; nothing reads the environment after that. Precedence:
command line > environment (`VLM_GATEWAY__PORT=8080`) > `.env` > file named by `VLM_CONFIG` > defaults. A bad
value or an unknown key stops the process and names the field.
"""

import os
import re
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from shared.settings import SettingsError as SettingsError
from shared.settings.engine import EngineSettings
from shared.settings.group import MIB, Group, split_items
from shared.settings.limits import LimitSettings

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[1-9][0-9]{0,4})?")
PREFIX = "VLM_"
CONFIG_VARIABLE = "VLM_CONFIG"


class GatewaySettings(Group):
    """The HTTP side."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        description="Accepted API keys, comma separated. None: open, on a loopback address only.",
    )

    allow_open: bool = Field(
        default=False, description="Serve without API keys on addresses other than loopback."
    )
    request_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=86400,
        description="Deadline of a request, from its acceptance to its last token.",
    )
    header_timeout_s: float = Field(
        default=10.0, gt=0, description="Whole time for receiving a request's headers."
    )
    body_timeout_s: float = Field(
        default=30.0, gt=0, description="Whole time for receiving a request's body."
    )
    headers_after_s: float = Field(
        default=15.0,
        gt=0,
        description="Wait for the first event that long before a stream's headers go out.",
    )
    keep_alive_s: float = Field(
        default=10.0, gt=0, description="Pause between SSE comments of a waiting stream."
    )
    send_timeout_s: float = Field(
        default=30.0, gt=0, description="Cancel a stream whose client does not read."
    )
    silence_timeout_s: float = Field(
        default=30.0, gt=0, description="Look into Redis after a request has been silent that long."
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="Finish open requests that long after SIGTERM."
    )
    remote_images: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Hosts from which images are fetched, comma separated: `host` (ports 80 and 443), `host:port` or "
        "`any-public`. None: no fetching.",
    )
    image_fetch_timeout_s: float = Field(
        default=10.0, gt=0, description="Whole time for fetching one image."
    )

    @field_validator("api_keys", "remote_images", mode="before")
    @classmethod
    def split_names(cls, value: Any) -> Any:
        """Accept a comma-separated string, as environments hold it."""
        return split_items(value)

    @field_validator("remote_images")
    @classmethod
    def check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        """Take `host` and `host:port` only; no URLs or wildcards. Raises: ValueError."""
        if any(not _HOST.fullmatch(host) for host in hosts):
            raise ValueError(
                "name hosts, such as `images.example.com` or `images.example.com:8443`, or `any-public`"
            )
        return hosts


class WorkerSettings(Group):
    """The worker process around an engine."""

    id: str = Field(
        default="", description="Name of the worker; empty: host, process id and a random part."
    )
    health_host: str = Field(
        default="127.0.0.1", description="Address of the health and metrics server."
    )
    health_port: int = Field(default=0, ge=0, le=65535, description="Its port; 0 takes a free one.")
    lease_s: float = Field(
        default=10.0, gt=0.5, description="A request unattended that long goes to another worker."
    )
    heartbeat_s: float = Field(
        default=1.0,
        gt=0,
        validate_default=True,
        description="Pause between lease renewals; at most half of `lease_s`.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        le=10,
        description="Workers that one request may end before it counts as the cause and fails.",
    )
    batch_age_s: float = Field(
        default=60.0,
        gt=0,
        description="Batch requests that waited so long may queue among the interactive ones.",
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="Finish running requests that long after SIGTERM."
    )
    watchdog_s: float = Field(
        default=60.0, gt=0, description="End the process when a step takes longer."
    )
    preprocess_threads: int = Field(
        default=2, ge=1, le=64, description="Threads that decode and resize images."
    )
    decode_processes: int = Field(
        default=2,
        ge=0,
        le=64,
        description="Processes without rights that decode images; 0: the threads do it themselves.",
    )
    decode_timeout_s: float = Field(
        default=2.0,
        ge=1,
        description="CPU time for decoding a image; a third of the whole time.",
    )

    @field_validator("heartbeat_s")
    @classmethod
    def fits_in_the_lease(cls, value: float, info: ValidationInfo) -> float:
        """A lease must outlive a renewal that comes late, or healthy workers lose their requests."""
        lease_s = info.data.get("lease_s")  # absent: it is bad itself, and told
        if lease_s is not None and value > lease_s / 2:
            raise ValueError(f"must be at most half of worker.lease_s, which is {lease_s:g}")
        return value


class RedisSettings(Group):
    """How to reach Redis."""

    url: str = Field(
        default="",
        description="redis://, rediss:// or unix:// URL; empty: `vlm serve` starts its own.",
    )
    key_prefix: str = Field(
        default="vlm", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="First part of every key."
    )
    command_timeout_s: float = Field(
        default=2.0, gt=0, description="Wait for the reply of a command."
    )
    connect_timeout_s: float = Field(default=2.0, gt=0, description="Wait for a connection.")
    max_memory_bytes: int = Field(
        default=1024 * MIB,
        ge=16 * MIB,
        description="Memory of the Redis that `vlm serve` starts; a full one refuses images.",
    )


class LogSettings(Group):
    """What the processes say."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level shown."
    )
    format: Literal["text", "json"] = Field(
        default="text", description="Lines for people or for machines."
    )


class TraceSettings(Group):
    """Spans of each request."""

    export: Literal["none", "otlp"] = Field(
        default="none", description="Send spans to where OpenTelemetry's `OTEL_...` variables say."
    )


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_file=".env",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    redis_url: str = Field(default="", description="Short for `redis.url`.")
    redis: RedisSettings = RedisSettings()
    gateway: GatewaySettings = GatewaySettings()
    limits: LimitSettings = LimitSettings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
    logs: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then environment, then `.env`, then the file named by `VLM_CONFIG`."""
        assert isinstance(dotenv_settings, DotEnvSettingsSource)
        dotenv_settings.env_vars = {  # the file may serve others too, such as compose
            name: value
            for name, value in dotenv_settings.env_vars.items()
            if name.upper().startswith(PREFIX)
        }
        sources = (init_settings, env_settings, dotenv_settings)
        path = os.environ.get(CONFIG_VARIABLE)
        return (*sources, YamlConfigSettingsSource(settings_cls, path)) if path else sources
