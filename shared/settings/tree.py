"""Every setting of every process, in one frozen tree.

`main` builds it and passes its groups to components; nothing reads the environment afterwards. Precedence:
command line > environment (`VLM_GATEWAY__PORT=8080`) > `.env` > file named by `VLM_CONFIG` > defaults. A bad
value or an unknown key stops the process and names the field.
"""

import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.settings import SettingsError as SettingsError
from shared.settings.limits import MIB, Group, LimitSettings
from shared.settings.redis_url import RedisUrl, split_shards

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[1-9][0-9]{0,4})?")
_ORIGIN = re.compile(r"https?://[a-z0-9.-]{1,253}(:[1-9][0-9]{0,4})?|[a-z][a-z0-9+.-]*://[\w.-]+")
#: Names of adapters, which are served as `model:name`.
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

PREFIX = "VLM_"
CONFIG_VARIABLE = "VLM_CONFIG"


def _split_items(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


def _read_json(value: Any) -> Any:
    """Raises: ValueError."""
    with suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        return value
    raise ValueError('write a JSON object, {"NAME": ...}; `vlm settings` has an example')


T = TypeVar("T")
#: JSON in the environment.
Json = Annotated[dict[str, T], NoDecode, BeforeValidator(_read_json)]
#: Comma-separated in the environment.
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_items)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_items)]


def _check(is_valid: Callable[[Any], bool], problem: str) -> AfterValidator:
    """Refuse invalid values. `problem`: the error message, with what to write instead."""

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _are_names(models: Mapping[str, str]) -> bool:
    """True if models can have these names, which appear in headers and logs."""
    return all(name.strip() and name.isprintable() for pair in models.items() for name in pair)


def _is_network(text: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_network(text))
    return False


def _is_search_url(url: str) -> bool:
    with suppress(ValueError):
        parts = urlsplit(url)
        place = parts.path if parts.scheme == "unix" else parts.hostname and parts.port
        return not url or bool(parts.scheme in ("unix", "http") and place)
    return False


class ModelDefaults(Group):
    """Defaults of a model for sampling fields that a request does not set."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.1, le=10)
    max_tokens: int | None = Field(default=None, ge=1)


class OidcSettings(Group):
    """Callers with tokens of an OpenID Connect issuer."""

    issuer: str = ""
    """https:// URL of the issuer, equal to `iss` in its tokens (JWT). Tokens are accepted as API keys. Empty: no
    tokens are accepted."""
    audience: str = ""
    """Audience (`aud`) that tokens must have."""
    jwks_url: str = ""
    """URL of the issuer's public keys; empty: found by OpenID discovery."""
    name_claim: str = "sub"
    """Claim with the caller's name in `vlm audit`."""
    key_claim: str = "vlm_key"
    """Claim with the name of the stored key. Its roles, models and limits apply to the caller."""
    default_key: str = ""
    """Stored key for tokens without the key claim; empty: these tokens are refused."""


class Prices(Group):
    """Prices of a model. Units: dollars per million tokens, and per image."""

    input: float = Field(default=0.0, ge=0, le=1e5)
    cached_input: float | None = Field(default=None, ge=0, le=1e5)
    output: float = Field(default=0.0, ge=0, le=1e5)
    image: float = Field(default=0.0, ge=0, le=1e3)

    def in_nano_dollars(self) -> tuple[float, float, float, float]:
        """Prices of an input, cached and output token, and of an image."""
        cached = self.input if self.cached_input is None else self.cached_input
        return self.input * 1e3, cached * 1e3, self.output * 1e3, self.image * 1e9


