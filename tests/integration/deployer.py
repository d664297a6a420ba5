"""Deployments by the command line on a fleet of processes, and load of which no request may fail."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from tests.integration.fleet_process import Served, invoke_vlm
from tests.processes import environment_of
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"
WITHIN_S = 60.0


class Deployer:
    """A fleet, and the commands of a user who deploys."""

    def __init__(self, fleet: Served, folder: Path, within_s: float = WITHIN_S) -> None:
        self.fleet = fleet
        self.folder = folder
        self._within_s = within_s
        self.key = (folder / "deploy.key").read_text()

    def vlm(self, *arguments: str):
        return invoke_vlm(*arguments, "--url", self.fleet.url, DEPLOY_KEY=self.key)

    def deploy(self, version: int, *more: str):
        package = self.folder / f"version-{version}"
        package.mkdir(exist_ok=True)
        (package / "config.json").write_text(f'{{"version": {version}}}')
        (package / "shared.json").write_text('"the same in all versions"')
        given = ("--name", "cap", "--application", str(package), "--set", "kind=mock")
        return self.vlm("deploy", *given, *more)

    def app(self) -> dict:
        headers = {"authorization": f"Bearer {self.key}"}
        with self.fleet.client() as client:
            answer = client.get("/v1/applications/cap", headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def active(self) -> str:
        return self.app()["active"]["digest"]

    def wait(self, is_so: Callable[[dict], bool]) -> dict:
        return wait_for(lambda: app if is_so(app := self.app()) else None, self._within_s)

    def instances(self, name: str = "cap") -> list[psutil.Process]:
        found = []
        for process in self.fleet.family():
            with suppress(psutil.NoSuchProcess):  # can end at any time
                if "worker" in process.cmdline():
                    package = environment_of(process).get("VLM_WORKER__PACKAGE", "")
                    found += [process] if package.startswith(f"{name}@") else []
        return found


class Load:
    """Sends requests one after another, with and without a stream, until the block ends; each names one package."""

    def __init__(self, url: str) -> None:
        self.packages: list[str] = []
        self.faults: list[str] = []
        self._url = url
        self.stopping = threading.Event()

    def run(self, number: int) -> None:
        with httpx.Client(base_url=self._url, trust_env=False, timeout=60, verify=False) as client:
            while not self.stopping.is_set():
                try:
                    self._ask(client, is_streamed=number % 2 == 0)
                except (httpx.HTTPError, AssertionError) as error:
                    self.faults.append(f"{type(error).__name__}: {error}")
                self.stopping.wait(0.05)

    def _ask(self, client: httpx.Client, is_streamed: bool) -> None:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "cap", "messages": messages, "max_tokens": 8, "stream": is_streamed}
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        package = answer.headers["x-vlm-package"]
        named = set(re.findall(r'"system_fingerprint":"([^"]+)"', answer.text))
        assert named == {package}
        assert not is_streamed or answer.text.endswith("data: [DONE]\n\n")
        self.packages.append(package)


@contextmanager
def load(deployer: Deployer, num_clients: int = 2) -> Iterator[Load]:
    running = Load(deployer.fleet.url)
    threads = [threading.Thread(target=running.run, args=(n,)) for n in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        running.stopping.set()
        for thread in threads:
            thread.join()
    assert not running.faults, running.faults[:3]
    assert running.packages
