"""The worker process: builds its components from the settings and runs them.

Exit codes: 0: stopped by a signal. 70: a step hung (watchdog). 71: the engine failed. 78: it cannot
start with this configuration.
"""

import asyncio
import dataclasses
import logging
import os
import socket
import sys
from contextlib import AsyncExitStack
from secrets import token_hex
from typing import TYPE_CHECKING

import uvloop
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from engines.base import Decode, Engine, EngineLoadFailed, EngineStartError, LoadedEngine
from engines.child_process import hide_process
from engines.image_decoder import decode_image
from engines.registry import create_engine, kind_of, prepare_process
from shared.blobs.api import BlobStore
from shared.blobs.object_store import UrlBlobReader
from shared.blobs.redis_store import RedisBlobStore, ShardedBlobs
from shared.process import end_startup, on_stop_signal
from shared.queue.registry import Registry
from shared.queue.shards import Shards, check_shards
from shared.queue.worker import RedisWorkerQueue
from shared.redis.client import create_redis, wait_for_redis
from shared.settings.tree import RedisSettings, Settings, SettingsError
from shared.telemetry import create_tracer
from worker.adapters import WorkerAdapters
from worker.engine_thread import EngineBroken, EngineThread, start_watchdog
from worker.health import HealthServer, WorkerCollector
from worker.prepare.decoder_pool import DecoderPool
from worker.prepare.preparer import Preprocessor
from worker.prepare.video_pool import VideoPool
from worker.worker import Worker

if TYPE_CHECKING:
    from shared.telemetry.spans import Tracer

EXIT_BROKEN = 71

#: Maximum wait of the event loop for the GIL while the engine thread runs Python. Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.0005

logger = logging.getLogger(__name__)


def run_worker(settings: Settings) -> int:
    """Run one worker until a signal. Returns the exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if not hide_process():
        logger.warning("this system lets processes of the same user read the worker's environment")
    try:
        prepare_process(settings.engine.values())
        uvloop.run(WorkerProcess(settings).run())
    except (EngineStartError, SettingsError) as error:
        logger.critical("%s", error)
        return os.EX_CONFIG
    except EngineLoadFailed as error:
        logger.critical("%s", error)
        return EXIT_BROKEN
    except EngineBroken as error:
        logger.critical("%s; stopping, so that other workers continue its requests", error)
        return EXIT_BROKEN
    return 0


class ProgressLog:
    """Logs the engine's progress in steps of ten percent."""

    def __init__(self) -> None:
        self._logged: dict[str, int] = {}

    def __call__(self, phase: str, ratio: float) -> None:
        tenths = int(10 * ratio)
        if tenths > self._logged.get(phase, -1):
            self._logged[phase] = tenths
            logger.info("%s %d %%", phase, 10 * tenths)


