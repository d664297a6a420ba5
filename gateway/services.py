"""The components of a gateway process. They are created once, and started and stopped in order."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from redis.exceptions import RedisError
from starlette.types import ASGIApp

from gateway.batches import Batches, BatchFiles, BatchRunner, ask_endpoint
from gateway.calls.dispatcher import Dispatcher
from gateway.calls.hooks import Hooks, load_hooks
from gateway.calls.kept import KeptAnswers
from gateway.calls.key_limits import KeyLimits, Refunds
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.models import ModelDirectory
from gateway.calls.resume import Resume
from gateway.calls.surface import Surface
from gateway.http.body import Admission
from gateway.http.server import DrainingServer
from gateway.keys.audit import AuditLog
from gateway.keys.directory import KeyDirectory, KeyStore
from gateway.keys.usage import UsageLog
from gateway.media.fetch import ImageFetcher
from gateway.media.loader import ImageLoader
from gateway.search import SearchClient
from shared.blobs.api import BlobStore
from shared.blobs.object_store import ObjectBlobStore, UrlBlobReader
from shared.blobs.redis_store import RedisBlobStore, ShardedBlobs
from shared.packages.deployment_state import DeploymentState
from shared.packages.store import PackageStore, StoreError, open_store
from shared.queue.api import GatewayQueue, Mailbox, QueueUnavailable
from shared.queue.gateway import RedisGatewayQueue, RedisMailbox
from shared.queue.registry import Registry
from shared.queue.resume import Leases, ResumableCalls
from shared.queue.shards import ShardedGatewayQueue, ShardedMailbox, Shards
from shared.records.store import RecordStore
from shared.redis.client import create_redis
from shared.sessions.store import SessionStore
from shared.settings.tree import Settings, SettingsError
from shared.telemetry import create_tracer
from shared.telemetry.metrics import GatewayMetrics

if TYPE_CHECKING:
    from gateway.keys.oidc import TokenKeys


_MAX_REDIS_BYTES = 64 * 1024 * 1024  #: limit of a video or audio file without VLM_BLOBS__STORE


class Services:
    def __init__(self, settings: Settings) -> None:
        prefix, gateway, limits = settings.redis.key_prefix, settings.gateway, settings.limits
        self.settings = settings
        self.gateway_id = secrets.token_hex(8)
        self._redis = create_redis(settings.redis)
        self._blocking_redis = create_redis(settings.redis, blocking=True)
        self.metrics = GatewayMetrics()
        self.tracer = create_tracer(settings.traces, "gateway", self.gateway_id)
        self.admission = Admission(limits.max_open_requests, limits.max_open_body_bytes)
        self.durable = _open_store("VLM_DEPLOY__STORE", settings.deploy.store)
        self.keys, self.audit = self._create_keys()
        self.tokens = self._create_tokens()
        self.key_limits = KeyLimits(
            limits,
            self.admission.overloaded,
            find_key=self.keys and self.keys.of,
            prices=gateway.prices,
        )
        self.queue, self.mailbox, small = self._connect()
        self.usage = UsageLog(self.queue, self.durable)
        self.records = ResumableCalls(self._redis, prefix)
        self.leases = Leases(self._redis, prefix)
        self.blobs = self._open_blobs(small)
        self.blob_reader = UrlBlobReader(self.blobs)
        self.answers = RecordStore(
            self._redis,
            prefix,
            ttl_s=gateway.response_ttl_s,
            max_records=limits.max_key_responses,
            max_bytes=limits.max_key_response_bytes,
        )
        self.sessions = SessionStore(self._redis, prefix)
        self.registry = Registry(self._redis, prefix)
        self.deployments = DeploymentState(self._redis, prefix)
        self.models = ModelDirectory(
            self.registry,
            self.mailbox.open,
            settings.redis.address,
            self.deployments if settings.deploy.store else None,
            self.metrics.deployments.observe,
            self.durable,
            self.keys and self.keys.may_use,
            gateway.aliases,
            gateway.model_defaults,
        )
        self.dispatcher = Dispatcher(
            self.queue,
            self.mailbox,
            self.metrics,
            silence_timeout_s=gateway.silence_timeout_s,
            restore_budget=self.usage.restore_budget,
        )
        self.refunds = Refunds(self.queue)
        hosts, timeout_s = gateway.remote_images, gateway.image_fetch_timeout_s
        self.fetcher = ImageFetcher(hosts=hosts, timeout_s=timeout_s) if hosts else None
        self.loader = ImageLoader(limits, self.fetcher, uses_disk=self.blobs.takes_files)
        self.lifecycle = self._create_lifecycle()
        self.search = SearchClient(settings.search)
        files = _open_store("VLM_GATEWAY__FILES", gateway.files)
        self.batches = None if files is None else Batches(files, BatchFiles(files))
        self.runner: BatchRunner | None = None

    def _connect(self) -> tuple[GatewayQueue, Mailbox, BlobStore]:
        """The queue, mailbox and blobs of one Redis, or of several shards."""
        redis = self.settings.redis
        of_mailbox = (self.gateway_id, lambda name: self.dispatcher.on_gap(name), self._is_awaited)
        if len(redis.shards) > 1:
            shards = Shards(redis, lambda name: self.dispatcher.on_lost(name))
            return (
                ShardedGatewayQueue(shards),
                ShardedMailbox(shards, redis, *of_mailbox),
                ShardedBlobs(shards, redis.key_prefix),
            )
        return (
            RedisGatewayQueue(self._redis, redis.key_prefix),
            RedisMailbox(self._blocking_redis, redis.key_prefix, *of_mailbox),
            RedisBlobStore(self._redis, redis.key_prefix),
        )

    def _open_blobs(self, small: BlobStore) -> BlobStore:
        """Raises: SettingsError."""
        if store := self.settings.blobs.store:
            return ObjectBlobStore(small, store)
        for name in ("max_video_bytes", "max_audio_bytes"):
            if getattr(self.settings.limits, name) > _MAX_REDIS_BYTES:
                raise SettingsError(
                    f"VLM_LIMITS__{name.upper()}: above {_MAX_REDIS_BYTES} bytes, set VLM_BLOBS__STORE too"
                )
        return small

    def _create_keys(self) -> tuple[KeyDirectory | None, AuditLog | None]:
        if self.settings.gateway.root_key is None:
            return None, None
        prefix = self.settings.redis.key_prefix
        store = KeyStore(self._redis, prefix, self.durable)
        ended = "The API key of this request was revoked or expired."
        keys = KeyDirectory(
            store,
            self.settings.redis.address,
            lambda tenants: self.dispatcher.fail_all(ended, tenants),
        )
        return keys, AuditLog(self._redis, prefix, self.durable, keys.name_of)

    def _create_tokens(self) -> "TokenKeys | None":
        """Create the authentication by OIDC tokens. None: no issuer is set. Raises: SettingsError."""
        settings = self.settings.gateway.oidc
        if not settings.issuer:
            return None
        if self.keys is None:
            raise SettingsError("VLM_GATEWAY__OIDC__ISSUER: set VLM_GATEWAY__ROOT_KEY too")
        try:
            from gateway.keys.oidc import TokenKeys  # noqa: PLC0415 (optional dependencies)
        except ImportError:
            problem = "install PyJWT and cryptography: pip install '.[oidc]'"
            raise SettingsError(f"VLM_GATEWAY__OIDC__ISSUER: {problem}") from None
        return TokenKeys(settings, self.keys)

    def _create_lifecycle(self) -> Lifecycle:
        settings, hooks = self.settings.gateway, None
        if found := load_hooks(settings.hooks):
            is_open = settings.hook_failure == "open"
            hooks = Hooks(found, settings.hook_timeout_s, is_open, self.metrics)
        return Lifecycle(
            gateway_id=self.gateway_id,
            settings=settings,
            limits=self.settings.limits,
            admission=self.admission,
            key_limits=self.key_limits,
            models=self.models,
            loader=self.loader,
            blobs=self.blobs,
            dispatcher=self.dispatcher,
            resume=Resume(
                self.queue, self.records, self.leases, self.dispatcher, settings.request_timeout_s
            ),
            refunds=self.refunds,
            hooks=hooks,
            kept=KeptAnswers(
                self.answers, self.blobs, self.blob_reader.open, settings.response_ttl_s
            ),
            metrics=self.metrics,
            tracer=self.tracer,
        )

    def _is_awaited(self, model: str) -> bool:
        """Whether events of a model may arrive: it is served, or has open requests."""
        return model in self.models.cards or self.dispatcher.has_open(model)

    def create_server(self, app: ASGIApp) -> DrainingServer:
        fail_open = self.dispatcher.fail_all
        return DrainingServer(app, self.settings, self.admission, self.metrics, fail_open)

    def run_batches(
        self, surfaces: Mapping[str, Surface], may_ask: Callable[[str, str], bool]
    ) -> None:
        """Create the batch runner. `surfaces`: by path. `may_ask`: whether a tenant's or guest's key is valid."""
        if self.batches is None:
            return
        limits, settings = self.settings.limits, self.settings.gateway
        timeout_s = max(settings.request_timeout_s, settings.batch_line_timeout_s)
        lifecycle = replace(
            self.lifecycle,
            settings=settings.model_copy(update={"request_timeout_s": timeout_s}),
            admission=Admission(limits.max_open_requests, limits.max_open_body_bytes),
        )
        self.runner = BatchRunner(
            self.batches,
            self.leases,
            partial(ask_endpoint, lifecycle, surfaces),
            lambda record: may_ask(record.tenant, record.guest),
            max_lines=limits.max_batch_lines,
            keep_s=settings.file_ttl_s,
        )

    def look_for_batches(self) -> None:
        if self.runner is not None:
            self.runner.look()

    async def start(self) -> None:
        """Start the background tasks. Without Redis, they keep trying to connect."""
        with suppress(QueueUnavailable, OSError):
            await self.queue.open()
        self.dispatcher.start()
        spawn = self.dispatcher.spawn
        spawn(self.refunds.keep_refunding())
        spawn(self.models.keep_fresh())
        spawn(self.usage.keep_saved())
        if self.keys is not None:
            with suppress(RedisError, StoreError, OSError):  # stored keys get 503 until it succeeds
                await self.keys.refresh()
            spawn(self.keys.keep_fresh())
            spawn(self.keys.keep_synced())
        if self.tokens is not None:
            spawn(self.tokens.keep_fresh())
        spawn(self._start_runner())

    async def _start_runner(self) -> None:
        """Run batches after the keys are loaded: a batch of an unknown key would fail."""
        if self.keys is not None:
            await self.keys.is_known.wait()
        if self.runner is not None:
            self.runner.start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.stop()
        await self.dispatcher.stop()
        await self.refunds.refund()
        for part in (
            self.keys,
            self.audit,
            self.tokens,
            self.mailbox,
            self.records,
            self.answers,
            self.sessions,
            self.blob_reader,
            self.registry,
            self.deployments,
            self.leases,
            self.queue,
            self.fetcher,
            self.search,
        ):
            if part is not None:
                await part.close()
        self.loader.close()
        for redis in (self._redis, self._blocking_redis):
            await redis.aclose()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


def _open_store(variable: str, url: str) -> PackageStore | None:
    """Open the store that a setting names. None: the setting is empty. Raises: SettingsError."""
    try:
        return open_store(url) if url else None
    except StoreError as error:
        raise SettingsError(f"{variable}: {error}") from None
