"""The application engine with real processes: well-behaved, failing and hostile applications."""

import errno
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from engines.application.child import Variables
from engines.application.engine import ApplicationEngine
from engines.application.sandbox import find_bubblewrap
from engines.application.settings import ApplicationSettings
from engines.base import EngineCall, EngineLoadFailed, EngineOutput, EngineStartError
from shared.protocol import ErrorCode, FinishReason, Run
from tests.waiting import wait_for
from worker.node.environment import hand_over

WITHIN_S = 30.0

APPLICATION = """
import os, sys, time
from vlm_app import Application, TaskError

class Toy(Application):
    def setup(self, context):
        self.loaded = []
        print("printed, and no answer")

    def enter(self, common_data):
        self.loaded.append(common_data)
        self.prefix = common_data
        if common_data == "refuse":
            raise ValueError("no such session")
        if common_data == "hang":
            time.sleep(3600)

    def run(self, task, *, task_id, attempt):
        self.told = [task_id, attempt]
        if task == "pieces":
            return (self.piece(i) for i in range(3))
        return getattr(self, task["do"])(task)

    def piece(self, number):
        return {"piece": number}

    def once(self, task):
        if self.told[1] == 1:
            os._exit(3)
        return self.told

    def greet(self, task):
        return f"{getattr(self, 'prefix', 'hello')} {task['name']}"

    def count(self, task):
        return len(self.loaded)

    def fail(self, task):
        raise TaskError("no such name")

    def crash(self, task):
        raise RuntimeError("broken")

    def die(self, task):
        os._exit(3)

    def sleep(self, task):
        if task.get("is_deaf"):
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass
        time.sleep(60)

    def fill(self, task):
        written = 0
        try:
            for number in range(20):
                with open(f"{task['folder']}/{number}", "wb", 0) as file:
                    for _ in range(100):
                        written += file.write(bytes(10**6))
        except OSError as error:
            return [error.errno, written]
        return [0, written]

    def unshare(self, task):
        import ctypes
        return ctypes.CDLL(None).unshare(0x1000_0000)  # CLONE_NEWUSER

    def nan(self, task):
        return float("nan")

    def half(self, task):
        return "\\ud800"

    def fail_by_half(self, task):
        raise TaskError("no \\ud800")

    def much(self, task):
        return "x" * task["size"]

    def environment(self, task):
        return dict(os.environ)

    def read(self, task):
        return sorted(os.listdir(task["path"]))

    def pid(self, task):
        return os.getpid()

    def connect(self, task):
        import socket
        socket.create_connection(("127.0.0.1", task["port"]), timeout=5).close()
        return "connected"

    def hold(self, task):
        for folder in ("/tmp", "/dev/shm"):
            self.fill({"folder": folder})
        self.held = bytearray(b"x" * task["bytes"])
        time.sleep(60)

    def eat(self, task):
        held = []
        while True:
            held.append(bytearray(b"x" * 2**22))

    def spread(self, task):
        import threading
        for _ in range(task["count"]):
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        time.sleep(60)

    def flood(self, task):
        for _ in range(200):
            print("y" * 2**16)
        return "done"
"""


