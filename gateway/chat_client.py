"""A terminal chat client: streams the answer, then shows the stage times.

Called by `vlm chat`. It uses the public API only.
"""

import base64
import json
import mimetypes
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from shared.gateway_client import ApiFailed, Client

#: Media types of files whose names do not determine them, by kind.
_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/mpeg"}
_HELP = """\
/image PATH  add an image to the next question
/video PATH  add a video
/audio PATH  add an audio file
/json        answer in JSON, or in text again
/clear       begin a new conversation
/help        show this
Ctrl-C stops an answer; Ctrl-D ends the conversation."""
_TIMEOUT_S = 300.0
File = tuple[str, Path]  #: kind, a key of `_TYPES`, and path
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})


class ChatError(ApiFailed):
    """The question could not be sent or answered."""


@dataclass(slots=True)
class Conversation:
    """A conversation with one model. `timings`: the stages of the last answer, in seconds."""

    client: Client
    model: str
    max_tokens: int | None = None
    temperature: float = 0.0
    is_json: bool = False  #: whether answers are JSON
    messages: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def ask(self, question: str, files: list[File]) -> Generator[str]:
        """Ask a question about files; yields the text of the answer. Raises: ApiFailed.

        An interrupted answer stays in the conversation; a question without any answer is removed.
        """
        self.messages.append({"role": "user", "content": to_content(question, files)})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {
            "model": self.model,
            "messages": self.messages,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings": True,
        }
        if self.is_json:
            body["response_format"] = {"type": "json_object"}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        done = False
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif data != line:  # other lines are blank, or comments
                    yield from self._read_chunk(json.loads(data))
        if not done:
            raise ChatError("the connection ended before the answer was complete; ask again")

    def _read_chunk(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise ChatError(chunk["error"]["message"])
        self.timings = chunk.get("timings") or self.timings
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                yield choice["delta"]["content"]


def to_content(question: str, files: list[File]) -> list[dict[str, Any]]:
    """The parts of a user message: images, videos and audio as data URLs, then the text. Raises: ChatError."""
    parts: list[dict[str, Any]] = []
    for kind, path in files:
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            raise ChatError(f"cannot read {path}: {error.strerror}") from None
        guessed = mimetypes.guess_type(path.name)[0] or ""
        media_type = guessed if guessed.startswith(kind) else _TYPES[kind]
        name = f"{kind}_url"
        parts.append({"type": name, name: {"url": f"data:{media_type};base64,{data}"}})
    return [*parts, {"type": "text", "text": question}]


def printable(text: str) -> str:
    """The text without control characters except line breaks and tabs."""
    return text.translate(_CONTROLS)


def first_model(client: Client) -> str:
    """The first chat model that has workers. Raises: ApiFailed."""
    models = client.ask("GET", "/v1/models")["data"]
    # other servers do not list tasks or numbers of workers
    chats = [each for each in models if "generate" in each.get("tasks", ("generate",))]
    for model in chats:
        if model.get("num_workers", 1):
            return model["id"]
    if chats:
        raise ChatError(f"{chats[0]['id']} has no worker yet; wait until it is ready")
    if models:
        names = ", ".join(model["id"] for model in models)
        raise ChatError(
            f"the server has no chat model: it serves {names}. Wait if a chat model is"
            " still loading, or start one, such as `vlm serve --model shapes`"
        )
    raise ChatError("the server has no model yet: start a worker, or wait for one")


def format_timings(timings: dict[str, float], usage: dict[str, Any]) -> str:
    """One line: each stage in milliseconds, the total, and the decoding speed."""
    stages = [
        f"{name.removesuffix('_s')} {seconds * 1000:.1f}"
        for name, seconds in timings.items()
        if name not in ("e2e_s", "ttft_s") and (seconds or name != "media_decode_s")
    ]
    total = timings.get("e2e_s", 0.0) * 1000
    tokens = usage.get("completion_tokens", 0)
    decode_s = timings.get("decode_s", 0.0)
    speed = f", {(tokens - 1) / decode_s:.0f} tokens/s" if tokens > 1 and decode_s > 0 else ""
    return f"{' + '.join(stages)} = {total:.1f} ms, {tokens} tokens{speed}"


def run_chat(
    url: str,
    model: str | None,
    api_key: str | None,
    files: list[File],
    question: str | None,
    max_tokens: int | None,
    temperature: float,
) -> int:
    """Answer `question`, or each line of stdin if there is no question. Returns the exit code. Raises: ApiFailed.

    If stdout, or stdin in a conversation, is not a terminal, only answers are printed.
    """
    client = Client(url, api_key, _TIMEOUT_S)
    conversation = Conversation(client, model or first_model(client), max_tokens, temperature)
    is_on_terminal = sys.stdout.isatty() and bool(question or sys.stdin.isatty())
    terminal = _Terminal(conversation, is_on_terminal)
    if not question:
        return terminal.converse(files)
    terminal.answer(question, files)
    return 0


class _Terminal:
    """Shows a conversation: the answers on stdout, everything else on stderr."""

    def __init__(self, conversation: Conversation, is_on_terminal: bool) -> None:
        self._conversation = conversation
        self._is_on_terminal = is_on_terminal
        self._console = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False)

    def answer(self, question: str, files: list[File]) -> None:
        """Raises: ApiFailed."""
        conversation, is_begun = self._conversation, False
        try:
            with closing(conversation.ask(question, files)) as pieces:
                for piece in pieces:
                    is_begun = True
                    self._console.print(printable(piece), end="", markup=False, soft_wrap=True)
        finally:
            if is_begun:
                self._console.print()
        self._note(format_timings(conversation.timings, conversation.usage))

    def converse(self, files: list[File]) -> int:
        """Answer each line of the input. Ctrl-C stops an answer or clears the line. Returns the exit code."""
        self._note("Ask; /help lists the commands, Ctrl-D ends.")
        messages, exit_code = self._conversation.messages, 0
        while True:
            num_before = len(messages)
            try:
                line = self._console.input("> " if self._is_on_terminal else "").strip()
                if line.startswith("/"):
                    files = self._run_command(line, files)
                elif line:
                    self.answer(line, files)
            except EOFError:
                self._note("")
                return exit_code
            except KeyboardInterrupt:
                if not self._is_on_terminal:
                    raise
                self._note("")
            except ApiFailed as error:
                message = printable(str(error))
                self._notes.print(message, style="red", markup=False, soft_wrap=True)
                exit_code = 0 if self._is_on_terminal else 1
            if len(messages) > num_before:
                files = []  # the conversation contains them now

    def _run_command(self, line: str, files: list[File]) -> list[File]:
        """Run a command. Returns the files of the next question. Raises: ChatError."""
        conversation = self._conversation
        command, _, argument = line.partition(" ")
        match command:
            case "/image" | "/video" | "/audio":
                path = Path(argument.strip().strip("'\"")).expanduser()
                if not path.is_file():
                    raise ChatError(f"there is no file {path}; write {command} PATH")
                self._note(f"The next question is about {path.name}.")
                return [*files, (command[1:], path)]
            case "/json":
                conversation.is_json = not conversation.is_json
                self._note(f"Answers are {'JSON' if conversation.is_json else 'text'} now.")
            case "/clear":
                conversation.messages.clear()
                self._note("The conversation is empty.")
                return []
            case "/help":
                self._note(_HELP)
            case _:
                raise ChatError(f"there is no command {command}; /help lists them")
        return files

    def _note(self, text: str) -> None:
        if self._is_on_terminal:
            self._notes.print(text, style="dim", markup=False, soft_wrap=True)
