"""Compiles grammars of clients for a model's vocabulary, and drafts tokens of constrained answers. Thread-safe.

Grammars are untrusted: a child process with limits of time and memory compiles them first.

Drafts contain the text that the grammar forces; only its tokenization is uncertain. Between forced texts, JSON has
optional spaces and punctuation; the answer so far shows whether the model writes spaces.
"""

import hashlib
import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from engines.child_process import ChildProcess, receive_message, send_message
from engines.core.constraint import Constraint
from engines.text import grammar_child
from engines.text.detokenizer import NOTHING_SPELLED, Tokenizer
from engines.text.grammar_child import (
    Verdict,
    Vocabulary,
    create_matcher,
    create_tokenizer,
    to_source,
)
from engines.text.reasoning import Reasoning, ReasoningFormat
from engines.text.schemas import Refusal, prepare
from engines.text.tools import ToolFormat, to_rules
from shared.protocol import UNSUPPORTED_KEYWORDS, Grammar, Tools

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CPU_S = 0.5  #: CPU time to compile a grammar and compute its first mask
MAX_BYTES = 256 * 1024 * 1024
_MAX_KEPT = 256  #: cached results: compiled grammars and refusals
_MAX_KEPT_BYTES = 128 * 1024 * 1024
_MIN_BYTES = 64 * 1024  #: a compiled grammar counts as at least this size
ANSWER_TIMEOUT_S = 20.0  #: time limit of a verdict, on a busy machine

_COMPLEX_WORDS = ("too many", "too large", "too big", "too complex", "limit", "fuel", "exceed")
#: The end of an error of llguidance: a listing of the source, which contains text of the client.
_LISTING = re.compile(r"\n +1 \| ")
_COMPLEX = "the grammar needs more time or memory than a request may use; send a simpler grammar"

_MAX_DRAFT_BYTES = 96
_CONTEXT_TOKENS = 8
_SHOWN_TOKENS = 48
_WORD = bytes(code for code in range(256) if code >= 128 or chr(code).isalnum() or code == ord("_"))
_SIGNS = (b'"', b":", b",", b"}", b"]", b"{", b"[")
#: If one of these characters is allowed, the position is inside a string or number.
_INSIDE = (b"0", b"a")

logger = logging.getLogger(__name__)