class Driver:
    """Drives the engine as a worker's engine thread does."""

    def __init__(self, engine: ApplicationEngine, isolation: str = "") -> None:
        self.engine = engine
        self.isolation = isolation
        self.number = 0

    def add(
        self, value: Any, *, session: str = "", common: Any = None, attempt: int = 1, **more: Any
    ) -> str:
        self.number += 1
        task = Run(msgspec.Raw(msgspec.json.encode(value)), session, **more)
        call = EngineCall(
            f"r{self.number}@shard@{attempt}.7", task, common_data=msgspec.json.encode(common)
        )
        self.engine.add(self.engine.prepare(call, ()))
        return call.request_id

    def cancel(self, value: Any, **more: Any) -> str:
        """Starts a task and cancels it; returns its ID."""
        name = self.add(value, **more)
        for _ in range(5):
            self.engine.step()
        self.engine.abort(name)
        return name

    def finish(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        give_up_at = time.monotonic() + WITHIN_S
        while self.engine.has_work():
            assert time.monotonic() < give_up_at
            outputs += self.engine.step()
        return outputs

    def ask(self, value: Any, **more: Any) -> Any:
        self.add(value, **more)
        *_, last = self.finish()
        assert last.error is None, last.error
        assert last.finish_reason is FinishReason.STOP
        return lines_of([last])[-1]["output"]

    def refused(self, value: Any, **more: Any) -> tuple[ErrorCode, str]:
        self.add(value, **more)
        *_, last = self.finish()
        assert last.error is not None
        return last.error_code, last.error


class Log:
    """The output of this process and its children so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd, self.text = capfd, ""

    def read(self) -> str:
        self.text += "".join(self.capfd.readouterr())
        return self.text


def lines_of(outputs: list[EngineOutput]) -> list[dict]:
    lines = [line for output in outputs for line in output.text.split("\n")]
    return [json.loads(line) for line in lines if line]


def make_engine(folder: Path, source: str = APPLICATION, **changes: Any) -> ApplicationEngine:
    folder.mkdir(exist_ok=True)
    (folder / "app.py").write_text(source)
    values = {"model": str(folder), "entry": "app:Toy", "served_name": "toy@1", **changes}
    return ApplicationEngine(ApplicationSettings(**values))


@contextmanager
def driving(folder: Path, source: str = APPLICATION, **changes: Any) -> Iterator[Driver]:
    with closing(make_engine(folder, source, **changes)) as engine:
        yield Driver(engine)


ISOLATIONS = ["none", *(["require"] if find_bubblewrap() else [])]


@pytest.fixture(scope="module", params=ISOLATIONS)
def toy(request, tmp_path_factory) -> Iterator[Driver]:
    engine = make_engine(
        tmp_path_factory.mktemp("package"), isolation=request.param, memory_bytes=400 * 2**20,
        max_output_bytes=2**16, grace_s=0.5, max_sessions=2, max_processes=40,
    )  # fmt: skip
    yield Driver(engine, request.param)
    engine.close()


def test_streamed_pieces_are_separate_outputs(toy):
    toy.add("pieces", is_streamed=True)
    outputs = toy.finish()
    lines = [{"item": {"piece": i}} for i in range(3)] + [{"output": None}]
    assert lines_of(outputs) == lines
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    toy.add("pieces")
    outputs = toy.finish()
    assert len(outputs) == 1
    assert lines_of(outputs) == lines


def test_a_session_is_entered_once_and_has_its_own_state(toy):
    greet, count = {"do": "greet", "name": "you"}, {"do": "count"}
    before = toy.ask(count)
    assert toy.ask(greet, session="s1", common="dear") == "dear you"
    assert toy.ask(greet, session="s2", common="sir") == "sir you"
    assert toy.ask(greet, session="s1", common="dear") == "dear you"
    assert toy.ask(count) == before + 2
    assert toy.ask(greet, session="s3", common="oh") == "oh you"  # evicts session s2
    assert toy.ask(greet, session="s2", common="sir") == "sir you"
    assert toy.ask(count) == before + 4


def test_errors_of_an_application_are_reported(toy):
    assert toy.refused({"do": "fail"}) == (ErrorCode.TASK_FAILED, "no such name")
    assert toy.refused({"do": "crash"}) == (ErrorCode.TASK_FAILED, "RuntimeError: broken")
    for value in ("nan", "half"):  # half of a surrogate pair is not valid UTF-8
        code, message = toy.refused({"do": value})
        assert "not JSON" in message
        assert code is ErrorCode.TASK_FAILED
    assert toy.refused({"do": "fail_by_half"}) == (ErrorCode.TASK_FAILED, "no ?")
    code, message = toy.refused({"do": "count"}, session="bad", common="refuse")
    assert code is ErrorCode.TASK_FAILED
    assert "tried 3 times: ValueError: no such session" in message


def test_a_task_gets_its_id_and_attempt(toy):
    assert toy.ask({"do": "once"}, session="s", id="mine") == ["mine", 2]
    toy.number = 700
    assert toy.ask({"do": "once"}) == ["r701", 2]
    assert toy.ask({"do": "once"}, attempt=2) == ["r702", 3]


def test_a_task_that_kills_its_process_fails_and_the_next_one_runs(toy):
    code, message = toy.refused({"do": "die"})
    assert code is ErrorCode.REQUEST_KILLS_WORKERS
    assert "2 times" in message
    assert "exit code 3" in message
    assert toy.ask({"do": "greet", "name": "you"}) == "hello you"


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_cancelled_task_frees_its_process(toy, is_deaf):
    before = toy.ask({"do": "pid"})
    toy.cancel({"do": "sleep", "is_deaf": is_deaf})
    after = toy.ask({"do": "pid"})
    if toy.isolation == "none":
        assert (after != before) is is_deaf  # a process that handles the cancellation stays


def test_output_that_is_too_large_is_refused(toy):
    code, message = toy.refused({"do": "much", "size": 2**16})
    assert code in (ErrorCode.TASK_FAILED, ErrorCode.REQUEST_KILLS_WORKERS)
    assert "65536 bytes" in message


@pytest.mark.parametrize(
    ("task", "error"),
    [({"do": "eat"}, "MemoryError"), ({"do": "spread", "count": 80}, "RuntimeError")],
    ids=["memory", "processes"],
)
def test_memory_and_processes_have_a_limit(toy, task, error):
    code, message = toy.refused(task)
    assert code in (ErrorCode.TASK_FAILED, ErrorCode.REQUEST_KILLS_WORKERS)
    assert message.startswith(error if code is ErrorCode.TASK_FAILED else "The application")


def test_a_task_that_is_cancelled_before_it_begins_does_not_run(tmp_path):
    """The process reads the task and its cancellation together."""
    (tmp_path / "app.py").write_text(APPLICATION)
    setup = {"type": "setup", "package": str(tmp_path), "name": "toy", "device": "cpu"}
    task = {"type": "run", "session": "", "task_id": "t", "attempt": 1, "input": {"do": "sleep"}}
    lines = [json.dumps(each, separators=(",", ":")) for each in (setup, task, {"type": "cancel"})]
    program = [sys.executable, "-c", "from vlm_app import serve; serve('app:Toy')"]
    done = subprocess.run(
        program, input="\n".join(lines) + "\n", stdout=subprocess.PIPE, text=True, timeout=WITHIN_S
    )
    assert done.stdout.splitlines()[1:] == ['{"type":"error","message":"cancelled"}']


def test_a_session_that_hangs_in_enter_can_be_cancelled(toy):
    toy.cancel({"do": "pid"}, session="hangs", common="hang")
    assert toy.ask({"do": "greet", "name": "you"}) == "hello you"


def test_printed_output_neither_blocks_nor_fills_the_log(toy, capfd):
    assert toy.ask({"do": "flood"}) == "done"
    assert len(capfd.readouterr().err) < 2**18


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_an_application_has_only_its_variables_and_logs_no_secret(
    tmp_path, capfd, monkeypatch, isolation
):
    monkeypatch.setenv("VLM_REDIS_URL", "redis://secret")
    source = """
import os, sys
from vlm_app import Application

class Toy(Application):
    def run(self, task):
        if task == "environment":
            return dict(os.environ)
        if task != "fail":
            return os.write(2, task.encode())
        print("with", os.environ["TOKEN"], "and", os.environ["PLAIN"])
        raise RuntimeError(os.environ["TOKEN"])
"""
    number = hand_over(Variables({"PLAIN": "in plain sight"}, {"TOKEN": "tell-nobody"}))
    log, options = Log(capfd), {"isolation": isolation, "variables_fd": number}
    with driving(tmp_path / "package", source, **options) as driver:
        told = driver.ask("environment")
        assert (told["PLAIN"], told["TOKEN"]) == ("in plain sight", "tell-nobody")
        assert not [name for name in told if name.startswith("VLM") or "KEY" in name]
        _, message = driver.refused("fail")
        wait_for(lambda: "with *** and in plain sight" in log.read())  # while the process runs
        driver.ask("it is\ntell-")  # a secret in two pieces
        wait_for(lambda: "it is" in log.read())  # the first piece has been read
        driver.ask("nobody, and")
        driver.ask(" no more\n")
        wait_for(lambda: "no more" in log.read())
    assert "it is\n***, and no more\n" in log.read()
    assert "RuntimeError: ***" in message
    assert "tell-nobody" not in log.read() + message


@pytest.fixture(scope="module")
def outside(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("outside")


@pytest.fixture(scope="module")
def inside(outside: Path) -> Iterator[Driver]:
    if len(ISOLATIONS) == 1:
        pytest.skip("bubblewrap is not here")
    options = {"isolation": "require", "memory_bytes": 300 * 10**6}
    with driving(outside / "package", **options) as driver:
        yield driver


def test_a_sandbox_hides_files_processes_and_network(inside, outside):
    (outside / "secret").write_text("")
    assert inside.ask({"do": "pid"}) < 20
    assert inside.ask({"do": "read", "path": str(outside)}) == ["package"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, message = inside.refused({"do": "connect", "port": server.getsockname()[1]})
    assert code is ErrorCode.TASK_FAILED
    assert "Error" in message


@pytest.mark.parametrize(
    ("folder", "code"),
    [("/tmp", errno.ENOSPC), ("/dev/shm", errno.ENOSPC), ("/dev", errno.EROFS), ("/", errno.EROFS)],
)
def test_files_of_a_sandbox_are_bounded_by_its_memory(inside, folder, code):
    found, written = inside.ask({"do": "fill", "folder": folder})
    assert found == code
    assert written <= 150 * 10**6
    assert inside.ask({"do": "greet", "name": "you"}) == "hello you"


def test_files_of_a_sandbox_count_as_its_memory(inside):
    code, message = inside.refused({"do": "hold", "bytes": 120 * 10**6})
    assert code is ErrorCode.REQUEST_KILLS_WORKERS
    assert "the limit is 300000000" in message


def test_a_sandboxed_process_cannot_create_namespaces(inside):
    if b"--disable-userns" not in subprocess.check_output(["bwrap", "--help"]):
        pytest.skip("bubblewrap is older than 0.8")
    assert inside.ask({"do": "unshare"}) == -1


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_closing_leaves_no_processes_and_files(tmp_path, isolation):
    """With a sandbox, its files are deleted when its processes end."""
    others = set(psutil.Process().children(recursive=True))
    with driving(tmp_path / "package", isolation=isolation) as driver:
        driver.ask({"do": "pid"})
        processes = set(psutil.Process().children(recursive=True)) - others
    assert processes
    _, alive = psutil.wait_procs(list(processes), timeout=WITHIN_S)
    assert not alive


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('no such thing')", "ImportError: no such thing"),
        ("import os; os._exit(7)", "exit code 7"),
        ("Toy = 5", "TypeError"),
    ],
)
def test_the_error_of_a_failed_setup_contains_the_reason(tmp_path, source, said):
    with pytest.raises(EngineLoadFailed, match=said):
        make_engine(tmp_path / "package", source)


def test_isolation_can_be_required(tmp_path, monkeypatch):
    monkeypatch.setattr("engines.application.sandbox.find_bubblewrap", lambda: None)
    with pytest.raises(EngineStartError, match="bubblewrap"):
        make_engine(tmp_path / "package", isolation="require")


# Programs in other languages

ECHO = """#!/bin/sh
while IFS= read -r line; do
  case "$line" in
    '{"type":"setup"'*) echo '{"type":"ready"}' ;;
    '{"type":"enter"'*) echo '{"type":"entered"}' ;;
    '{"type":"leave"'*) echo '{"type":"left"}' ;;
    *garbage*) echo 'Segmentation fault' ;;
    *early*) echo '{"type":"entered"}' ;;
    '{"type":"run"'*) input=${line#*'"input":'}; printf '{"type":"result","value":%s}\\n' "${input%?}" ;;
  esac
done
"""


@pytest.fixture(scope="module", params=ISOLATIONS)
def echo(request, tmp_path_factory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("package")
    (folder / "echo.sh").write_text(ECHO)
    (folder / "echo.sh").chmod(0o755)
    values = {"model": str(folder), "command": '["echo.sh"]', "isolation": request.param}
    engine = ApplicationEngine(ApplicationSettings(**values))
    yield Driver(engine)
    engine.close()


def test_no_value_breaks_a_line_of_the_protocol(echo):
    assert echo.ask({"a": [1, "two\n"]}, session="s") == {"a": [1, "two\n"]}
    # A line break between two values would split a line of the protocol.
    task = Run(msgspec.Raw('[1,\r"\u2028\x85"]'.encode()), "", is_streamed=True)
    echo.engine.add(echo.engine.prepare(EngineCall("broken", task, common_data=b"null"), ()))
    [output] = echo.finish()
    assert "\r" not in output.text
    assert lines_of([output]) == [{"output": [1, "\u2028\x85"]}]


@pytest.mark.parametrize("levels", [900, 1200])
def test_values_that_nest_too_deeply_fail_only_their_task(echo, levels):
    task = Run(msgspec.Raw(b"[" * levels + b"]" * levels), "")
    echo.engine.add(echo.engine.prepare(EngineCall("deep", task, common_data=b"null"), ()))
    [output] = echo.finish()
    assert output.error_code is ErrorCode.TASK_FAILED
    assert "deeply" in output.error
    assert echo.ask([[[5]]] * 1000) == [[[5]]] * 1000


@pytest.mark.parametrize("word", ["garbage", "early"])
def test_an_invalid_message_counts_as_a_crash(echo, word):
    code, message = echo.refused(word)
    assert code is ErrorCode.REQUEST_KILLS_WORKERS
    assert ("not a message" in message) or ("'entered'" in message)
    assert echo.ask(5) == 5
