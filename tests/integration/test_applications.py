"""Applications by the command line and over HTTP, on real processes."""

import json
from collections.abc import Iterator

import pytest

from tests.integration.fleet_process import start_fleet
from tests.integration.test_deployments import Deployer

APPLICATION = """
from vlm_app import Application, TaskError

class Greeter(Application):
    def enter(self, common_data):
        self.word = common_data["word"]

    def run(self, task):
        if task == "fail":
            raise TaskError("told to")
        if isinstance(task, list):
            return (f"{getattr(self, 'word', 'hello')} {name}" for name in task)
        return f"{getattr(self, 'word', 'hello')} {task}"
"""


@pytest.fixture(scope="module")
def deployer(tmp_path_factory) -> Iterator[Deployer]:
    folder = tmp_path_factory.mktemp("serve")
    fleet = start_fleet(folder)
    deployer = Deployer(fleet, folder)
    (folder / "greeter").mkdir()
    (folder / "greeter" / "app.py").write_text(APPLICATION)
    given = ("--name", "greeter", "--application", str(folder / "greeter"))
    done = deployer.vlm("deploy", *given, "--min-instances", "1", "--wait", "50")
    assert done.returncode == 0, done.stderr
    yield deployer
    fleet.end()


def test_a_task_without_a_session(deployer: Deployer):
    with deployer.fleet.client() as client:
        answer = client.post("/v1/applications/greeter/run", json={"input": "you"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["output"] == "hello you"
        assert answer.headers["x-vlm-package"].startswith("greeter@sha256:")
        body = {"input": ["you", "me"], "stream": True}
        answer = client.post("/v1/applications/greeter/run", json=body)
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        assert [json.loads(line).get("item") for line in lines[:-1]] == [
            "hello you",
            "hello me",
            None,
        ]
        answer = client.post("/v1/applications/greeter/run", json={"input": "fail"})
        assert answer.status_code == 422
        assert answer.json()["error"] == {
            "message": "told to", "type": "invalid_request_error", "param": None, "code": "task_failed",
        }  # fmt: skip


def test_a_session_is_walked_through_by_commands(deployer: Deployer):
    opened = deployer.vlm("session", "create", "greeter", "--common-data", '{"word": "dear"}')
    assert opened.returncode == 0, opened.stderr
    name = opened.stdout.strip()
    done = deployer.vlm("session", "run", name, "you", "me", "--id", "t")
    assert done.stdout.splitlines() == ['"dear you"', '"dear me"'], done.stderr
    again = deployer.vlm("session", "run", name, "you", "me", "--id", "t")
    assert again.stdout == done.stdout
    failed = deployer.vlm("session", "run", name, "fail")
    assert failed.returncode == 5
    assert "told to" in failed.stderr
    listed = json.loads(deployer.vlm("session", "list", "-o", "json").stdout)
    [found] = [each for each in listed if each["id"] == name]
    counts = {state: found[state] for state in ("pending", "running", "succeed", "failed")}
    assert counts == {"pending": 0, "running": 0, "succeed": 2, "failed": 1}
    closed = deployer.vlm("session", "close", name)
    assert closed.returncode == 0, closed.stderr
    refused = deployer.vlm("session", "run", name, "you")
    assert refused.returncode == 4
    assert "closed" in refused.stderr