class Drafter:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        count = min(vocab_size, tokenizer.vocab_size)
        self._bytes = [tokenizer.token_bytes(token_id) for token_id in range(count)]
        self._ids: dict[bytes, int] = {}
        for token_id, text in enumerate(self._bytes):
            if text:
                self._ids.setdefault(text, token_id)
        self._is_word = [x.isascii() and x.replace(b" ", b"").isalpha() for x in self._bytes]
        self._longest = min(32, max(map(len, self._ids), default=0))

    def draft(self, matcher: "LLMatcher", output: list[int]) -> list[int]:
        """Probable next tokens. Does not change the matcher."""
        text = self._find(matcher, b"".join(map(self._text, output[-4:])), output)
        if not text:
            return []
        copy, found, piece = matcher.deep_copy(), bytearray(), text
        while piece and len(found) < _MAX_DRAFT_BYTES:
            token_ids = self._spell(piece)
            if not token_ids or not copy.consume_tokens(token_ids):
                break
            found += piece
            piece = self._find(copy, bytes(found), output)
        return self._cut(output, bytes(found))

    def spell(self, matcher: "LLMatcher", output: list[int]) -> int | None:
        """The first token of forced text in the tokenizer's own tokenization.

        None if no text is forced, or if the token reaches the last word or sign, which may merge with following text.
        """
        forced = bytes(matcher.compute_ff_bytes()[:_MAX_DRAFT_BYTES])
        num_certain = len(forced.rstrip(_WORD)) - 1
        if num_certain < 1:
            return None
        token_id = self._cut(output, forced)[0]
        return token_id if len(self._text(token_id)) <= num_certain else None

    def resumes(self, token_id: int) -> bool:
        """Whether a token contains characters other than letters and spaces."""
        return token_id >= len(self._is_word) or not self._is_word[token_id]

    def _find(self, matcher: "LLMatcher", before: bytes, output: list[int]) -> bytes:
        """Forced text, else likely text."""
        forced = matcher.compute_ff_bytes()
        if forced:
            return bytes(forced[:_MAX_DRAFT_BYTES])
        if before[-1:] in (b",", b":") and self._writes_spaces(output):
            return b" " if self._allows(matcher, b" ") else b""
        if any(self._allows(matcher, inside) for inside in _INSIDE):
            return b""
        signs = [sign for sign in _SIGNS if self._allows(matcher, sign)]
        return signs[0] if len(signs) == 1 else b""

    def _writes_spaces(self, output: list[int]) -> bool:
        shown = b"".join(map(self._text, output[-_SHOWN_TOKENS:]))
        with_space = shown.count(b'": ') + shown.count(b', "')
        return with_space >= shown.count(b'":"') + shown.count(b',"')

    def _allows(self, matcher: "LLMatcher", text: bytes) -> bool:
        token_id = self._ids.get(text)
        return token_id is not None and matcher.validate_tokens([token_id]) == 1

    def _cut(self, output: list[int], text: bytes) -> list[int]:
        """Tokenize a text in the context of the output."""
        context = b"".join(map(self._text, output[-_CONTEXT_TOKENS:]))
        try:
            token_ids = self._tokenizer.encode((context + text).decode())
        except UnicodeDecodeError:
            return self._spell(text)
        num_bytes, place = 0, len(token_ids)
        while place and num_bytes < len(text):
            place -= 1
            num_bytes += len(self._text(token_ids[place]))
        found = token_ids[place:]
        if b"".join(map(self._text, found)) != text:
            return self._spell(text)
        return found

    def _spell(self, text: bytes) -> list[int]:
        """Tokenize a text greedily by longest match; empty if that is not possible."""
        found, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                token_id = self._ids.get(text[start:end])
                if token_id is not None:
                    break
            else:
                return []
            found.append(token_id)
            start = end
        return found

    def _text(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


@dataclass(eq=False)
class GrammarCompiler:
    _tokenizer: Tokenizer
    _vocab_size: int  #: number of logits
    _reasoning: Reasoning | None
    _spelled: Mapping[int, str]  #: how grammars spell special tokens
    _kept: "OrderedDict[bytes, _Compiled | Refusal]" = field(default_factory=OrderedDict)
    _num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _judging: threading.Lock = field(default_factory=threading.Lock)
    _vocabulary: Vocabulary | None = None
    _tables: Any = None
    _drafter: Drafter | None = None
    _bound_numbers: "NumberBounds | None" = None
    _judge: "_Judge | None" = None

    @classmethod
    def create(
        cls,
        tokenizer: Tokenizer,
        vocab_size: int,
        reasoning: Reasoning | None,
        spelled: Mapping[int, str] = NOTHING_SPELLED,
    ) -> "GrammarCompiler | None":
        """None if llguidance or an end-of-sequence token is missing, or if answers have channels (as in gpt-oss)."""
        has_parts = reasoning is not None and bool(reasoning.form.head_end)
        ends = any(token_id < vocab_size for token_id in tokenizer.eos_token_ids)
        if has_parts or not ends or find_spec("llguidance") is None:
            return None
        of_reasoning = {} if reasoning is None else reasoning.spelled
        return cls(tokenizer, vocab_size, reasoning, {**of_reasoning, **spelled})

    def compile(self, grammar: Grammar, *, is_thinking: bool = False) -> Constraint:
        """Compile a grammar. `is_thinking`: start in the reasoning. Raises: BadGrammar, GrammarTooComplex."""
        try:
            is_json = grammar.kind == "json"
            return self._constrain(*_to_body(grammar), is_thinking=is_thinking, is_json=is_json)
        except Refusal as refusal:
            raise refusal.to_error(grammar.param) from None

    def compile_tools(
        self, tools: Tools, form: ToolFormat, grammar: Grammar | None, *, is_thinking: bool = False
    ) -> Constraint:
        """Compile a grammar for function calls. Unless calls are required, it also allows `grammar`, or any text.

        A function with an unsupported schema accepts any object, unless it is strict. Raises: the errors of `compile`.
        """
        others: dict[str, str] = {}
        rules = ""
        if tools.is_required:
            head = "answer: calls"
        elif grammar is None:
            head = "answer: said"
        else:
            head = "answer: calls | form"
            try:
                rules, others = _to_body(grammar, "form")
            except Refusal as refusal:
                raise refusal.to_error(grammar.param) from None
        is_strict = any(function.is_strict for function in tools.functions)
        for is_loose in (False, True):
            try:
                body = "\n".join((head, rules, to_rules(tools, form, is_loose=is_loose)))
                is_json = grammar is None or grammar.kind == "json"
                return self._constrain(body, others, is_thinking=is_thinking, is_json=is_json)
            except Refusal as refusal:
                if is_loose or is_strict:
                    raise refusal.to_error("tools") from None
        raise AssertionError  # the second iteration returns or raises

    def _constrain(
        self, body: str, others: dict[str, str], *, is_thinking: bool, is_json: bool
    ) -> Constraint:
        # If the first space of an output is dropped, the grammar begins with a space.
        space = '" "' if self._tokenizer.drops_leading_space else '""'
        source = bare = to_source(f"start: {space} answer\n{body}", **others)
        if self._reasoning is not None:
            rules = _reasoning_rules(self._reasoning.form, space, is_thinking=is_thinking)
            source = to_source("\n".join([*rules, body]), **others)
        matcher = self._find(source)
        narrow = self._bound_numbers if is_json else None
        return Constraint(matcher, self._drafter, self._drafter, narrow, bare)

    def close(self) -> None:
        with self._judging:
            if self._judge is not None:
                self._judge.close()
                self._judge = None

    def _find(self, source: str) -> Any:
        """The cached matcher of a grammar, to be copied. Raises: Refusal."""
        key = hashlib.sha256(source.encode()).digest()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            try:
                found = self._compile(source)
            except Refusal as refusal:
                if not refusal.is_kept:
                    raise
                found = refusal
            self._keep(key, found)
        if isinstance(found, Refusal):
            raise found
        return found.matcher

    def _compile(self, source: str) -> "_Compiled":
        with self._judging:
            if self._tables is None:
                self._load()
            verdict = self._ask(source)
        if not verdict.is_lost and not verdict.error:
            matcher = create_matcher(self._tables, source)
            if not matcher.is_error():
                matcher.compute_bitmask()  # so that no step computes the first mask
            verdict = msgspec.structs.replace(verdict, error=matcher.get_error())
            if not verdict.error:
                return _Compiled(matcher, max(_MIN_BYTES, verdict.num_bytes))
        error = _LISTING.split(verdict.error)[0]
        problem = _explain(error)
        is_complex = any(word in error.lower() for word in _COMPLEX_WORDS)
        if verdict.is_lost or (is_complex and not problem):
            raise Refusal(_COMPLEX, is_complex=True)
        raise Refusal(problem or "the grammar cannot be read")

    def _load(self) -> None:
        """Build the vocabulary tables when the first grammar is compiled."""
        tokenizer = self._tokenizer
        spelled = self._spelled
        self._vocabulary = Vocabulary(
            tuple(
                tokenizer.token_bytes(token_id) or spelled.get(token_id, "").encode()
                if token_id < tokenizer.vocab_size
                else b""
                for token_id in range(self._vocab_size)
            ),
            tuple(sorted(i for i in tokenizer.eos_token_ids if i < self._vocab_size)),
        )
        self._judge = _Judge(self._vocabulary)  # the child builds its own tables meanwhile
        self._tables = create_tokenizer(self._vocabulary)
        self._drafter = Drafter(tokenizer, self._vocab_size)
        self._bound_numbers = NumberBounds(self._vocabulary.tokens)

    def _ask(self, source: str) -> Verdict:
        """The child's verdict. If the child is lost, the next call starts another. Raises: Refusal."""
        assert self._vocabulary is not None
        try:
            if self._judge is None:
                self._judge = _Judge(self._vocabulary)
            return self._judge.ask(source)
        except (EOFError, OSError) as error:
            logger.warning(
                "the process that test-compiles grammars was lost: %s", type(error).__name__
            )
            if self._judge is not None:
                self._judge.close()
                self._judge = None
            raise Refusal(_COMPLEX, is_complex=True, is_kept=False) from None

    def _keep(self, key: bytes, found: "_Compiled | Refusal") -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = found
                self._num_bytes += found.num_bytes
            while len(self._kept) > _MAX_KEPT or self._num_bytes > _MAX_KEPT_BYTES:
                self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes


class NumberBounds:
    """Limits the length of JSON numbers without bounds in the schema, because small models may add digits forever.

    Integers have at most 19 digits, other numbers 17 digits and 3 in the exponent. llguidance has no such option, so
    tokens are masked where the answer ends with a number and every digit may follow.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts[i]`: bytes of token i."""
        self._texts = texts
        ids = {text: token_id for token_id, text in enumerate(texts) if len(text) == 1}
        self._digits = [ids.get(b"%d" % digit, -1) for digit in range(10)]
        self._point = ids.get(b".", -1)
        self._others = [ids.get(sign, -1) for sign in (b'"', b"a")]  # allowed within strings
        begun = ((i, _NUMBER_SIGNS.match(text)) for i, text in enumerate(texts))
        self._numeric = [(i, found[0]) for i, found in begun if found]

    def __call__(self, mask: bytes, last: Sequence[int]) -> bytes:
        run = b""
        for token_id in reversed(last):
            run = self._texts[token_id] + run
            if not _NUMBER_SIGNS.fullmatch(run):
                break
        found = _NUMBER.search(run)
        if found is None or min(self._digits) < 0:
            return mask
        may = [mask[i >> 3] >> (i & 7) & 1 for i in (*self._digits, *self._others) if i >= 0]
        if not all(may[:10]) or any(may[10:]):
            return mask
        has_point = self._point >= 0 and mask[self._point >> 3] >> (self._point & 7) & 1
        is_whole = not has_point and found[0].lstrip(b"-").isdigit()
        narrowed = bytearray(mask)
        for token_id, text in self._numeric:
            if not _is_bounded(found[0] + text, is_whole=is_whole):
                narrowed[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(narrowed) if any(narrowed) else mask


_NUMBER_SIGNS = re.compile(rb"[0-9.eE+-]+")
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?$")
_DIGIT = re.compile(rb"[0-9]")


def _is_bounded(number: bytes, *, is_whole: bool) -> bool:
    """Whether a number prefix is within the limits."""
    mantissa, _, exponent = number.lower().partition(b"e")
    num_digits = len(_DIGIT.findall(mantissa)) + mantissa.endswith(b".")
    return num_digits <= (19 if is_whole else 17) and len(_DIGIT.findall(exponent)) <= 3


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher at the start of a grammar."""

    matcher: Any
    num_bytes: int


class _Judge(ChildProcess):
    """The sandboxed child process that test-compiles grammars of clients."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(grammar_child.__name__, MAX_BYTES, int(1000 * MAX_CPU_S))
        send_message(self.socket, msgspec.msgpack.encode(vocabulary))

    def ask(self, source: str) -> Verdict:
        """Raises: EOFError, OSError (including TimeoutError) if the child is lost."""
        self.wait_until_ready()
        self.socket.settimeout(ANSWER_TIMEOUT_S)
        send_message(self.socket, source.encode())
        data = receive_message(self.socket, time.monotonic() + ANSWER_TIMEOUT_S)
        return msgspec.msgpack.decode(data, type=Verdict)


def _reasoning_rules(form: ReasoningFormat, space: str, *, is_thinking: bool) -> list[str]:
    """Rules of an output with reasoning before the rule `answer`."""
    start = f"start: {space} answer | {space} {json.dumps(form.start)} thought GAP? answer"
    return [
        "start: thought GAP? answer" if is_thinking else start,
        f"thought[suffix={json.dumps(form.end)}]: /(?s:.*)/",
        r"GAP: /[ \n\r\t]{1,8}/",
    ]


def _to_body(grammar: Grammar, name: str = "answer") -> tuple[str, dict[str, str]]:
    """The rule `name`, and the grammars that it references. Raises: Refusal."""
    if grammar.kind == "json":
        return f"{name}: %json {_to_schema(grammar)}", {}
    if grammar.kind == "regex":
        from llguidance import regex_to_lark  # noqa: PLC0415 - an extra

        return f"{name}: /{regex_to_lark(grammar.source, use_ascii='d')}/", {}
    if grammar.kind == "choice":
        texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.source)]
        return f"{name}: {' | '.join(texts)}", {}
    return f"{name}: @client", {"client": grammar.source}