class WorkerProcess:
    """The components of the process, created in order and closed in reverse order."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._worker: Worker | None = None
        self._registry: CollectorRegistry | None = None
        self._engine: EngineThread | None = None

    async def run(self) -> None:
        """Load the engine, and serve until a signal. Raises: EngineBroken, EngineStartError, SettingsError."""
        on_stop_signal(self._on_signal)
        async with AsyncExitStack() as stack:
            port = await self._start_health(stack)
            reached = asyncio.create_task(wait_for_redis(self._settings.redis))
            stack.callback(reached.cancel)
            loaded = await self._load_engine(stack)
            await reached
            await check_shards(self._settings.redis)
            worker = await self._create_worker(stack, loaded)
            self._worker = worker
            end_startup()  # garbage collection must not pause streams to scan the model
            await worker.announce_first()
            logger.info(
                "worker %s is ready: %s; health on port %d",
                worker.worker_id, loaded.card.name, port,
            )  # fmt: skip
            await worker.run()

    def _on_signal(self) -> None:
        if self._worker is None:
            os._exit(0)  # loading cannot be interrupted, and no request is claimed yet
        self._worker.stop()

    async def _start_health(self, stack: AsyncExitStack) -> int:
        server = HealthServer(self._is_alive, self._is_ready, lambda: self._registry)
        host, port = self._settings.worker.health_host, self._settings.worker.health_port
        await server.start(host, port, "VLM_WORKER__HEALTH_PORT")
        stack.push_async_callback(server.close)
        return server.port

    def _is_alive(self) -> bool:
        return self._engine is None or not self._engine.is_stuck(self._settings.worker.watchdog_s)

    def _is_ready(self) -> bool:
        return self._worker is not None and self._worker.is_ready

    async def _load_engine(self, stack: AsyncExitStack) -> LoadedEngine:
        values, progress = self._settings.engine.values(), ProgressLog()
        engine = EngineThread(lambda: create_engine(values, progress))
        self._engine = engine
        stack.push_async_callback(engine.close)
        stack.callback(start_watchdog(engine, self._settings.worker.watchdog_s).set)
        return await engine.start()

    def _start_decoders(self, stack: AsyncExitStack, engine: Engine) -> Decode:
        """Start the image decoders, sandboxed processes, if the engine decodes images."""
        settings = self._settings
        if not settings.worker.decode_processes or not engine.capabilities().decodes_images:
            return decode_image
        pool = DecoderPool(
            settings.worker.decode_processes,
            settings.limits.max_image_bytes,
            settings.limits.max_image_pixels,
            settings.worker.decode_timeout_s,
        )
        pool.start()
        stack.callback(pool.close)
        return pool.decode

    def _create_videos(self, stack: AsyncExitStack, engine: Engine) -> VideoPool | None:
        """Create the pool of sandboxed video and audio decoders, if the engine accepts either."""
        capabilities = engine.capabilities()
        if not (capabilities.takes_video or capabilities.max_audio_s):
            return None
        pool = VideoPool(max(1, self._settings.worker.decode_processes), self._settings.limits)
        stack.callback(pool.close)
        return pool

    async def _create_worker(self, stack: AsyncExitStack, loaded: LoadedEngine) -> Worker:
        settings = self._settings
        assert self._engine is not None
        redis = create_redis(settings.redis)
        prefix = settings.redis.key_prefix
        name = f"{socket.gethostname()}-{os.getpid()}-{token_hex(3)}"
        worker_id = settings.worker.id or name
        if settings.worker.package:
            card = replace(loaded.card, package=settings.worker.package)
            loaded = dataclasses.replace(loaded, card=card)
        queues = {
            name: self._open_queue(stack, each, loaded.card.name, worker_id)
            for name, each in settings.redis.shards.items()
        }
        blobs = UrlBlobReader(self._open_blobs(stack, redis))
        registry = Registry(redis, prefix)
        adapters = WorkerAdapters(
            loaded.engine, loaded.card, registry, settings.worker, settings.limits
        )
        await adapters.load_own()
        preprocessor = Preprocessor(
            loaded.engine,
            blobs,
            settings.limits,
            settings.worker.preprocess_threads,
            decode=self._start_decoders(stack, loaded.engine),
            videos=self._create_videos(stack, loaded.engine),
            hold_adapter=adapters.hold,
        )
        stack.callback(preprocessor.close)
        for close in (redis.aclose, blobs.close, registry.close):
            stack.push_async_callback(close)
        self._registry = CollectorRegistry()
        metrics = WorkerCollector(self._engine, queues.values(), preprocessor.media)
        self._registry.register(metrics)
        return Worker(
            worker_id,
            settings.worker,
            kind_of(settings.engine.values()),
            loaded,
            self._engine,
            queues,
            registry,
            preprocessor,
            self._create_tracer(stack, worker_id),
            adapters,
        )

    def _open_queue(
        self, stack: AsyncExitStack, settings: RedisSettings, model: str, worker_id: str
    ) -> RedisWorkerQueue:
        redis, blocking_redis = create_redis(settings), create_redis(settings, blocking=True)
        of_worker = self._settings.worker
        queue = RedisWorkerQueue(
            redis,
            blocking_redis,
            keys_prefix=settings.key_prefix,
            model=model,
            worker_id=worker_id,
            lease_s=of_worker.lease_s,
            max_attempts=of_worker.max_attempts,
            batch_age_s=of_worker.batch_age_s,
        )
        for close in (redis.aclose, blocking_redis.aclose, queue.close):
            stack.push_async_callback(close)
        return queue

    def _open_blobs(self, stack: AsyncExitStack, redis: Redis) -> BlobStore:
        settings = self._settings.redis
        if len(settings.shards) == 1:
            return RedisBlobStore(redis, settings.key_prefix)
        shards = Shards(settings)
        stack.push_async_callback(shards.close)
        return ShardedBlobs(shards, settings.key_prefix)

    def _create_tracer(self, stack: AsyncExitStack, worker_id: str) -> "Tracer | None":
        tracer = create_tracer(self._settings.traces, "worker", worker_id)
        if tracer is not None:
            stack.push_async_callback(asyncio.to_thread, tracer.close)
        return tracer
