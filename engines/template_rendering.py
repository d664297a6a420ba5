"""Jinja's side of chat templates: compiled as transformers compiles them, in the sandbox, with an end to their output.

Runs in the worker for templates that are known, in a child process for all others. It must not know conversations.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, Any]]


class UnusableTemplate(Exception):
    """The template cannot be compiled, or puts pictures nowhere; the message says which."""


class TemplateRefusal(Exception):
    """The template refuses the conversation, in its own words."""


class TemplateFailure(Exception):
    """The template fails at the conversation, takes too long or writes too much."""


class CompiledTemplate:
    """A template in this process. Raises: UnusableTemplate."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._variables = variables
        try:
            self._template = _create_environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnusableTemplate(f"the chat template is no jinja template: {error}") from None

    def render(self, messages: Messages, max_chars: int = sys.maxsize) -> str:
        """The text of a conversation. Raises: TemplateRefusal, TemplateFailure."""
        try:
            return "".join(self._pieces(messages, max_chars))
        except jinja2.TemplateError as error:
            raise TemplateRefusal(str(error)[:200]) from None
        except Exception as error:  # a template may fail in any way that Python can
            raise TemplateFailure(type(error).__name__) from None

    def _pieces(self, messages: Messages, max_chars: int) -> Iterator[str]:
        for piece in self._template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._variables,
        ):
            max_chars -= len(piece)
            if max_chars < 0:
                raise TemplateFailure("too long")
            yield piece


class _Generation(Extension):
    """Accepts `{% generation %}`, with which templates mark the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """A `generation` block is its content; the marks serve training only."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _create_environment() -> ImmutableSandboxedEnvironment:
    """As transformers compiles chat templates: the same flags, filters and functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without jinja's escaping for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
