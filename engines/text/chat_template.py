"""A checkpoint's chat template: renders a conversation as text.

Templates are untrusted. They are compiled as in transformers, and run on plain data in jinja's sandbox, with limits of
time and memory. A Python thread cannot be stopped from outside. Therefore each operation of a template (loops, calls,
filters, operators, outputs) estimates the size of its result first and checks the time and the characters of the
rendering so far.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime  # noqa: TID251
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from engines.base import InvalidRequest
from engines.core.sequence import NO_OPTIONS
from engines.packages.checkpoint_json import load_text, read_json
from engines.text.tools import ToolFormat, find_tool_format
from shared.protocol import ChatMessage, ImagePart

Messages = Sequence[Mapping[str, Any]]

MAX_S = 1.0  #: CPU time of one rendering
_COMPILE_S = 2.0
_MAX_SOURCE_CHARS = 512 * 1024
#: Limit of a prompt: this many characters, plus a multiple of the characters of its conversation.
_BASE_CHARS = 65_536
_CHARS_RATIO = 4
_MADE_RATIO = 100  #: limit of intermediate characters and items, as a multiple of the prompt limit
_MAX_PRODUCT = 100_000_000  #: limit of the product of the sizes of a call's arguments
_MAX_BITS = 4096  #: limit of an integer
_MAX_DIGITS = 50  #: argument of `round`
_NUMBER = re.compile(r"\d+")
_WIDTH_FROM_VALUE = re.compile(r"%[^a-zA-Z%]*\*|\{[^}]*\{")
#: Filters with super-linear results or time.
_AMPLIFYING = frozenset({"batch", "center", "indent", "join", "slice", "tojson", "truncate"})
#: Filters and functions with unbounded time that no prompt needs.
_DROPPED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")


#: Template variables that requests cannot set.
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"}) | {
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}
#: The template of llava-hf's LLaVA-1.5, for checkpoints without a template.
LLAVA_TEMPLATE = """\
{% for message in messages %}\
{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}\
{{ '<image>\\n' }}\
{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}\
{{ content['text'] + ' ' }}\
{% endfor %}\
{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}\
"""
#: For text-only checkpoints without a template: one line per message.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
_PROBE = "probe"


class UnusableTemplate(Exception):
    """The template cannot be compiled, or does not render images or texts."""


class TemplateRefusal(Exception):
    """The template refuses the conversation with this message."""


class TemplateFailure(Exception):
    """The template fails, takes too long or produces too much text."""


class _Work:
    """The limits and counters of one rendering."""

    def __init__(self, max_chars: int, max_s: float) -> None:
        self.max_chars = max_chars
        self.max_weight = 10 * max_chars  #: limit of one list or dictionary
        self._num_left = _MADE_RATIO * max_chars
        self._until = time.monotonic() + max_s
        self._until_of_thread = time.thread_time() + max_s

    def charge(self, size: int) -> None:
        """Count `size` and check the time. Raises: TemplateFailure."""
        self._num_left -= size
        if self._num_left < 0:
            raise TemplateFailure("produces too much")
        # The limit is on CPU time, because the machine may pause. Wall time is cheaper to read, so it is checked first.
        if time.monotonic() > self._until and time.thread_time() > self._until_of_thread:
            raise TemplateFailure("takes too long")

    def check(self, value: Any) -> Any:
        """Returns the value if it is not too large. Raises: TemplateFailure."""
        if isinstance(value, str):
            if len(value) > self.max_chars:
                raise TemplateFailure("a text is too long")
            self.charge(len(value))
        elif isinstance(value, list | tuple | dict | Namespace):
            self.charge(self.weigh(value))
        return value

    def weigh(self, value: Any) -> int:
        """Number of characters and items in a nested collection. Raises: TemplateFailure if too many."""
        weight, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            weight += 1
            if isinstance(item, str | bytes):
                weight += len(item)
            elif isinstance(item, dict):
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, Namespace):
                waiting.append(item._Namespace__attrs)  # type: ignore[attr-defined]
            elif isinstance(item, list | tuple):
                waiting += item
            if weight + len(waiting) > self.max_weight:
                raise TemplateFailure("a collection is too large")
        return weight

    def check_arguments(self, arguments: Sequence[Any]) -> None:
        """Refuse arguments of a call that may produce too large a result. Raises: TemplateFailure."""
        product = 1
        for argument in arguments:
            if isinstance(argument, int | float):
                size = abs(argument)
            elif isinstance(argument, str | bytes):
                size = len(argument)
            elif isinstance(argument, list | tuple | dict | Namespace):
                size = self.weigh(argument)
            else:
                continue
            if size > 1:
                product *= size
            if not product <= _MAX_PRODUCT:  # also true for NaN
                raise TemplateFailure("a call may produce too much")
        self.charge(1)


_work: ContextVar[_Work] = ContextVar("work")


@contextmanager
def _working(max_chars: int, max_s: float) -> Iterator[None]:
    token = _work.set(_Work(max_chars, max_s))
    try:
        yield
    finally:
        _work.reset(token)


class CompiledTemplate:
    """A compiled template. Thread-safe. Raises: UnusableTemplate."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._variables = variables
        if len(source) > _MAX_SOURCE_CHARS:
            raise UnusableTemplate(
                f"the chat template has more than {_MAX_SOURCE_CHARS} characters"
            )
        try:
            with _working(_BASE_CHARS, _COMPILE_S):
                sandbox = _Sandbox()
                self._template = sandbox.from_string(source)
                read = find_undeclared_variables(jinja2.Environment.parse(sandbox, source))
        except (
            jinja2.TemplateError,
            RecursionError,
            MemoryError,
            TemplateFailure,
            SyntaxError,
        ) as error:
            raise UnusableTemplate(f"the chat template is not a jinja template: {error}") from None

        #: variables that requests may set
        self.options = frozenset(read - _OURS - variables.keys())

    def render(
        self,
        messages: Messages,
        options: Mapping[str, Any] = NO_OPTIONS,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        is_answered: bool = True,
    ) -> str:
        """`options`: further variables. Raises: TemplateRefusal, TemplateFailure."""
        num_chars = sum(_count_chars(each) for each in (*messages, *tools))
        num_left = max_chars = _BASE_CHARS + _CHARS_RATIO * num_chars
        pieces: list[str] = []
        try:
            with _working(max_chars, MAX_S):
                for piece in self._template.generate(
                    messages=messages,
                    tools=list(tools) or None,
                    documents=None,
                    add_generation_prompt=is_answered,
                    **self._variables,
                    **{name: value for name, value in options.items() if name in self.options},
                ):
                    num_left -= len(piece)
                    if num_left < 0:
                        raise TemplateFailure("too long")
                    pieces.append(piece)
                return "".join(pieces)
        except TemplateFailure:
            raise
        except jinja2.TemplateError as error:
            raise TemplateRefusal(str(error)[:200]) from None
        except Exception as error:  # a template can raise any error
            raise TemplateFailure(type(error).__name__) from None


