"""Checks schemas with conforming and other values against the answers that their grammars allow.

A schema passes the gateway's limits, then the engine's compiler with its child process, for the tokens of the
built-in model. A value conforms if its JSON can be generated token by token, each allowed by the mask before it, and
can end there.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import engines.packages.shapes
from engines.base import BadGrammar, GrammarTooComplex
from engines.core.constraint import Constraint, ConstraintFailure
from engines.text.grammar import GrammarCompiler
from engines.text.tokenizer import HfTokenizer
from gateway.api.generation import schema_grammar
from gateway.http.errors import InvalidRequest
from shared.settings.limits import LimitSettings

CHECKPOINT = Path(engines.packages.shapes.__file__).parent / "checkpoint"
PARAM = "response_format.json_schema.schema"
_LIMITS = LimitSettings()


@dataclass(frozen=True)
class Case:
    """A schema, and values with whether they conform to it."""

    name: str
    schema: Any
    tests: Sequence[tuple[bool, Any]]


@dataclass
class Result:
    """The results of a schema and its values, which are given by their index."""

    refusal: str = ""  #: reason of the refusal
    accepted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  #: the request ended with an error


class Checker:
    """Checks schemas as a worker with this tokenizer does."""

    def __init__(self) -> None:
        self.tokenizer = HfTokenizer(CHECKPOINT, None)
        compiler = GrammarCompiler.create(self.tokenizer, self.tokenizer.vocab_size, None)
        assert compiler is not None
        self._compiler = compiler
        starts = ((i, self.tokenizer.token_bytes(i)[:1]) for i in range(self.tokenizer.vocab_size))
        signs = {i for i, start in starts if start and start in b'"}],:'}
        self._ending = sorted(signs | self.tokenizer.eos_token_ids)  # tokens that lead to the end

    def close(self) -> None:
        self._compiler.close()

    def compile(self, schema: Any) -> Constraint:
        """Raises: InvalidRequest, BadGrammar, GrammarTooComplex; they name the field."""
        grammar = schema_grammar(json.dumps(schema).encode(), PARAM, _LIMITS)
        return self._compiler.compile(grammar)

    def check(self, case: Case) -> Result:
        """Checks all values of a schema that is not refused."""
        result = Result()
        try:
            constraint = self.compile(case.schema)
        except InvalidRequest as error:
            return Result(_reason_of(error.message, error.param))
        except (BadGrammar, GrammarTooComplex) as error:
            return Result(_reason_of(str(error), error.param))
        for place, (is_valid, data) in enumerate(case.tests):
            spellings = spell(data)
            try:
                # The first spelling of a conforming value must be accepted; of other values, no spelling.
                tried = spellings[:1] if is_valid else spellings
                is_accepted = any(self.follows(constraint, text) for text in tried)
            except ConstraintFailure:
                result.failed.append(place)
            else:
                (result.accepted if is_accepted else result.rejected).append(place)
        return result

    def follows(self, constraint: Constraint, text: str) -> bool:
        """Returns whether the text is a complete answer. Raises: ConstraintFailure."""
        space = " " if self.tokenizer.drops_leading_space else ""
        return follows(
            constraint, [*self.tokenizer.encode(space + text), min(self.tokenizer.eos_token_ids)]
        )

    def draw(self, constraint: Constraint, random: Random, most_tokens: int) -> str | None:
        """Returns an answer of random allowed tokens; None if it did not end."""
        constraint, told = constraint.begin(), []
        while len(told) < most_tokens:
            bits = np.frombuffer(constraint.mask(told, 0), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            ending = np.intersect1d(allowed, self._ending)
            if len(ending) and random.random() < (0.3 if len(told) < most_tokens // 3 else 0.9):
                allowed = ending
            token_id = int(random.choice(allowed))
            if token_id in self.tokenizer.eos_token_ids:
                return b"".join(map(self.tokenizer.token_bytes, told)).decode()
            told.append(token_id)
        return None


def follows(constraint: Constraint, token_ids: Sequence[int]) -> bool:
    """Returns whether the tokens are a complete answer. Raises: ConstraintFailure."""
    constraint = constraint.begin()
    masks = (constraint.mask(token_ids[:count], 0) for count in range(len(token_ids)))
    return all(m[i >> 3] >> (i & 7) & 1 for m, i in zip(masks, token_ids, strict=True))


def spell(data: Any) -> list[str]:
    """Returns a value's JSON in several spellings; the first is the usual one of models."""
    usual = json.dumps(data, ensure_ascii=False)
    compact = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    found = [usual, compact, json.dumps(data), _escape(compact)]
    return [text for text in dict.fromkeys(found) if text.isascii() or _is_text(text)]


def _escape(text: str) -> str:
    """Escapes the letters of strings in JSON, if the strings have no other escapes."""

    def to_numbers(found: re.Match[str]) -> str:
        return re.sub("[A-Za-z]", lambda letter: f"\\u{ord(letter[0]):04x}", found[0])

    return re.sub(r'"[^"\\]*"(?![^"]*\\)', to_numbers, text)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason_of(message: str, param: str | None) -> str:
    """Returns a refusal without the parts of this schema; fails if it does not name the field."""
    assert param is not None
    assert param.startswith(PARAM)
    assert message.startswith(f"Invalid value for {param}: ")
    return message.removeprefix(f"Invalid value for {param}: ").rstrip(".").partition("; ")[0]
