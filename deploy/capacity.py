"""`vlm plan`: compute the workers, gateways and Redis servers that a load needs, from figures of `vlm bench`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from rich import box
from rich.console import Console
from rich.table import Table

from shared.queue.keys import AFTER_END_S, BLOB_LINGER_S

BUSY = 0.7  #: planned utilization of each process
BYTES_PER_TOKEN = 150  #: Redis memory per output token
ROLES = ("gateway", "worker", "redis-server")
#: Figures of the built-in model. The file names the machine on which they were measured.
BUILT_IN = Path(__file__).parent / "capacity.json"


Positive = Annotated[int, Meta(ge=1)]
PositiveTime = Annotated[float, Meta(gt=0)]


class FleetFigures(msgspec.Struct):
    """CPU seconds that a process of each role spends per request, token and image. The engine is not included."""

    machine: str
    request_s: dict[str, float]
    token_s: dict[str, float]  #: per streamed token
    image_s: dict[str, float]  #: per new image of `image_bytes` bytes
    image_bytes: Positive

    def __post_init__(self) -> None:
        if not self.request_s.keys() & self.token_s.keys() & self.image_s.keys() >= set(ROLES):
            raise ValueError(f"request_s, token_s, image_s: times of {', '.join(ROLES)} are needed")


class EngineFigures(msgspec.Struct):
    """Seconds that one worker's engine spends per token and image, in batches of `batch_size` requests."""

    machine: str
    model: str
    batch_size: int
    output_token_s: PositiveTime
    prompt_token_s: PositiveTime
    image_s: PositiveTime | None = None  #: includes the image's tokens; None: no images


class Figures(msgspec.Struct, omit_defaults=True):
    fleet: FleetFigures | None = None
    engine: EngineFigures | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Rate in requests per second, and the average request."""

    rate: float
    prompt_tokens: int
    output_tokens: int
    images: float
    image_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes that a load needs. `busy`: the number of fully utilized engines or cores, by role."""

    workers: int
    gateways: int
    shards: int
    redis_bytes: float
    busy: dict[str, float]


class NoFigures(ValueError):
    """The file of figures is unreadable, or lacks figures that the plan needs."""


def read_figures(path: Path) -> Figures:
    """Read a file of figures. Raises: NoFigures."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Figures)
    except (OSError, msgspec.MsgspecError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise NoFigures(f"{path}: {problem}") from None


def write_figures(path: Path, part: FleetFigures | EngineFigures) -> None:
    """Write the fleet's or the engine's figures; keep the other figures of the file. Raises: NoFigures, OSError."""
    figures = read_figures(path) if path.exists() else Figures()
    if isinstance(part, FleetFigures):
        figures.fleet = part
    else:
        figures.engine = part
    path.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def make_plan(load: Load, fleet: FleetFigures, engine: EngineFigures) -> Plan:
    """Compute the processes that a load needs. Raises: NoFigures."""
    if load.images and engine.image_s is None:
        raise NoFigures(f"{engine.model} was measured without images; give --images 0")
    engine_s = (
        load.output_tokens * engine.output_token_s
        + load.prompt_tokens * engine.prompt_token_s
        + load.images * (engine.image_s or 0.0)
    )
    images = load.images * load.image_bytes / fleet.image_bytes  # in images of the measured size
    busy = {"engine": load.rate * engine_s}
    for role in ROLES:
        tokens_s, images_s = load.output_tokens * fleet.token_s[role], images * fleet.image_s[role]
        busy[role] = load.rate * (fleet.request_s[role] + tokens_s + images_s)
    answer_s = engine.batch_size * engine_s  # in a full batch
    image_bytes = load.images * load.image_bytes * (answer_s + BLOB_LINGER_S)
    token_bytes = load.output_tokens * BYTES_PER_TOKEN * (answer_s + AFTER_END_S)
    return Plan(
        _number(busy["engine"]), _number(busy["gateway"]), _number(busy["redis-server"]),
        load.rate * (image_bytes + token_bytes), busy,
    )  # fmt: skip


def _number(busy: float) -> int:
    return max(1, math.ceil(busy / BUSY))


def show(plan: Plan, fleet: FleetFigures, engine: EngineFigures) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "number", "because"):
        table.add_column(name, justify="right" if name == "number" else "left", overflow="fold")
    for name, number, role in (
        ("workers", plan.workers, "engine"),
        ("gateways", plan.gateways, "gateway"),
        ("Redis servers", plan.shards, "redis-server"),
    ):
        what = "engines" if role == "engine" else "cores"
        table.add_row(name, str(number), f"the load keeps {plan.busy[role]:.2f} {what} busy")
    stay = f"images stay for {BLOB_LINGER_S:g} s and answers for {AFTER_END_S:g} s"
    table.add_row("Redis memory", f"{plan.redis_bytes / 1e9:.2g} GB", stay)
    console = Console(highlight=False)
    console.print(table)
    images = "" if engine.image_s is None else f", {1 / engine.image_s:,.0f} images/s"
    console.print(
        f"\nEach process is planned to be busy {BUSY:.0%} of the time. {engine.model} on {engine.machine}, "
        f"batches of {engine.batch_size}: {1 / engine.output_token_s:,.0f} output tokens/s, "
        f"{1 / engine.prompt_token_s:,.0f} prompt tokens/s{images}. Gateway and Redis: {fleet.machine}."
    )
