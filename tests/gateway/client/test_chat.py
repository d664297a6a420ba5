"""`vlm chat`: the model that it chooses, and the control characters that it removes from output."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.chat_client import Conversation, first_model, run_chat
from shared.gateway_client import ApiFailed, Client
from tests.loadtest.fake_server import FakeServer, chunk, event, stream

CLIP = {"id": "clip", "num_workers": 1, "tasks": ["embed"]}
GONE = {"id": "gone", "num_workers": 0}
LOADING = {"id": "slow", "num_workers": 0, "tasks": ["generate"]}


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (200, {"data": [{"id": "new", "num_workers": 1}, GONE]}, None),
        (200, {"data": [{"id": "new"}]}, None),
        (200, {"data": []}, "worker"),
        (200, {"data": [GONE]}, "worker"),
        (200, {"data": [CLIP]}, r"it serves clip.*`vlm serve"),
        (200, {"data": [CLIP, LOADING]}, r"slow .*wait"),
        (401, {"error": {"message": "no key"}}, r"no key.*VLM_API_KEY"),
        (404, {"error": "no such path"}, "HTTP status 404"),
        (404, ["no such path"], "HTTP status 404"),
    ],
)
def test_the_first_available_model_is_used_or_the_error_explains_why(
    monkeypatch, status, answer, says
):
    client = Client("http://server", None)
    answered = httpx.Response(status, json=answer)
    monkeypatch.setattr(client, "send", lambda *_, **__: answered)
    if says is None:
        assert first_model(client) == "new"
        return
    with pytest.raises(ApiFailed, match=says):
        first_model(client)


def test_only_the_answer_without_control_characters_is_on_stdout(fake: FakeServer, capsys):
    text = "a\x1b[2Jb\tc\nd\x07\x9b31m\x00\x7f\r é🙂"
    timings = event({"choices": [], "timings": {"e2e_s": 0.5}})
    fake.pieces = [chunk(text), timings, event(b"[DONE]")]
    run_chat(fake.url, "fake", None, [], "question", None, 0.0)
    assert capsys.readouterr() == ("a[2Jb   c\nd31m é🙂\n", "")


def test_without_a_terminal_only_the_answers_are_printed(fake: FakeServer):
    done = ask(fake, text="first\n\nsecond\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, 2 * "one two three \n", "")
    assert [len(body["messages"]) for body in fake.bodies] == [1, 3]
    fake.pieces = [event({"error": {"message": "no such thing"}})]
    done = ask(fake, text="first\nsecond\n")
    assert (done.returncode, done.stdout, len(fake.bodies)) == (1, "", 4)
    assert done.stderr == 2 * "no such thing\n"


def test_a_failed_question_is_removed_and_its_error_has_no_control_characters(fake: FakeServer):
    fake.pieces = [event({"error": {"message": "no \x1b[31mred"}})]
    done = ask(fake, "question")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no [31mred\n")
    conversation = Conversation(Client(fake.url, None), "fake")
    for question, says in (("question", r"no \x1b"), ("caf\udce9", "UTF-8")):
        with pytest.raises(ApiFailed, match=says):
            list(conversation.ask(question, []))
        assert conversation.messages == []
    for key in ("k\xe9y", "key\r"):
        with pytest.raises(ApiFailed, match=r"^The API key has characters that"):
            Client(fake.url, key).ask("GET", "/v1/models")


ROOT = Path(__file__).parents[3]


def ask(fake: FakeServer, *question: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "vlm.py", "chat", "--url", fake.url, *question]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)


class Terminal:
    """`vlm chat` on its own terminal."""

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
        """Reads until a text has been shown since the last call."""
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

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore SIGINT
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(fake: FakeServer):
    terminal = Terminal(fake.url)
    terminal.read_until("> ")
    yield terminal
    terminal.close()


@pytest.mark.timeout(60)
def test_a_conversation_with_ctrl_c_and_commands(
    fake: FakeServer, terminal: Terminal, tmp_path: Path
):
    # An empty line follows Ctrl-C because the signal can discard the prompt that the terminal is writing.
    for typed in ("\x03\n", "\n", "half a line\x03\n"):
        terminal.type(typed)
        terminal.read_until("> ")
    fake.pieces = [chunk("half an "), 30.0, chunk("answer"), event(b"[DONE]")]
    terminal.type("first\n")
    terminal.read_until("half an")
    fake.pieces = stream()
    terminal.type("\x03\n")
    terminal.read_until("> ")
    terminal.type("second\n")
    terminal.read_until("three")
    terminal.read_until(" ms, 3 tokens")
    terminal.read_until("> ")
    said = [(each["role"], each["content"]) for each in fake.bodies[-1]["messages"]]
    assert [role for role, _ in said] == ["user", "assistant", "user"]
    assert said[1] == ("assistant", "half an ")
    (tmp_path / "a photo.png").write_bytes(b"pixels")
    for line, shown in (
        ("/help", "/image PATH"), ("/nonsense", "there is no command /nonsense"), ("/video nowhere.mp4", "write /video PATH"),
        ("/clear", "is empty"), (f"/image '{tmp_path}/a photo.png'", "a photo.png."), ("/json", "JSON now"),
        ("What?", "three"), ("/clear", "is empty"), ("/json", "text now"), ("And now?", "three"),
    ):  # fmt: skip
        terminal.type(line + "\n")
        terminal.read_until(line[-8:])  # as the user typed it
        terminal.read_until(shown)
        terminal.read_until("> ")
    *_, first, second = fake.bodies
    assert [part["type"] for part in first["messages"][0]["content"]] == ["image_url", "text"]
    assert first["response_format"] == {"type": "json_object"}
    assert "response_format" not in second
    assert len(second["messages"]) == 1
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