class GatewaySettings(Group):
    header_timeout_s: ClassVar[float] = 10.0  #: limit to receive a request's headers
    #: headers of a stream are sent at its first event, or after this time
    headers_after_s: ClassVar[float] = 15.0
    keep_alive_s: ClassVar[float] = 10.0  #: between the SSE comments of a waiting stream
    #: time after which a stream is cancelled if its client does not read
    send_timeout_s: ClassVar[float] = 30.0
    #: time without events, after which a request's state is read from Redis
    silence_timeout_s: ClassVar[float] = 30.0
    image_fetch_timeout_s: ClassVar[float] = 10.0  #: limit to fetch one image, with redirects
    #: Time limit of one request of a batch.
    batch_line_timeout_s: ClassVar[float] = 3600.0
    file_ttl_s: ClassVar[float] = 30 * 86400.0  #: of batches and their files

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: any free port."""
    api_keys: Secrets = ()
    """Accepted API keys, comma separated. Empty: no authentication, which requires a loopback address."""

    admin_keys: Secrets = ()
    """API keys that can also load and unload adapters, comma separated. Empty: none. If there are any, only these
    keys can read /metrics."""
    deploy_keys: Secrets = ()
    """API keys that can also deploy, comma separated. Empty: none."""
    root_key: Annotated[SecretStr | None, BeforeValidator(lambda key: key or None)] = None
    """The key that manages API keys (`vlm keys`). Empty: the API keys in the settings are the only API keys."""
    oidc: OidcSettings = OidcSettings()
    allow_open: bool = False
    """Serve without API keys on addresses other than loopback."""
    hosts: Annotated[
        Names,
        AfterValidator(lambda hosts: tuple(map(str.lower, hosts))),
        _check(
            lambda hosts: all(":" not in host and _HOST.fullmatch(host) for host in hosts),
            "name hosts without a port, such as `models.lan`",
        ),
    ] = ()
    """Host names that clients of a gateway without API keys can use, comma separated, such as `models.lan`.
    `localhost` and IP addresses are always allowed."""
    trusted_proxies: Annotated[
        Names,
        _check(
            lambda proxies: all(map(_is_network, proxies)),
            "name addresses or networks, such as `10.0.0.7` or `10.0.0.0/24`",
        ),
    ] = ()
    """Addresses or networks of reverse proxies, comma separated, whose `X-Forwarded-For` names the client."""
    request_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """Deadline of a request, from its acceptance to its last token."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Longest pause between two parts of a request's body. Bodies slower than 16 KiB/s are also refused."""
    response_ttl_s: float = Field(default=3600.0, ge=0, le=2_592_000)
    """Time for which answers of `/v1/responses` and uploaded media are stored, so that later requests can name
    their ids; 0: they are not stored."""
    home_grace_s: float = Field(default=0.25, ge=0, le=10)
    """Maximum time that requests with images or long prompts wait for the worker that has these in its caches;
    0: they do not wait."""
    files: str = ""
    """Storage of batches and their files: file:///DIRECTORY that all gateways share, or s3://, gs:// or
    az:// BUCKET/PREFIX; empty: batches are disabled, except in `vlm serve`, which uses its data directory."""
    drain_s: float = Field(default=30.0, ge=0)
    """Time to finish open requests after SIGTERM."""
    remote_images: Annotated[
        Names,
        _check(
            lambda hosts: all(map(_HOST.fullmatch, hosts)),
            "name hosts, such as `images.example.com` or `images.example.com:8443`, or `any-public`",
        ),
    ] = ()
    """Hosts from which images are fetched, comma separated: `host` (ports 80 and 443), `host:port` or
    `any-public`. Empty: no images are fetched."""

    aliases: Annotated[
        Json[str],
        _check(
            lambda names: _are_names(names) and names.keys().isdisjoint(names.values()),
            "map each alias to a model that is not an alias; no name may be empty",
        ),
    ] = Field(default={})
    """Other names of models, as JSON, such as `{"gpt-4o": "qwen2.5-vl"}`."""
    model_defaults: Json[ModelDefaults] = Field(default={})
    """Defaults of sampling fields by model, as JSON, such as `{"qwen2.5-vl":
    {"temperature": 0.2, "max_tokens": 512}}`. They override the checkpoint's defaults."""
    prices: Json[Prices] = Field(default={})
    """Dollars per million tokens, and per image, by patterns of model names, as JSON, such as
    `{"qwen*": {"input": 0.3, "cached_input": 0.1, "output": 1.2, "image": 0.001}}`. The first match
    applies."""
    fallbacks: Annotated[
        Json[str],
        _check(
            lambda names: _are_names(names) and all(n != other for n, other in names.items()),
            "map each model to another model; no name may be empty",
        ),
    ] = Field(default={})
    """For each model, another model that answers while the queue is full or no worker serves the model, as JSON,
    such as `{"qwen2.5-vl": "smolvlm2"}`. Empty: none."""
    hooks: Names = ()
    """Hooks: code that reads or changes prompts and answers, comma separated: `module:object`, or names of entry
    points of installed packages. They run in this order."""
    hook_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit of each hook."""
    hook_failure: Literal["closed", "open"] = "closed"
    """If a hook fails or takes too long: `closed` answers 503, `open` continues without the hook."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Unknown fields of a request: `ignore` and list them in `x-vlm-ignored`, or `refuse` with a 400."""
    cors_origins: Annotated[
        Names,
        _check(
            lambda origins: all(o == "*" or _ORIGIN.fullmatch(o) for o in origins),
            "name origins, such as `https://app.example.com` or `http://localhost:3000`, or `*`",
        ),
    ] = ()
    """Origins whose web pages can call the APIs, comma separated, such as `https://app.example.com`, or `*`.
    Empty: only the gateway's own pages."""


