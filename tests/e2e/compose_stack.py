"""The compose stack under test: fresh images, free ports, and removal with its volumes at the end.

On demand (`make compose-test`), because it needs a Docker engine and images from a registry.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from loadtest.fleet import ROOT, free_port
from tests.waiting import wait_for

PROJECT = f"vlm-test-{os.getpid()}"
PASSWORDS = dict.fromkeys(
    ("REDIS_GATEWAY_PASSWORD", "REDIS_WORKER_PASSWORD", "VLM_SEARCH__TOKEN", "POSTGRES_PASSWORD"),
    "0f1e2d3c4b5a6978",
)
PROFILES = "gpu,metrics,search"
MOCK = ("--file", "compose.yaml", "--file", "compose.mock.yaml")
WITHIN_S = 300.0
BUILD_S = 600.0


def succeeds(*command: str) -> bool:
    return shutil.which(command[0]) is not None and (
        subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    )


def check_compose() -> None:
    """Skips the test if compose is not requested or not available."""
    if "COMPOSE_TEST" not in os.environ:
        pytest.skip("on demand: make compose-test")
    if not (succeeds("docker", "info") and succeeds("docker", "compose", "version")):
        pytest.skip("no docker engine with compose runs here")


def docker(*arguments: str, timeout_s: float = WITHIN_S) -> str:
    """Runs a docker command; returns its output. Raises: CalledProcessError."""
    command = ["docker", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, timeout=timeout_s, stdout=subprocess.PIPE)
    done.check_returncode()
    return done.stdout.strip()


class ComposeStack:
    def __init__(self, variables: dict[str, str], files: Sequence[str]) -> None:
        self._command = ["docker", "compose", *files, "--project-name", PROJECT]
        ports = {"GATEWAY_PORT": str(free_port())}
        self._environment = os.environ | PASSWORDS | ports | variables
        self.urls: list[str] = []  #: of the gateways

    @property
    def url(self) -> str:
        """The URL of the first gateway."""
        return self.urls[0]

    def compose(self, *arguments: str, **variables: str) -> None:
        subprocess.run(
            [*self._command, *arguments],
            check=True,
            cwd=ROOT,
            env=self._environment | variables,
            timeout=BUILD_S,
        )

    def up(self, *arguments: str) -> None:
        """Starts missing containers; returns when every container is healthy."""
        self.compose("up", "--wait", "--no-recreate", *arguments)
        wait_for(self.all_are_healthy, WITHIN_S)
        gateways = self.containers("gateway")
        self.urls = [f"http://{docker('port', gateway, '8000/tcp')}" for gateway in gateways]

    def all_are_healthy(self) -> bool:
        """Returns whether each container is healthy. A container that has ended is an error."""
        return all(map(self._is_healthy, self.containers()))

    def _is_healthy(self, container: str) -> bool:
        state = self.inspect(container)["State"]
        assert state["Status"] not in ("exited", "dead"), state
        return "Health" not in state or state["Health"]["Status"] == "healthy"

    def containers(self, service: str = "") -> list[str]:
        """Returns the container IDs of a service, or of all services."""
        label = f"label=com.docker.compose.project={PROJECT}"
        chosen = ["--filter", f"label=com.docker.compose.service={service}"] if service else []
        return docker("ps", "--all", "--quiet", "--filter", label, *chosen).split()

    def inspect(self, container: str) -> dict[str, Any]:
        return json.loads(docker("inspect", container))[0]

    def num_workers(self) -> int:
        """Returns the number of workers of the gateway's models; 0 while the gateway is down."""
        models = json.loads(self._get("/v1/models") or '{"data": []}')["data"]
        return sum(model["num_workers"] for model in models)

    def num_open_requests(self) -> int:
        """Returns the number of open requests of the gateway."""
        found = re.search(r"^vlm_open_requests (\S+)", self._get("/metrics"), re.MULTILINE)
        return int(float(found[1])) if found else 0

    def _get(self, path: str) -> str:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}{path}", trust_env=False, timeout=5).text
        return ""

    def logs(self, container: str) -> str:
        """Returns the stderr of a container, to which our processes log."""
        done = subprocess.run(["docker", "logs", container], capture_output=True, text=True)
        done.check_returncode()
        return done.stderr


@contextmanager
def run_stack(*, files: Sequence[str] = MOCK, **variables: str) -> Iterator[ComposeStack]:
    """Runs the stack as `docker compose up --build --wait` does with these files and variables."""
    check_compose()
    stack = ComposeStack(variables, files)
    try:
        stack.up("--build")
        yield stack
    except BaseException:
        stack.compose("logs", "--tail", "20", COMPOSE_PROFILES=PROFILES)
        raise
    finally:
        stack.compose("down", "--volumes", "--timeout", "40", COMPOSE_PROFILES=PROFILES)