def _to_schema(grammar: Grammar) -> str:
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError):
        raise Refusal("the schema is not JSON") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Refusal("no value conforms to the schema; send a schema that is an object")
    return json.dumps(prepare(schema, is_lenient=grammar.is_lenient))


#: Messages by parts of llguidance's errors. They contain no text of the client.
_PROBLEMS = (
    ("Unknown format", "a format is not supported"),
    ("oneOf", "oneOf whose schemas may overlap is not supported; use anyOf"),
    (
        "Resource ",
        "an external $ref is not supported; only references within the schema (#/...) are",
    ),
    ("Pointer ", "a $ref names nothing in the schema"),
    ("circular references", "a $ref to itself is not supported together with other keywords"),
    (
        "min/maxProperties",
        "minProperties and maxProperties are supported where all names of properties are required",
    ),
    (
        "not disjoint",
        "patternProperties is not supported where two patterns, or a pattern and a name, can match the same key",
    ),
    ("lookarounds", "a pattern with ^ or $ within it is not supported"),
    ("Expected positive integer", "a limit of a length or a count is not a whole number"),
    ("too many digits", "multipleOf has too many digits"),
    ("float range", "a minimum or a maximum has too many digits"),
    ("Unsatisfiable", "no value conforms to the schema"),
    ("Invalid type", "a type is unknown"),
)


def _explain(error: str) -> str:
    """The message for an error of llguidance; empty if it is unknown."""
    if "Unimplemented keys" in error:
        words = re.findall(r'"([^"]*)"', error.partition("Unimplemented keys")[2])
        named = ", ".join(word for word in words if word in UNSUPPORTED_KEYWORDS) or "some"
        return f"these keywords are not supported: {named}"
    if "regex parse error" in error:
        reason = error.rpartition("error: ")[2].strip().partition("\n")[0]
        return f"a regular expression cannot be read: {reason}"[:200]
    return next((ours for theirs, ours in _PROBLEMS if theirs in error), "")
