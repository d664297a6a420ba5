"""A checkpoint's chat template: conversation in, prompt text out, in jinja's sandbox.

Used by the prompt builder. Templates come from strangers, so they see plain data only and can change nothing.
It must not know tokens beyond their spelling.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engines.base import InvalidRequest
from shared.protocol import ChatMessage, ImagePart

#: LLaVA-1.5's, as llava-hf publishes it; for checkpoints that bring none.
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
_PROBE = "probe"


class UnusableTemplate(Exception):
    """The template cannot be compiled, or puts pictures nowhere; the message says which."""


class ChatTemplate:
    """A compiled template, and whether it takes contents as lists of parts or as one string.

    Raises: UnusableTemplate.
    """

    def __init__(
        self, source: str, image_token: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self._image_token = image_token
        self._variables = dict(variables or {})
        try:
            self._template = _create_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UnusableTemplate(f"the chat template is no jinja template: {error}") from None
        self._content: Literal["parts", "string"] = "parts" if self._takes_parts() else "string"
        if self._content == "string" and not self._is_probe_rendered(f"{image_token}\n{_PROBE}"):
            raise UnusableTemplate("the chat template has no place for pictures")

    def render(self, messages: Sequence[ChatMessage], texts: Sequence[Sequence[str]]) -> str:
        """The prompt's text. `texts[i]` are the texts that stand for the text parts of `messages[i]`.

        Raises: InvalidRequest where the template refuses the conversation.
        """
        rendered = []
        for message, replacements in zip(messages, texts, strict=True):
            remaining = iter(replacements)
            parts: list[dict[str, str]] = [
                {"type": "image"}
                if isinstance(part, ImagePart)
                else {"type": "text", "text": next(remaining)}
                for part in message.parts
            ]
            rendered.append({"role": message.role, "content": self._to_content(parts)})
        try:
            return self._render(rendered)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {str(error)[:200]}"
            ) from None
        except Exception:  # a template may fail in any way that Python can
            raise InvalidRequest(
                "The model's chat template cannot render this conversation."
            ) from None

    def _to_content(self, parts: list[dict[str, str]]) -> list[dict[str, str]] | str:
        if self._content == "parts":
            return parts
        return "".join(part.get("text", f"{self._image_token}\n") for part in parts)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._variables,
        )

    def _takes_parts(self) -> bool:
        return self._is_probe_rendered([{"type": "image"}, {"type": "text", "text": _PROBE}])

    def _is_probe_rendered(self, content: list[dict[str, str]] | str) -> bool:
        try:
            text = self._render([{"role": "user", "content": content}])
        except Exception:  # a template may fail in any way that Python can
            return False
        # A template that expects a string prints the list itself.
        is_list_printed = "'type'" in text or '"type"' in text
        found = (text.count(self._image_token), text.count(_PROBE))
        return found == (1, 1) and not is_list_printed


def read_chat_template(directory: Path) -> str | None:
    """The template of a checkpoint, from the places and in the order in which transformers looks.

    Raises: UnusableTemplate on files that are no JSON.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        file = directory / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
        except ValueError as error:
            raise UnusableTemplate(f"{name} is no JSON: {error}") from None
        if isinstance(found, list):  # several by name
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
        if isinstance(found, str):
            return found
    return None


class _Generation(Extension):
    """Accepts `{% generation %}`, with which templates mark the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
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
