"""A sandboxed child process that compiles untrusted grammars.

It forks for each grammar. The fork has limits of time and memory. It compiles the grammar and computes the first mask,
and may crash. Messages on the socket: the vocabulary, then grammars, each answered by a `Verdict`.
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import msgspec

from engines.child_process import READY, confine, receive_message, restrict, send_message

_HEAD = '%llguidance {"no_forcing": true}'
_MAX_ANSWER_BYTES = 64 * 1024
_ADDRESS_BYTES = 1024 * 1024 * 1024  #: address space of an idle child, assumed without /proc


class Vocabulary(msgspec.Struct, frozen=True):
    tokens: tuple[bytes, ...]  #: bytes of each token; empty for special tokens
    eos_token_ids: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True):
    """The result of one grammar."""

    error: str = ""
    num_bytes: int = 0  #: memory of the compiled grammar
    is_lost: bool = False  #: the fork exceeded its limit of time or memory


class _Tokens:
    """llguidance's tokenizer interface."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = list(vocabulary.eos_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize; not used, because grammars force no tokens."""
        return []


def to_source(lark: str, **others: str) -> str:
    """The source of a Lark grammar for llguidance, and the `others` that it references as `@name`.

    Forcing is off: forced text would be tokenized again at every mask.
    """
    grammars = [{"lark_grammar": f"{_HEAD}\n{lark}"}]
    grammars += [{"name": name, "lark_grammar": text} for name, text in others.items()]
    return json.dumps({"grammars": grammars})


def create_tokenizer(vocabulary: Vocabulary) -> Any:
    """Build llguidance's tables of a vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - an extra

    return LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary)),
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.eos_token_ids),
    )


def create_matcher(tokenizer: Any, source: str) -> Any:
    """Compile a grammar; the caller checks `is_error`. Releases the GIL."""
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an extra

    limits = LLParserLimits(
        max_lexer_states=20_000,
        step_max_items=20_000,
        max_items_in_row=20_000,  # an object needs 4 per property that may follow
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def judge(tokenizer: Any, source: str) -> Verdict:
    """Compile a grammar and compute its first mask."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    matcher = create_matcher(tokenizer, source)
    if not matcher.is_error():
        matcher.compute_bitmask()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Verdict(matcher.get_error()[:1000], 1024 * max(0, used))


def judge_apart(tokenizer: Any, source: str, max_cpu_s: float) -> Verdict:
    """`judge` in a fork of this process."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # the signal ends the process
            os.write(theirs, msgspec.msgpack.encode(judge(tokenizer, source)))
            code = 0
        os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answer:
        data = answer.read(_MAX_ANSWER_BYTES)
    _, status = os.waitpid(pid, 0)
    if status != 0 or not data:
        return Verdict(is_lost=True)
    return msgspec.msgpack.decode(data, type=Verdict)


def main() -> None:
    """Arguments: number of the socket, limits of memory in bytes and of CPU time in milliseconds."""
    number, max_bytes, max_cpu_ms = (int(argument) for argument in sys.argv[1:4])
    with socket.socket(fileno=number) as sock, suppress(EOFError, OSError):
        vocabulary = msgspec.msgpack.decode(receive_message(sock), type=Vocabulary)
        tokenizer = create_tokenizer(vocabulary)
        judge(tokenizer, to_source('start: %json {"type": "object"}'))  # lazy imports
        restrict(_present_bytes() + max_bytes)
        confine()
        sock.sendall(READY)
        while True:
            verdict = judge_apart(tokenizer, receive_message(sock).decode(), max_cpu_ms / 1000)
            send_message(sock, msgspec.msgpack.encode(verdict))


def _present_bytes() -> int:
    """Size of the address space of this process."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return _ADDRESS_BYTES


if __name__ == "__main__":
    main()
