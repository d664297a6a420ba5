"""The terminal's chat client: which model it asks, and what it lets through to the terminal."""

import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.chat_client import ChatError, Conversation, first_model, printable, run_chat
from tests.loadtest.fake_server import FakeServer, chunk, event, run_fake_server, stream


def make_client(*models: dict[str, object]) -> httpx.Client:
    listing = {"object": "list", "data": list(models)}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=listing))
    return httpx.Client(transport=transport, base_url="http://server")


CLIP = {"id": "clip", "num_workers": 1, "tasks": ["embed"]}
GONE = {"id": "gone", "num_workers": 0}
LOADING = {"id": "slow", "num_workers": 0, "tasks": ["generate"]}


@pytest.mark.parametrize("models", [[{"id": "new", "num_workers": 1}, GONE], [{"id": "new"}]])
def test_the_first_model_that_may_have_a_worker_is_asked(models):
    with make_client(*models) as client:
        assert first_model(client) == "new"


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ([], "worker"),
        ([GONE], "worker"),
        ([CLIP], r"it serves clip.*`vlm serve"),
        ([CLIP, LOADING], r"slow .*wait"),
    ],
)
def test_where_no_model_chats_it_says_so_and_does_not_wait(models, says):
    with make_client(*models) as client, pytest.raises(ChatError, match=says):
        first_model(client)


def test_a_server_that_wants_a_key_is_told_with_the_variable_that_holds_one():
    refusal = httpx.Response(401, json={"error": {"message": "no key"}})
    transport = httpx.MockTransport(lambda request: refusal)
    client = httpx.Client(transport=transport, base_url="http://server")
    with client, pytest.raises(ChatError, match=r"no key.*VLM_API_KEY"):
        first_model(client)


def test_controls_but_line_breaks_and_tabs_do_not_reach_the_terminal():
    assert printable("a\x1b[2Jb\tc\nd\x07\x9b31m\x00\x7f\r é🙂") == "a[2Jb\tc\nd31m é🙂"


def test_an_answer_is_printed_without_its_controls(fake: FakeServer, capsys):
    fake.pieces = [chunk("\x1b]0;title\x07hello"), event(b"[DONE]")]
    run_chat(fake.url, "fake", None, [], "question", None, 0.0)
    out = capsys.readouterr().out
    assert "hello" in out
    assert "\x1b]0" not in out
    assert "\x07" not in out


def test_the_answer_alone_goes_to_the_standard_output(fake: FakeServer, capsys):
    fake.pieces = [
        chunk("hello"),
        event({"choices": [], "timings": {"e2e_s": 0.5}}),
        event(b"[DONE]"),
    ]
    run_chat(fake.url, "fake", None, [], "question", None, 0.0)
    assert capsys.readouterr() == ("hello\n", "")


def test_the_answers_alone_are_printed_where_there_is_no_terminal(fake: FakeServer):
    done = pipe_into(fake, "first\n\nsecond\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, 2 * "one two three \n", "")
    assert [len(body["messages"]) for body in fake.bodies] == [1, 3]


def test_a_question_that_fails_is_the_exit_code_of_a_conversation_in_a_pipe(fake: FakeServer):
    fake.pieces = [event({"error": {"message": "no such thing"}})]
    done = pipe_into(fake, "first\nsecond\n")
    assert (done.returncode, done.stdout, len(fake.bodies)) == (1, "", 2)
    assert done.stderr == 2 * "no such thing\n"


def test_an_error_of_the_server_is_shown_without_its_controls(fake: FakeServer):
    fake.pieces = [event({"error": {"message": "no \x1b[31mred"}})]
    client = httpx.Client(base_url=fake.url, trust_env=False)
    with client, pytest.raises(ChatError) as raised:
        list(Conversation(client, "fake").ask("question", []))
    assert str(raised.value) == "no [31mred"


ROOT = Path(__file__).parents[3]


def pipe_into(fake: FakeServer, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "vlm.py", "chat", "--url", fake.url], cwd=ROOT, input=text, capture_output=True, text=True, timeout=60
    )  # fmt: skip


