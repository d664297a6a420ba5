"""Settings of the application engine. A node sets them from the package and the deployment."""

from typing import Literal

from pydantic import Field, Json

from engines.settings import UNLISTED, EngineSettings

Isolation = Literal["auto", "require", "none"]


class ApplicationSettings(EngineSettings):
    """`model` is the directory of the application's package."""

    entry: str = ""
    """Class of a Python application: `module:Class`."""
    command: Json[tuple[str, ...]] = ()
    """Command of an executable application, as JSON: a program in the package, and its arguments."""
    packages: str = ""
    """Directory of the application's Python packages; empty: the worker's packages."""
    #: File descriptor from which the application's variables are read as JSON, opened by the node; -1: no variables.
    variables_fd: int = Field(default=-1, json_schema_extra=UNLISTED)
    isolation: Isolation = "auto"
    """Set by a node from `VLM_NODE__ISOLATION`."""
    network: bool = False
    """Whether an isolated application has network access."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of each numerical library in the application's process; 0: one."""
    uses_gpu: bool = False
    """Whether the application has access to GPUs."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory limit of all processes of the application together; 0: no limit."""
    max_processes: int = Field(default=256, ge=1)
    """Maximum number of processes and threads."""
    max_output_bytes: int = Field(default=4 * 1024**2, ge=1024)
    """Maximum output of one task."""
    max_sessions: int = Field(default=16, ge=1)
    """Maximum number of sessions of one process; beyond it, the least recently used one is closed."""
    start_s: float = Field(default=300.0, gt=0)
    """Time limit for a process to set up the application."""
    grace_s: float = Field(default=2.0, gt=0)
    """Time limit for a cancelled task to end before its process is killed."""
