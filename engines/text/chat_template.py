"""A checkpoint's chat template: renders a conversation as text.

Templates are untrusted: they get plain data only, in jinja's sandbox, with limits of time and memory.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from engines.base import InvalidRequest
from engines.packages.checkpoint_json import read_json
from engines.text.template_rendering import (
    NO_OPTIONS,
    CompiledTemplate,
    TemplateFailure,
    TemplateRefusal,
    UnusableTemplate,
)
from engines.text.tools import ToolFormat, find_tool_format
from shared.protocol import ChatMessage, ImagePart

#: The template of llava-hf's LLaVA-1.5, for checkpoints without one.
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
#: For text-only checkpoints without one: one line per message.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
_PROBE = "probe"
NO_CALLS: Mapping[int, list[dict[str, Any]]] = {}


class ChatTemplate:
    """A compiled template. Message contents are lists of parts or strings, as the template expects.

    `image_token` is the template's placeholder for an image; empty for a text-only model. Raises: UnusableTemplate.
    """

    def __init__(
        self, source: str, image_token: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        #: The call format, if the template lists functions.
        self.tool_format: ToolFormat | None = None
        self._image_token = image_token
        self._renderer = CompiledTemplate(source, dict(variables or {}))
        parts = [*([{"type": "image"}] if image_token else []), {"type": "text", "text": _PROBE}]
        takes_parts = self._is_probe_rendered(parts)
        self._content: Literal["parts", "string"] = "parts" if takes_parts else "string"
        probe = f"{image_token}\n{_PROBE}" if image_token else _PROBE
        if self._content == "string" and not self._is_probe_rendered(probe):
            missing = "images" if image_token else "texts"
            raise UnusableTemplate(f"the chat template does not render {missing}")
        function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object"}}
        content = self._to_content([{"type": "text", "text": "hello"}])
        if _PROBE in self._try(content, tools=[{"type": "function", "function": function}]):
            self.tool_format = find_tool_format(source)

    @property
    def options(self) -> frozenset[str]:
        """Variables that a request may set."""
        return self._renderer.options

    def render(
        self,
        messages: Sequence[ChatMessage],
        texts: Sequence[Sequence[str]],
        options: Mapping[str, Any] = NO_OPTIONS,
        tools: Sequence[dict[str, Any]] = (),
        calls: Mapping[int, list[dict[str, Any]]] = NO_CALLS,
        *,
        kinds: Sequence[str] = (),
        is_answered: bool = True,
    ) -> str:
        """The prompt's text. `texts[i]` replace the text parts of `messages[i]`, then its reasoning.

        `options` are further variables, `tools` functions, `calls[i]` the calls of `messages[i]`; `kinds[i]` is image,
        video or audio. `is_answered`: add the generation prompt. Raises: InvalidRequest if the template refuses the
        conversation.
        """
        rendered = []
        for place, (message, replacements) in enumerate(zip(messages, texts, strict=True)):
            remaining = iter(replacements)
            parts: list[dict[str, str]] = [
                {"type": kinds[part.image] if kinds else "image"}
                if isinstance(part, ImagePart)
                else {"type": "text", "text": next(remaining)}
                for part in message.parts
            ]
            shown: dict[str, Any] = {"role": message.role, "content": self._to_content(parts)}
            if message.reasoning:
                shown["reasoning_content"] = next(remaining)
            if place in calls:
                shown["tool_calls"] = calls[place]
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
        if self._content == "parts":
            return parts
        return "".join(part.get("text", f"{self._image_token}\n") for part in parts)

    def takes(self, kind: str, placeholder: str) -> bool:
        """Whether the template writes a placeholder for a video or audio."""
        text = self._try([{"type": kind}, {"type": "text", "text": _PROBE}])
        return self._content == "parts" and text.count(placeholder) == 1

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
    """A template that renders conversations with a video by `for_videos`, and others by `source`."""
    return "".join(
        [
            "{% set videos = namespace(are_there=false) %}{% for message in messages %}"
            "{% if message['content'] is not string %}"
            "{% for part in message['content'] if part['type'] == 'video' %}"
            "{% set videos.are_there = true %}{% endfor %}{% endif %}{% endfor %}{% if videos.are_there %}",
            for_videos,
            "{% else %}",
            source.removesuffix("\n"),
            "{% endif %}",
        ]
    )


def read_chat_template(directory: Path) -> str | None:
    """The template of a checkpoint, searched in the order of transformers.

    Raises: UnsupportedCheckpoint for files that are not JSON.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        file = directory / name
        if not file.is_file():
            continue
        fields = read_json(file)
        found = fields.get("chat_template")
        if isinstance(found, list):  # several by name
            if not all(isinstance(entry, dict) for entry in found):
                raise fields.refuse("chat_template", "is not a list of objects")
            named = [entry for entry in found if entry.get("name") == "default"]
            found = named[-1].get("template") if named else None
        if isinstance(found, str):
            return found
    return None