class WorkerSettings(Group):
    """The worker around an engine."""

    #: workers that a request can crash before it fails
    max_attempts: ClassVar[int] = 3
    batch_age_s: ClassVar[float] = 60.0  #: age at which batch requests join the interactive queue
    decode_timeout_s: ClassVar[float] = 2.0  #: CPU time for decoding an image

    id: str = ""
    """Name of the worker; empty: host, process id and a random part."""
    health_host: str = "127.0.0.1"
    """Address of the health and metrics server, or the path of a unix socket."""
    health_port: int = Field(default=0, ge=0, le=65535)
    """Port of the health and metrics server; 0: any free port."""
    lease_s: float = Field(default=10.0, gt=0.5)
    """Another worker takes over a request if its worker does not renew the lease for this time."""
    drain_s: float = Field(default=30.0, ge=0)
    """Time to finish running requests after SIGTERM."""
    watchdog_s: float = Field(default=60.0, gt=0)
    """Time limit of an engine step, after which the process ends."""
    preprocess_threads: int = Field(default=2, ge=1, le=64)
    """Threads that decode and resize images."""
    decode_processes: int = Field(default=2, ge=0, le=64)
    """Sandboxed processes that decode images, and as many that decode videos and audio; 0: threads decode images,
    and one process decodes videos and audio."""

    lora: Names = ()
    """LoRA adapters to load at startup, comma separated: `name=directory` or `name=org/repo[@revision]`."""
    lora_dir: str = ""
    """Directory of the adapters that can be loaded at run time; empty: none."""
    package: str = ""
    """Package that the worker was deployed from, `name@sha256:...`; set by the node."""

    @field_validator("lora")
    @classmethod
    def check_adapters(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        """Raises: ValueError unless all are `name=path` with different names."""
        pairs = [value.partition("=") for value in values]
        names = [name for name, _, _ in pairs]
        if not all(ADAPTER_NAME.fullmatch(name) and path for name, _, path in pairs):
            raise ValueError(
                "write NAME=PATH; a name is 1 to 64 letters, digits, dots, dashes and underscores"
            )
        if len(set(names)) < len(names):
            raise ValueError("two adapters have the same name; rename one")
        return values

    @property
    def adapters(self) -> dict[str, str]:
        """Adapters that are loaded at startup: directories or hub ids by name."""
        return dict(value.split("=", 1) for value in self.lora)

    @cached_property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats. A lease survives several late heartbeats."""
        return self.lease_s / 10


class EngineValues(BaseModel):
    """The engine of a worker: its kind, and settings of that kind.

    The settings are stored in `model_extra`; the engine validates them.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str = "auto"
    """Engine that runs the model; auto: `pooling` for `shapes-clip`, else `torch`."""

    def values(self) -> dict[str, Any]:
        return self.model_dump()


class RedisSettings(Group):
    command_timeout_s: ClassVar[float] = 2.0
    connect_timeout_s: ClassVar[float] = 2.0

    url: RedisUrl = ""
    """redis://, rediss://, unix:// or redis+sentinel:// URL, or several as shards: NAME=URL,NAME=URL; empty:
    `vlm serve` starts its own."""
    key_prefix: str = Field(default="vlm", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Prefix of all keys in Redis."""
    max_memory_bytes: int = Field(default=1024 * MIB, ge=16 * MIB)
    """Memory of the Redis that `vlm serve` starts. When the memory is full, requests with images are refused."""

    @property
    def has_password(self) -> bool:
        return any(urlsplit(url).password for url in split_shards(self.url).values())

    @property
    def shards(self) -> dict[str, "RedisSettings"]:
        """The settings of each shard by name, in order. The name of a single server is ''."""
        urls = split_shards(self.url)
        return {name: self.model_copy(update={"url": url}) for name, url in urls.items()}

    @property
    def first(self) -> "RedisSettings":
        """The settings of the first shard, which stores everything that does not belong to one request."""
        return next(iter(self.shards.values()))

    @property
    def address(self) -> str:
        """The first URL without user, password and options."""
        parts = urlsplit(self.first.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class BlobSettings(Group):
    """Storage of images while requests need them."""

    store: str = Field(default="", pattern=r"^((file|s3|gs|az)://.+)?$")
    """Storage of media above 256 KiB: s3://, gs:// or az:// BUCKET/PREFIX, or file:///DIRECTORY that gateways
    and workers share; empty: Redis."""


class SearchSettings(Group):
    """Vector stores: the search process, and its address for gateways."""

    url: Annotated[str, _check(_is_search_url, "write unix:///PATH or http://HOST:PORT")] = ""
    """Address of the search process: unix:///PATH or http://HOST:PORT; empty: no vector stores."""
    token: SecretStr = SecretStr("")
    """Token that gateways send to the search process; required if other machines can reach it."""
    data_dir: str = ""
    """Directory of the search process; empty: below XDG_STATE_HOME."""
    index: str = ""
    """Storage of vectors: lance:///DIRECTORY or postgresql://USER@HOST/DATABASE; empty: Lance in the data
    directory."""
    collections: Names = ()
    """Directories that `vlm embed` wrote, comma separated; every key can search them as read-only stores."""
    default_store: str = ""
    """Id or name of the store that `POST /similar` searches."""


class DeploySettings(Group):
    """Deployments: the package store, and the limits of instances."""

    store: str = ""
    """Storage of packages and deployments: file:///DIRECTORY, or s3://, gs:// or az:// BUCKET/PREFIX;
    empty: no deployments."""
    node_id: str = Field(default="", pattern="^[A-Za-z0-9._-]*$")
    """Name of the node; empty: host, process id and a random part."""
    cache_dir: str = ""
    """Directory in which a node caches packages; empty: below XDG_CACHE_HOME."""
    max_cache_bytes: int = Field(default=100_000_000_000, ge=0)
    """Bytes of all cached packages. Beyond it, unused packages are deleted, oldest use first. 0: no limit."""
    cpu: float = Field(default=0.0, ge=0)
    """Processors for the instances of a node; 0: all of the machine."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory for the instances of a node; 0: all of the machine."""
    standby: bool = True
    """Keep a process with the engine imported for models that are scaled to zero, so that they start sooner."""
    package: str = ""
    """Package that `vlm worker` fetches from the store and serves, `name@sha256:...`; empty: none."""
    environment: str = ""
    """Environment variables and names of secrets for the package that `vlm worker` serves, as JSON."""
    allowed_signers: str = ""
    """File of SSH public keys in OpenSSH's `allowed_signers` format; a package must be signed by one of them.
    Empty: no signature is required."""

    @property
    def signers(self) -> Path | None:
        return Path(self.allowed_signers).expanduser() if self.allowed_signers else None


class NodeSettings(Group):
    """How a node runs instances."""

    metrics_host: str = "127.0.0.1"
    """Address where `vlm node` serves its workers' metrics."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the node's metrics; 0: any free port."""
    worker_redis_url: RedisUrl = ""
    """Redis URL of the node's workers; required if the node's own URL has a password."""
    isolation: Literal["auto", "require", "none"] = "auto"
    """Run applications in bubblewrap: `auto` if it is installed, `require` always (a node without it does not
    start), `none` never."""
    secrets_dir: str = ""
    """Directory of secrets of applications, one file per secret, named as the secret; empty: none."""
    secrets: Names = ()
    """Environment variables of the node that are secrets of applications, comma-separated; other processes do
    not get them."""


class LogSettings(Group):
    level: Literal["debug", "info", "warning", "error"] | None = None
    """Minimum level of log lines. Empty: `info`, or `warning` with `vlm serve`."""
    format: Literal["text", "json"] = "text"
    """Format of log lines: `text` for people, `json` for programs."""


class TraceSettings(Group):
    export: Literal["none", "otlp"] = "none"
    """`otlp`: export spans as OpenTelemetry's `OTEL_...` variables configure."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_file=".env",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    redis_url: RedisUrl = ""
    """Short for `VLM_REDIS__URL`."""
    redis: RedisSettings = RedisSettings()
    gateway: GatewaySettings = GatewaySettings()
    limits: LimitSettings = LimitSettings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineValues = EngineValues()
    blobs: BlobSettings = BlobSettings()
    search: SearchSettings = SearchSettings()
    deploy: DeploySettings = DeploySettings()
    node: NodeSettings = NodeSettings()
    logs: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()

    def changed(self, **groups: Mapping[str, Any]) -> "Settings":
        """A copy with other values in these groups, not validated."""
        update = {name: getattr(self, name).model_copy(update=v) for name, v in groups.items()}
        return self.model_copy(update=update)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources by precedence: arguments, environment, `.env`, and the file named by `VLM_CONFIG`."""
        assert isinstance(dotenv_settings, DotEnvSettingsSource)
        dotenv_settings.env_vars = {  # the file may be shared with other programs, such as compose
            name: value
            for name, value in dotenv_settings.env_vars.items()
            if name.upper().startswith(PREFIX)
        }
        sources = (init_settings, env_settings, dotenv_settings)
        path = os.environ.get(CONFIG_VARIABLE)
        return (*sources, InitSettingsSource(settings_cls, _read_file(path))) if path else sources


def _read_file(path: str) -> dict[str, Any]:
    """The content of the file of `VLM_CONFIG`. Raises: SettingsError."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        fault = f"the file cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        fault = "the file is not UTF-8: save it as UTF-8"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        fault = f"the file is not YAML{f', line {mark.line + 1}' if mark else ''}"
        fault += f": {getattr(error, 'problem', None) or 'characters that YAML forbids'}"
    else:
        if values is None:
            return {}
        if isinstance(values, dict) and all(isinstance(name, str) for name in values):
            return values
        fault = "the file must contain groups of settings by name, such as `gateway: {port: 8080}`"
    raise SettingsError(f"{CONFIG_VARIABLE}: {path}: {fault}")