def _count_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 16 + sum(map(_count_chars, value.values())) + sum(map(len, value))
    if not isinstance(value, list | tuple):
        return 8
    return sum(16 + _count_chars(item) for item in value)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Flags, filters and functions of transformers' chat templates, with every operation limited."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self.check,
        )
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.filters.update({name: _bounded(name, f) for name, f in self.filters.items()})
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Checks().visit(template)
        template.set_environment(self)
        return template

    def tick(self, num_chars: int) -> str:
        """Count one round of a loop or call and its literal characters."""
        _work.get().charge(1 + num_chars)
        return ""

    def concat_texts(self, *values: Any) -> str:
        """The operator `~`."""
        work = _work.get()
        texts = [str(work.check(value)) for value in values]
        if sum(map(len, texts)) > work.max_chars:
            raise TemplateFailure("a text is too long")
        return work.check("".join(texts))

    def check(self, value: Any) -> Any:
        """Check a literal list, tuple or dictionary, or a value that becomes text."""
        return _work.get().check(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A binary operator. Raises: TemplateFailure if its result may be too large."""
        work = _work.get()
        work.charge(1)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            if bits > _MAX_BITS:
                raise TemplateFailure("a number is too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(work, left, right)
        elif operator == "*":
            size = _length(left) * _length(right)
            if size > work.max_weight:
                raise TemplateFailure("a product is too large")
        return work.check(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        work = _work.get()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str) and name in ("format", "format_map"):
            _check_format(work, owner, [*args, *kwargs.values()])
        elif isinstance(owner, str) and name == "replace":
            _check_replace(work, owner, args)
        elif isinstance(owner, str | bytes | int | float | list | tuple | dict):
            work.check_arguments([owner, *args, *kwargs.values()])
        else:
            work.charge(1)
        return work.check(super().call(__context, __obj, *args, **kwargs))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else abs(value)


def _check_format(work: _Work, form: str, values: Any) -> None:
    """Limit the widths of a format. Raises: TemplateFailure."""
    widths = sum(int(number[:9]) for number in _NUMBER.findall(form))
    if widths > work.max_chars or _WIDTH_FROM_VALUE.search(form):
        raise TemplateFailure("a format is too wide")
    work.check_arguments([form, values if isinstance(values, dict | list | tuple) else [values]])


def _check_replace(work: _Work, text: str, arguments: Sequence[Any]) -> None:
    old, new = (str(argument) for argument in arguments[:2])
    if len(text) + text.count(old) * len(new) > work.max_chars + len(text):
        raise TemplateFailure("a text is too long")
    work.charge(len(text))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with checks of its arguments and result."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        work = _work.get()
        given = [arg for arg in args if not isinstance(arg, jinja2.Environment)]
        values = [*given, *kwargs.values()]
        if name == "replace":
            texts = [str(value) for value in values if isinstance(value, str)]
            if len(texts) > 2:
                _check_replace(work, texts[0], texts[1:])
        elif name == "format":
            _check_format(work, str(values[0]), values[1:])
        elif name == "round" and any(
            abs(v) > _MAX_DIGITS for v in values[1:] if isinstance(v, int)
        ):
            raise TemplateFailure("too many digits")
        elif name == "sum" and any(isinstance(value, list | tuple | str) for value in values[2:]):
            raise TemplateFailure("a sum of other values than numbers")
        elif name in _AMPLIFYING:
            work.check_arguments(values)
        work.charge(1)
        if name in ("string", "join"):
            work.check(given[0])
        return work.check(function(*args, **kwargs))

    return bounded


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(method, arguments, [], None, None, lineno=lineno)


class _Checks(NodeTransformer):
    """Inserts checks into loops, macros, `~` and literal collections."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(
            node,
            nodes.For | nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.AssignBlock,
        ):
            num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            tick = _call("tick", [nodes.Const(num_chars)], node.lineno)
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if isinstance(node, nodes.Concat):
            return _call("concat_texts", node.nodes, node.lineno)
        if isinstance(node, nodes.List | nodes.Dict | nodes.Tuple):
            is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
            is_constant = next(node.find_all((nodes.Name, nodes.Call)), None) is None
            if not (is_target or is_constant):
                return _call("check", [node], node.lineno)
        return node


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace a `generation` block by its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without jinja's HTML escaping."""
    if isinstance(value, Undefined):
        raise TypeError("undefined is not JSON")
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 200 or _NUMBER.search(form.replace("%0", "%")):
        raise TemplateFailure("an invalid date format")
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template. Message contents are lists of parts or strings, as the template expects.

    `image_token` is the template's placeholder for an image; empty for a text-only model. Raises: UnusableTemplate.
    """

    def __init__(
        self, source: str, image_token: str, variables: Mapping[str, str] | None = None
    ) -> None:
        #: The call format, if the template lists functions.
        self.tool_format: ToolFormat | None = None
        self._image_token = image_token
        self._renderer = CompiledTemplate(source, dict(variables or {}))
        self.options = self._renderer.options  #: variables that requests may set
        parts = [*([{"type": "image"}] if image_token else []), {"type": "text", "text": _PROBE}]
        self._takes_parts = self._is_probe_rendered(parts)
        probe = f"{image_token}\n{_PROBE}" if image_token else _PROBE
        if not self._takes_parts and not self._is_probe_rendered(probe):
            missing = "images" if image_token else "texts"
            raise UnusableTemplate(f"the chat template does not render {missing}")
        function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object"}}
        content = self._to_content([{"type": "text", "text": "hello"}])
        if _PROBE in self._try(content, tools=[{"type": "function", "function": function}]):
            self.tool_format = find_tool_format(source)

    def render(
        self,
        messages: Sequence[ChatMessage],
        texts: Sequence[Sequence[str]],
        kinds: Sequence[str],
        options: Mapping[str, Any],
        tools: Sequence[dict[str, Any]],
        calls: Sequence[list[dict[str, Any]]],
        *,
        is_answered: bool,
    ) -> str:
        """The prompt's text. `texts[i]` replace the text parts of `messages[i]` and, after them, its reasoning.

        `options` are further variables, `tools` functions, `calls[i]` the calls of `messages[i]`. `kinds[i]` is image,
        video or audio, for the i-th medium. `is_answered`: add the generation prompt. Raises: InvalidRequest if the
        template refuses the conversation.
        """
        rendered = []
        for message, replacements, called in zip(messages, texts, calls, strict=True):
            remaining = iter(replacements)
            parts: list[dict[str, str]] = [
                {"type": kinds[part.image]}
                if isinstance(part, ImagePart)
                else {"type": "text", "text": next(remaining)}
                for part in message.parts
            ]
            shown: dict[str, Any] = {"role": message.role, "content": self._to_content(parts)}
            if message.reasoning:
                shown["reasoning_content"] = next(remaining)
            if called:
                shown["tool_calls"] = called
            if message.role == "tool":
                shown["tool_call_id"] = message.tool_call_id
            rendered.append(shown)
        try:
            return self._renderer.render(
                rendered, options=options, tools=tools, is_answered=is_answered
            )
        except TemplateRefusal as refusal:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {refusal}"
            ) from None
        except TemplateFailure:
            raise InvalidRequest(
                "The model's chat template cannot render this conversation."
            ) from None

    def _to_content(self, parts: list[dict[str, str]]) -> list[dict[str, str]] | str:
        if self._takes_parts:
            return parts
        return "".join(part.get("text", f"{self._image_token}\n") for part in parts)

    def takes(self, kind: str, placeholder: str) -> bool:
        """Whether the template writes a placeholder for a video or audio."""
        text = self._try([{"type": kind}, {"type": "text", "text": _PROBE}])
        return self._takes_parts and text.count(placeholder) == 1

    def _try(self, content: list[dict[str, str]] | str, **options: Any) -> str:
        """The rendering of a user message; empty if the template fails."""
        try:
            return self._renderer.render([{"role": "user", "content": content}], **options)
        except (TemplateRefusal, TemplateFailure):
            return ""

    def _is_probe_rendered(self, content: list[dict[str, str]] | str) -> bool:
        text = self._try(content)
        # A template that expects a string prints the list itself.
        is_list_printed = "'type'" in text or '"type"' in text
        num_images = text.count(self._image_token) if self._image_token else 1
        return (num_images, text.count(_PROBE)) == (1, 1) and not is_list_printed


def with_videos(source: str, for_videos: str) -> str:
    """A template that uses the template `for_videos` for conversations with a video, and `source` for all others."""
    return (
        "{% set videos = namespace(are_there=false) %}{% for message in messages %}"
        "{% if message['content'] is not string %}"
        "{% for part in message['content'] if part['type'] == 'video' %}"
        "{% set videos.are_there = true %}{% endfor %}{% endif %}{% endfor %}{% if videos.are_there %}"
        + for_videos
        + "{% else %}"
        + source.removesuffix("\n")
        + "{% endif %}"
    )


def read_chat_template(directory: Path) -> str | None:
    """The template of a checkpoint, located as in transformers. Raises: UnsupportedCheckpoint."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return load_text(file)
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        file = directory / name
        if not file.is_file():
            continue
        fields = read_json(file)
        found = fields.get("chat_template")
        if isinstance(found, list):  # several templates by name
            if not all(isinstance(entry, dict) for entry in found):
                raise fields.refuse("chat_template", "is not a list of objects")
            named = [entry for entry in found if entry.get("name") == "default"]
            found = named[-1].get("template") if named else None
        if isinstance(found, str):
            return found
    return None
