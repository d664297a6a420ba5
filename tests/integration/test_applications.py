"""Applications by the command line and over HTTP, on real processes."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256

import psutil
import pytest
from redis import Redis

from tests.integration.deployer import WITHIN_S, Deployer
from tests.integration.fleet_process import run_vlm, start_fleet
from tests.long import long
from tests.processes import environment_of
from tests.waiting import wait_for
from vlm_app import Session, SessionError

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


SECRETS = ("tell-nobody-a-file", "tell-nobody-a-variable")

TELLER = """
import hashlib, os
from vlm_app import Application

class Teller(Application):
    def run(self, task):
        print("asked for", os.environ["TOKEN"])
        return [hashlib.sha256(os.environ[name].encode()).hexdigest() for name in task]
"""


def deploy_source(deployer: Deployer, name: str, source: str, *more: str):
    folder = deployer.folder / name
    folder.mkdir(exist_ok=True)
    (folder / "app.py").write_text(source)
    return deployer.vlm("deploy", "--name", name, "--application", str(folder), *more)


@pytest.fixture(scope="module")
def deployer(tmp_path_factory) -> Iterator[Deployer]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "secrets").mkdir()
    (folder / "secrets" / "api-token").write_text(SECRETS[0] + "\n")
    with start_fleet(
        folder, VLM_DEPLOY__CPU="16", VLM_NODE__SECRETS_DIR=str(folder / "secrets"),
        VLM_NODE__SECRETS="OWN_TOKEN", OWN_TOKEN=SECRETS[1],
    ) as fleet:  # fmt: skip
        deployer = Deployer(fleet, folder)
        done = deploy_source(
            deployer, "greeter", APPLICATION, "--min-instances", "1", "--wait", "50"
        )
        assert done.returncode == 0, done.stderr
        yield deployer


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


def test_commands_control_a_session(deployer: Deployer):
    opened = deployer.vlm("session", "create", "greeter", "--common-data", '{"word": "dear"}')
    assert opened.returncode == 0, opened.stderr
    name = opened.stdout.strip()
    done = deployer.vlm("session", "run", name, "you", "fail", "me")
    assert done.stdout.splitlines() == ['"dear you"', '"dear me"']
    assert (done.returncode, "told to" in done.stderr) == (5, True)
    listed = json.loads(deployer.vlm("session", "list", "-o", "json").stdout)
    [found] = [each for each in listed if each["id"] == name]
    counts = {state: found[state] for state in ("pending", "running", "succeed", "failed")}
    assert counts == {"pending": 0, "running": 0, "succeed": 2, "failed": 1}
    assert found["resources"] == {"cpu": 1.0, "memory_bytes": 0, "gpu": 0}
    assert "cpu=1" in deployer.vlm("session", "list").stdout
    shown = deployer.vlm("session", "view", name).stdout
    assert all(text in shown for text in ('"you"', '"dear you"', '"fail"', "told to"))
    closed = deployer.vlm("session", "close", name)
    assert closed.returncode == 0, closed.stderr


def test_a_program_can_use_its_own_session(deployer: Deployer):
    at = {"url": deployer.fleet.url.removeprefix("http://"), "api_key": deployer.key}
    with Session.open("greeter", common_data={"word": "dear"}, **at) as session:
        session.submit("you", "fail")
        [mine] = session.submit("me")
        results = [next(session.results()), *session.results()]
        assert [task.output for task in results] == ["dear you", None, "dear me"]
        assert [task.state for task in results] == ["succeed", "failed", "succeed"]
        assert results[1].error == "told to"
        assert Session(session.id, **at).result(mine) == results[2]
        assert list(session.results()) == []
    with pytest.raises(SessionError, match="is closed") as refused:
        session.submit("late")
    assert (refused.value.status, refused.value.code) == (409, "session_closed")


def test_a_failed_task_does_not_end_the_command(deployer: Deployer):
    done = deployer.vlm("run", "greeter", "you", "fail", "me")
    assert done.stdout.splitlines() == ['"hello you"', '"hello me"']
    assert "task 2: told to" in done.stderr
    assert done.returncode == 5


def test_the_key_in_a_data_directory_is_found_by_port(deployer: Deployer):
    env = {name: text for name, text in os.environ.items() if name != "DEPLOY_KEY"}
    done = run_vlm("apps", "-o", "json", env={**env, "VLM_URL": deployer.fleet.url})
    assert done.returncode == 0, done.stderr
    assert [each["name"] for each in json.loads(done.stdout)["data"]] == ["greeter"]


ECHO = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    answer = {"type": "ready"} if asked["type"] == "setup" else {"type": "result", "value": asked["input"]}
    print(json.dumps(answer), flush=True)
"""


