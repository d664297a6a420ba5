"""Hooks: custom code that reads or changes prompts before they are queued, and answers before they are sent.

A hook has an async method `before`, `after`, or both. Each receives a `HookCall`.
"""

import asyncio
import inspect
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Plan, Reply, Surface
from gateway.http.errors import ApiError, InvalidRequest, ServerError
from gateway.http.exchange import RequestContext, short_hash
from shared.protocol import ChatMessage, Embed, Generate, Rerank, Task, TextPart, Tokens
from shared.settings import SettingsError
from shared.telemetry.metrics import GatewayMetrics

ENTRY_POINTS = "vlm_fleet.hooks"
#: `reasoning` and `call` (the arguments of a function call) belong to the assistant.
Role = Literal["system", "user", "assistant", "tool", "reasoning", "call"]
Change = Callable[[Role, str], str]

logger = logging.getLogger(__name__)


class HookMessage(Struct):
    """A text of the prompt or of the answer. Hooks may change `text`; changes to streamed answers are ignored."""

    role: Role
    text: str


class HookCall(Struct):
    """The argument of a hook. `messages`: the texts of the prompt in `before`, of all choices in `after`."""

    request_id: str
    api: str  #: name of the API, such as `chat`
    model: str
    tenant: str  #: hash of the API key, as in the log
    messages: tuple[HookMessage, ...]
    num_images: int = 0
    is_streamed: bool = False

    def refuse(self, message: str, code: str = "request_refused", status: int = 400) -> ApiError:
        """Create the error that a hook raises to refuse a request. Raises: ValueError unless the status is 4xx."""
        if not 400 <= status < 500:
            raise ValueError(f"the status of a refusal is 4xx, not {status}")
        return InvalidRequest(message, code=code, status=status)


@dataclass
class Hooks:
    _hooks: Mapping[str, Any]
    _timeout_s: float
    _is_open: bool  #: if a hook fails, continue without it instead of answering 503
    _metrics: GatewayMetrics

    async def before(
        self, plan: Plan, surface: Surface, model: str, context: RequestContext
    ) -> Plan:
        """The plan with the texts that the hooks changed. Raises: ApiError."""
        prompts: dict[int, list[HookMessage]] = {}  # by `id` of the prompt; choices may share one
        for task in plan.tasks:
            if (name := id(_prompt_of(task))) not in prompts:
                texts = prompts[name] = []
                _change(
                    task, lambda role, text, to=texts: to.append(HookMessage(role, text)) or text
                )
        messages = tuple(message for texts in prompts.values() for message in texts)
        if not messages and not plan.images:
            return plan
        known = [message.text for message in messages]
        tenant, num_images = short_hash(context.tenant), len(plan.images)
        call = HookCall(
            context.id, surface.name, model, tenant, messages, num_images, plan.is_streamed
        )
        await self._run("before", call, self._timeout_s)
        if [message.text for message in messages] == known:
            return plan
        tasks: list[Task] = []
        for task in plan.tasks:
            found = iter(prompts[id(_prompt_of(task))])
            tasks.append(_change(task, lambda _role, _text, found=found: next(found).text))
        return replace(plan, tasks=tasks)

    async def after(
        self, events: Sequence[ChoiceEvent], reply: Reply, context: RequestContext
    ) -> Sequence[ChoiceEvent]:
        """The events of a complete answer with the texts that the hooks changed. Raises: ApiError."""
        if reply.surface.task != "generate":
            return events
        pieces: dict[int, tuple[list[str], list[str]]] = {}
        for index, event in events:
            if isinstance(event, Tokens):
                reasoning, text = pieces.setdefault(index, ([], []))
                reasoning.append(event.reasoning)
                text.append(event.text)
        choices = {
            index: (HookMessage("reasoning", "".join(thoughts)), HookMessage("assistant", "".join(text)))
            for index, (thoughts, text) in sorted(pieces.items())
        }  # fmt: skip
        known = {index: (r.text, a.text) for index, (r, a) in choices.items()}
        messages = tuple(
            m for both in choices.values() for m in both if m.role == "assistant" or m.text
        )
        api, model, tenant = reply.surface.name, reply.head.model, short_hash(context.tenant)
        call = HookCall(context.id, api, model, tenant, messages, is_streamed=reply.is_streamed)
        left_s = max(0.1, reply.call.deadline_at - time.monotonic())
        await self._run("after", call, min(self._timeout_s, left_s))
        changed = {
            i: (r.text, a.text) for i, (r, a) in choices.items() if (r.text, a.text) != known[i]
        }
        return _with_texts(events, changed) if changed and not reply.is_streamed else events

    async def _run(self, stage: str, call: HookCall, timeout_s: float) -> None:
        for name, hook in self._hooks.items():
            if (method := getattr(hook, stage, None)) is None:
                continue
            texts = [message.text for message in call.messages]
            try:
                async with asyncio.timeout(timeout_s):
                    await method(call)
                if not all(isinstance(message.text, str) for message in call.messages):
                    raise TypeError("a text is not a string")
            except ApiError:
                raise
            except Exception as error:
                self._metrics.count("hook_failures", name)
                # The error's own message is not logged, because it may quote a prompt.
                at = traceback.extract_tb(error.__traceback__)[-1]
                logger.error(
                    "the hook %s failed: %s in %s, line %s",
                    name, type(error).__name__, at.filename, at.lineno,
                )  # fmt: skip
                if not self._is_open:
                    failed = "A hook of this server failed; retry."
                    raise ServerError(failed, code="hook_failed", retry_after_s=1) from None
                for message, text in zip(call.messages, texts, strict=True):
                    message.text = text


