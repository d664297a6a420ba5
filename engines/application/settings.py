"""Settings of applications, which a node sets from package and deployment."""

from typing import Literal

from pydantic import Field, Json

from engines.settings import UNLISTED, EngineSettings

Isolation = Literal["auto", "require", "none"]


class ApplicationSettings(EngineSettings):
    """An application's package is its `model`, a directory. Tasks run one at a time."""

    entry: str = Field(default="", description="Of an application in Python: `module:Class`.")
    command: Json[tuple[str, ...]] = Field(
        default=(), description="Of another: its program in the package, and arguments, as JSON."
    )
    packages: str = Field(
        default="",
        description="Directory of what an application imports besides; empty: what the worker has.",
    )
    #: Number of an open file with its variables as JSON, from the node; -1: none.
    variables_fd: int = Field(default=-1, json_schema_extra=UNLISTED)
    isolation: Isolation = Field(
        default="auto", description="See `VLM_NODE__ISOLATION`, from which a node sets it."
    )
    network: bool = Field(
        default=False, description="Whether an isolated application reaches the network."
    )
    num_threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads of each process of the engine; 0: one for a small model, else as many as the "
        "processors that the machine has and the container may use.",
    )
    uses_gpu: bool = Field(default=False, description="Whether it sees GPUs.")
    memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Memory of the machine that all its processes may take together; a model sizes its caches by it. 0: any.",
    )
    max_processes: int = Field(
        default=256, ge=1, description="Its processes and their threads, together."
    )
    max_output_bytes: int = Field(
        default=4 * 1024**2, ge=1024, description="Of all that one task may come to."
    )
    max_sessions: int = Field(
        default=16,
        ge=1,
        description="Sessions that its process holds; of more, it leaves the one that rests longest.",
    )
    start_s: float = Field(
        default=300.0, gt=0, description="In which a process that replaces another has to be ready."
    )
    grace_s: float = Field(
        default=2.0,
        gt=0,
        description="In which a cancelled task has to end, before its process does.",
    )