def test_a_command_installed_on_nodes_is_deployed_without_files(deployer: Deployer):
    command = shlex.join([sys.executable, "-c", ECHO])
    given = ("deploy", "--name", "echo", "--command", command, "--resources", "cpu=0.1")
    assert deployer.vlm(*given, "--installed", "--application", "x").returncode == 1
    done = deployer.vlm(*given, "--installed")
    assert done.returncode == 0, done.stderr
    assert deployer.vlm("run", "echo", "7").stdout == "7\n"
    missing = ("--command", "/usr/bin/no-such-program", "--retry-limit", "0")
    done = deployer.vlm("deploy", "--name", "missing", "--installed", *missing)
    assert done.returncode == 5, done.stderr
    assert "no-such-program: No such file" in deployer.vlm("logs", "missing").stdout
    assert deployer.vlm("logs", "missing", "--slot", "0").stdout == ""


def leaks(deployer: Deployer, shown: list[str]) -> list[str]:
    """Returns the places where a secret is found that must not contain it."""
    found = [text for text in shown if "tell-nobody" in text]
    socket = deployer.fleet.child("gateway").environ()["VLM_REDIS__URL"]
    with Redis.from_url(socket) as redis:
        found += [
            str(key) for key in redis.scan_iter() if b"tell-nobody" in (redis.dump(key) or b"")
        ]
    for path in deployer.folder.rglob("*"):
        with suppress(FileNotFoundError):  # a drained instance deletes its files
            is_file = path.is_file() and path.parent.name != "secrets"
            if is_file and b"tell-nobody" in path.read_bytes():
                found.append(str(path))
    for process in deployer.fleet.family():
        with suppress(psutil.Error):
            is_application = "vlm_app" in " ".join(process.cmdline())
            says = [*process.cmdline(), *environment_of(process).values()]
            if not is_application and any("tell-nobody" in value for value in says):
                found.append(f"{process.pid} {process.cmdline()}")
    return found


def test_variables_and_secrets_reach_the_application_and_nothing_else(deployer: Deployer):
    secrets = ("--secret", "TOKEN=api-token", "--secret", "OWN_TOKEN=OWN_TOKEN")
    done = deploy_source(deployer, "teller", TELLER, "--env", "WORD=one", *secrets)
    assert done.returncode == 0, done.stderr
    told = deployer.vlm("run", "teller", '["WORD", "TOKEN", "OWN_TOKEN"]')
    expected = [sha256(value.encode()).hexdigest() for value in ("one", *SECRETS)]
    assert json.loads(told.stdout) == expected
    shown = deployer.vlm("app", "teller", "-o", "json").stdout
    assert "api-token" in shown
    assert deployer.fleet.process.stderr is not None
    logged = os.read(deployer.fleet.process.stderr.fileno(), 1 << 20).decode()
    assert "asked for ***" in logged
    assert not leaks(deployer, [done.stderr, shown, logged])


# Slow tests: make applications

STAMPED = """
import time, uuid
from vlm_app import Application

class Stamped(Application):
    def enter(self, common_data):
        self.stamp = uuid.uuid4().hex

    def run(self, task):
        time.sleep(0.02)
        return {"stamp": self.stamp, "number": task}
"""


@long("applications")
def test_an_instance_that_dies_in_the_middle_of_a_session_loses_no_task(deployer: Deployer):
    one = ("--min-instances", "1", "--max-instances", "1")
    done = deploy_source(deployer, "stamped", STAMPED, *one)
    assert done.returncode == 0, done.stderr
    with deployer.fleet.client() as client:
        opened = client.post("/v1/applications/stamped/sessions", json={"common_data": 1}).json()
        path = f"/v1/sessions/{opened['id']}"
        tasks = [{"id": f"t{number}", "input": number} for number in range(100)]
        assert client.post(f"{path}/tasks", json={"tasks": tasks}).status_code == 200
        wait_for(lambda: client.get(path).json()["succeed"] >= 37, WITHIN_S)
        [instance] = deployer.instances("stamped")
        instance.kill()
        outputs = [client.get(f"{path}/tasks/t{n}?wait=60").json()["output"] for n in range(100)]
    assert [output["number"] for output in outputs] == list(range(100))
    assert len({output["stamp"] for output in outputs}) == 2