def load_hooks(names: Iterable[str]) -> dict[str, Any]:
    """Load hooks by name: `module:object`, or an entry point of a package. Raises: SettingsError."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            hook = _find(name)
            hook = hook() if isinstance(hook, type) else hook
        except Exception as error:
            problem = f"{name} cannot be loaded: {type(error).__name__}: {error}"
            raise SettingsError(f"VLM_GATEWAY__HOOKS: {problem}") from None
        methods = [getattr(hook, stage) for stage in ("before", "after") if hasattr(hook, stage)]
        if not methods or not all(map(inspect.iscoroutinefunction, methods)):
            raise SettingsError(f"VLM_GATEWAY__HOOKS: {name} needs an async `before` or `after`")
        found[name] = hook
    return found


def _find(name: str) -> Any:
    if ":" in name:
        return EntryPoint(name, name, ENTRY_POINTS).load()
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        return entry.load()
    raise LookupError(f"use module:object, or the name of an entry point in {ENTRY_POINTS}")


def _prompt_of(task: Task) -> object:
    """The prompt of a task. Choices of the same prompt share this object."""
    return (task.messages or task.prompt) if isinstance(task, Generate) else task


def _change(task: Task, change: Change) -> Task:
    """Replace the texts of a task. Token ids, tools and tasks of applications are not changed."""
    match task:
        case Generate():
            prompt = task.prompt
            if isinstance(prompt, TextPart):
                prompt = TextPart(change("user", prompt.text))
            messages = tuple([_change_message(message, change) for message in task.messages])
            return replace(task, prompt=prompt, messages=messages)
        case Embed():
            inputs = tuple([_change_part(part, "user", change) for part in task.inputs])
            return replace(task, inputs=inputs)
        case Rerank():
            queries = tuple([change("user", text) for text in task.queries])
            documents = tuple([change("user", text) for text in task.documents])
            return replace(task, queries=queries, documents=documents)
        case _:
            return task


def _change_message(message: ChatMessage, change: Change) -> ChatMessage:
    return replace(
        message,
        reasoning=change("reasoning", message.reasoning) if message.reasoning else "",
        parts=tuple([_change_part(part, message.role, change) for part in message.parts]),
        tool_calls=tuple(
            [replace(call, arguments=change("call", call.arguments)) for call in message.tool_calls]
        ),
    )


def _change_part(part: Any, role: Role, change: Change) -> Any:
    return TextPart(change(role, part.text)) if isinstance(part, TextPart) else part


def _with_texts(
    events: Sequence[ChoiceEvent], changed: Mapping[int, tuple[str, str]]
) -> list[ChoiceEvent]:
    """Replace the texts of changed choices, and drop their token ids and logprobs, which belong to the old texts."""
    found: list[ChoiceEvent] = []
    left = dict(changed)
    for index, event in events:
        if index in changed and isinstance(event, Tokens):
            reasoning, text = left.pop(index, ("", ""))
            event = replace(
                event, reasoning=reasoning, text=text, logprobs=(), token_ids=(),
                num_without_id=event.num_tokens,
            )  # fmt: skip
        found.append((index, event))
    return found