class Terminal:
    """`vlm chat` on a terminal of its own."""

    def __init__(self, url: str, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "vlm.py", "chat", "--url", url, *arguments], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=_control_terminal,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, expected: str) -> None:
        """Read until a text has been shown since the last call."""
        while expected not in self.text:
            self.text += os.read(self._master, 4096).decode()
        self.text = self.text.partition(expected)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _control_terminal() -> None:
    import fcntl  # noqa: PLC0415
    import signal  # noqa: PLC0415
    import termios  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(fake: FakeServer):
    terminal = Terminal(fake.url)
    terminal.read_until("> ")
    yield terminal
    terminal.close()


@pytest.mark.timeout(60)
def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(fake: FakeServer, terminal: Terminal):
    fake.pieces = [chunk("half an "), 30.0, chunk("answer"), event(b"[DONE]")]
    terminal.type("first\n")
    terminal.read_until("half an")
    fake.pieces = stream()
    terminal.type("\x03")
    terminal.read_until("> ")
    terminal.type("second\n")
    terminal.read_until("three")
    said = [(each["role"], each["content"]) for each in fake.bodies[-1]["messages"]]
    assert [role for role, _ in said] == ["user", "assistant", "user"]
    assert said[1] == ("assistant", "half an ")
    terminal.read_until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


@pytest.mark.timeout(60)
def test_ctrl_c_at_the_prompt_and_an_empty_line_do_not_end_a_conversation(
    fake: FakeServer, terminal: Terminal
):
    for typed in ("\x03", "\n", "half a line\x03"):
        terminal.type(typed)
        terminal.read_until("> ")
    terminal.type("question\n")
    terminal.read_until("three")
    terminal.read_until(" ms, 3 tokens")
    terminal.read_until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0
    [body] = fake.bodies
    assert [each["content"][0]["text"] for each in body["messages"]] == ["question"]


@pytest.mark.timeout(60)
def test_a_gateway_that_does_not_answer_does_not_end_a_conversation():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    terminal = Terminal(f"http://127.0.0.1:{port}", "--model", "fake")
    try:
        terminal.read_until("> ")
        terminal.type("first\n")
        terminal.read_until(f"nothing answers at http://127.0.0.1:{port}")
        terminal.read_until("> ")
        with run_fake_server(port) as server:
            terminal.type("second\n")
            terminal.read_until("three")
            terminal.read_until("> ")
            terminal.type("\x04")
            assert terminal.process.wait(20) == 0
            assert len(server.bodies[0]["messages"]) == 1
    finally:
        terminal.close()


@pytest.mark.timeout(60)
def test_commands_of_a_conversation(fake: FakeServer, terminal: Terminal, tmp_path: Path):
    (tmp_path / "a photo.png").write_bytes(b"pixels")
    fake.pieces = stream()
    for line, shown in (
        ("/help", "/image PATH"), ("/nonsense", "there is no command /nonsense"), ("/image nowhere.png", "there is no file"),
        (f"/image '{tmp_path}/a photo.png'", "a photo.png."), ("/json", "JSON now"), ("What?", "three"),
        ("/clear", "is empty"), ("/json", "text now"), ("And now?", "three"),
    ):  # fmt: skip
        terminal.type(line + "\n")
        terminal.read_until(line[-8:])  # as typed
        terminal.read_until(shown)
        terminal.read_until("> ")
    first, second = fake.bodies
    assert [part["type"] for part in first["messages"][0]["content"]] == ["image_url", "text"]
    assert first["response_format"] == {"type": "json_object"}
    assert "response_format" not in second
    assert len(second["messages"]) == 1


def test_a_question_that_fails_does_not_end_a_conversation(fake: FakeServer):
    fake.pieces = [event({"error": {"message": "no"}})]
    with httpx.Client(base_url=fake.url, trust_env=False) as client:
        conversation = Conversation(client, "fake")
        with pytest.raises(ChatError):
            list(conversation.ask("question", []))
        assert conversation.messages == []
