"""Sessions of applications: common data that is sent once, and tasks that outlive their connections.

A task is a resumable call: it runs whether or not a client waits, and any gateway finds it by session and id. During a
canary, one version runs all tasks of a session. A new version calls `enter` again for each session.
"""

import asyncio
import hashlib
import hmac
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType
from starlette.responses import Response, StreamingResponse

from gateway.api.fields import Data, RequestStruct, check_most, copy_fields, invalid
from gateway.api.run import TaskAnswer, compact, output_of
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.open_call import Gone, OpenCall
from gateway.calls.surface import AnswerHead, Totals
from gateway.http.endpoint import Caller, Resource, operation, owner_of
from gateway.http.errors import (
    ApiError,
    ErrorFields,
    InvalidRequest,
    KeyEnded,
    NotFound,
    conflict,
    from_failed,
    unavailable,
)
from gateway.http.exchange import SSE_HEADERS, SSE_KEEP_ALIVE, sse_event
from shared.packages.deployments import MAX_INSTANCES, Resources
from shared.packages.rollout import fits
from shared.protocol import (
    Call,
    CallEvent,
    ErrorCode,
    Failed,
    Finished,
    ModelCard,
    Priority,
    Run,
    decode_log,
)
from shared.queue.api import (
    DuplicateRequest,
    QueueRefused,
    QueueUnavailable,
    RequestState,
    Submission,
)
from shared.sessions.store import (
    ENDED,
    Session,
    SessionState,
    SessionStore,
    TaskRecord,
    TaskRefused,
)
from shared.settings.limits import MAX_PAGE, LimitSettings

MAX_WAIT_S = 60.0
MAX_SHOWN_CHARS = 256  #: length of the beginning of a task's input in a `TaskObject`
_MAX_NAMED = 20  #: tasks in an error message
_MAX_OPEN_OF_PAGE = 1000  #: open tasks that are looked up for a page of sessions
#: A recorded task that is missing in the queue counts as pending for this time, then as failed.
BEGINS_WITHIN_S = 10.0
_DAY_S = 86_400.0
_COMMON_GRACE_S = 60.0  #: common data is readable this long after a task's deadline

TaskState = Literal["pending", "running", "succeed", "failed", "cancelled"]
_STATES: dict[str, TaskState] = {
    "queued": "pending",
    "running": "running",
    "finished": "succeed",
    "failed": "failed",
    "cancelled": "cancelled",
}
TaskId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$(?!\n)")]
Seconds = Annotated[float, Meta(gt=0, le=_DAY_S)]


class SessionResources(RequestStruct, frozen=True, kw_only=True):
    """Minimum resources of each instance."""

    cpu: Annotated[float, Meta(ge=0, le=4096)] = 0.0
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    gpu: Annotated[int, Meta(ge=0, le=64)] = 0


class CreateSession(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/applications/{name}/sessions`. Units: seconds."""

    common_data: Raw | UnsetType = UNSET  #: any JSON, passed to the application's `enter`
    priority: Priority = Priority.INTERACTIVE
    #: The session expires after this time without a new task. Results are kept for the same time.
    idle_s: Seconds = 3600.0
    timeout_s: Seconds = 3600.0  #: time limit of each task, including its time in the queue
    #: Summed over the application's open sessions; no maximum if one has none. The deployment's bounds also apply.
    min_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] = 0
    max_instances: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] | None = None
    resources: SessionResources | None = None  #: minimum of each instance


class TaskInput(RequestStruct, frozen=True, kw_only=True):
    """One task. Sending the same `id` and input again returns the existing task."""

    input: Raw
    id: TaskId | None = None


class CreateTasks(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/sessions/{id}/tasks`: one task with `input`, or several in `tasks`."""

    input: Raw | UnsetType = UNSET
    id: TaskId | None = None
    tasks: Annotated[list[TaskInput], Meta(min_length=1)] | None = None


class Empty(RequestStruct, frozen=True, kw_only=True):
    """A body without fields."""


class TaskQuery(msgspec.Struct, forbid_unknown_fields=True):
    wait: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = 0.0  #: seconds to wait for the task's end


class PageQuery(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    after: Annotated[str, Meta(max_length=128)] = ""  #: last id of the previous page


class TasksQuery(PageQuery):
    include: Literal["", "results"] = ""


class SessionObject(msgspec.Struct):
    """A session, and the number of its tasks by state. `resources`: of each instance, if known."""

    id: str
    application: str
    state: Literal["open", "closed"]
    priority: Priority
    pending: int
    running: int
    succeed: int
    failed: int
    cancelled: int
    created: int
    idle_s: float
    timeout_s: float
    min_instances: int
    max_instances: int  #: 0: the maximum of the deployment
    resources: dict[str, Any] | None
    object: str = "session"


class SessionList(Data[SessionObject]):
    """Sessions of a key, newest first."""

    has_more: bool = False


class TaskObject(msgspec.Struct):
    """A task. A finished task has `output` or `error`. `package`: the version that runs the task."""

    id: str
    session: str
    state: TaskState
    package: str
    created: int
    input: str  #: the beginning of its JSON
    output: Raw | UnsetType = UNSET
    error: ErrorFields | UnsetType = UNSET
    object: str = "task"


class TaskList(Data[TaskObject]):
    """Tasks, oldest first. They have results only if `include=results` is sent."""

    has_more: bool = False


class _PartlyQueued(ApiError):
    """Only some tasks were queued. Reports the error of the first failed task, and the queued tasks in `data`."""

    def __init__(self, failed: Mapping[int, Any], queued: list[TaskObject]) -> None:
        first: ApiError = next(iter(failed.values()))
        names = ", ".join(f"tasks[{index}]" for index in [*failed][:_MAX_NAMED])
        names += ", ..." if len(failed) > _MAX_NAMED else ""
        super().__init__(
            f"{first.message} {len(queued)} tasks were queued (see data); these were not: {names}.",
            code=first.code, param=f"tasks[{next(iter(failed))}]", status=first.status,
            retry_after_s=first.retry_after_s,
        )  # fmt: skip
        self.type, self._queued = first.type, queued

    def body(self) -> bytes:
        """OpenAI's error envelope, with the queued tasks."""
        error = msgspec.json.decode(super().body())
        return msgspec.json.encode({**error, "data": self._queued})


_SESSION = "/v1/sessions/{session_id}"
_TASK = _SESSION + "/tasks/{task_id}"


@dataclass
class Sessions(Resource):
    tag = "sessions"

    _lifecycle: Lifecycle
    _store: SessionStore
    _limits: LimitSettings

    # Sessions

    @operation("POST", "/v1/applications/{name}/sessions", commas="max_task_bytes")
    async def create_session(self, caller: Caller, body: CreateSession) -> SessionObject:
        """Open a session."""
        session_id = "sess_" + token_hex(16)
        name = caller.path["name"]
        self._lifecycle.key_limits.restrict(caller.context)
        await self._find_card(name, session_id, caller.context.tenant)
        least, most = body.min_instances, body.max_instances or 0
        if most and least > most:
            raise invalid("min_instances", f"send at most max_instances, which is {most}")
        resources = body.resources and Resources(**msgspec.structs.asdict(body.resources))
        session = Session(
            session_id, _owner(caller), name, time.time(),  # noqa: TID251
            body.idle_s, body.timeout_s, caller.context.at_most(body.priority),
            min_instances=least, max_instances=most, resources=resources,
        )  # fmt: skip
        self._check_resources(session)
        most = self._limits.max_sessions
        if not await self._store.reserve(session, most):
            raise conflict(
                f"This key has the maximum of {most} sessions: use an open one, or wait until one expires.",
                code="too_many_sessions",
            )
        if body.common_data is not UNSET:
            most = self._limits.max_common_bytes
            data = bytes(compact(body.common_data, "common_data", most))
            ref = await self._lifecycle.blobs.put(data, session_id, ttl_s=session.ttl_s)
            session = msgspec.structs.replace(session, common=ref)
        await self._store.create(session)
        return self._show(SessionState(session, "open", {}), {})

    @operation("GET", "/v1/sessions")
    async def list_sessions(self, caller: Caller, query: PageQuery) -> SessionList:
        """List the sessions of this key."""
        page = await self._store.page(_owner(caller), query.after, query.limit, _MAX_OPEN_OF_PAGE)
        if page is None:
            raise invalid("after", "send the id of a session of this key, or leave it out")
        found, has_more = page
        return SessionList(await self._describe(found), has_more=has_more)

    @operation("GET", _SESSION)
    async def retrieve_session(self, caller: Caller) -> SessionObject:
        """Show a session."""
        [shown] = await self._describe([await self._find(caller, self._limits.max_session_tasks)])
        return shown

    @operation("POST", _SESSION + ":close")
    async def close_session(self, caller: Caller, body: Empty) -> SessionObject:
        """Close a session: refuse new tasks, and cancel pending tasks."""
        session = (await self._find(caller)).session
        await self._store.close_session(session)
        found = await self._find(caller, self._limits.max_session_tasks)
        [states] = await self._find_open_states([found])
        waiting = [t for t, s in zip(found.open_tasks, states, strict=True) if s == "pending"]
        await self._cancel(session.id, waiting)
        if session.common is not None and "running" not in states:
            self._lifecycle.blobs.release(session.id, [session.common])  # else it expires later
        return await self.retrieve_session(caller)

    async def _find(self, caller: Caller, max_open: int = 0) -> SessionState:
        """The caller's session. Raises: NotFound, QueueUnavailable."""
        found = await self._store.find(caller.path["session_id"], max_open)
        if found is None or not hmac.compare_digest(found.session.owner, _owner(caller)):
            raise NotFound(
                "There is no such session, or it expired after idle_s without a task: "
                "GET /v1/sessions lists the sessions.",
                param="session",
                code="session_not_found",
            )
        return found

    async def _describe(self, found: Sequence[SessionState]) -> list[SessionObject]:
        """Sessions with the numbers of their tasks. Open tasks that were not looked up count as pending."""
        shown = []
        for each, states in zip(found, await self._find_open_states(found), strict=True):
            now = Counter(states)
            now["pending"] += each.num_open - len(each.open_tasks)
            shown.append(self._show(each, now + Counter(each.ended)))
        return shown

    async def _find_open_states(self, found: Sequence[SessionState]) -> list[list[TaskState]]:
        """States of each session's open tasks. Updates the store for tasks that have ended."""
        flat = iter(await self._read_states([task for each in found for task in each.open_tasks]))
        every: list[list[TaskState]] = [[next(flat) for _ in each.open_tasks] for each in found]
        for each, states in zip(found, every, strict=True):
            tasks = zip(each.open_tasks, states, strict=True)
            ended = {task.id: state for task, state in tasks if state in ENDED}
            await self._store.settle(each.session.id, ended)
        return every

    # Tasks

    @operation("POST", _SESSION + "/tasks", commas="max_task_bytes")
    async def create_tasks(self, caller: Caller, body: CreateTasks) -> TaskList:
        """Submit tasks to a session."""
        tasks = body.tasks
        if (tasks is None) == (body.input is UNSET):
            raise invalid("tasks", "send either input, or tasks that each have an input")
        if tasks is None:
            assert body.input is not UNSET
            tasks = [TaskInput(input=body.input, id=body.id)]
        elif body.id is not None:
            raise invalid("id", "send an id in each entry of tasks instead")
        check_most("tasks", len(tasks), self._limits.max_tasks, "at a time")
        found = await self._find(caller)
        session = found.session
        card = await self._find_card(session.application, session.id, caller.context.tenant)
        self._check_resources(session)
        if found.state == "open":
            await self._renew(session)
        inputs = [compact(task.input, "input", self._limits.max_task_bytes) for task in tasks]
        submits = [
            self._submit(caller, session, card, task.id or token_hex(8), data)
            for task, data in zip(tasks, inputs, strict=True)
        ]
        shown = await asyncio.gather(*submits, return_exceptions=True)
        queued = [each for each in shown if isinstance(each, TaskObject)]
        failed = {i: each for i, each in enumerate(shown) if isinstance(each, BaseException)}
        if failed and queued and all(isinstance(each, ApiError) for each in failed.values()):
            raise _PartlyQueued(failed, queued)
        for error in failed.values():
            raise error
        return TaskList(queued)

    async def _renew(self, session: Session) -> None:
        """Extend the lifetime of instance bounds and common data. Raises: InvalidRequest, QueueUnavailable."""
        await self._store.keep_limits(session)
        if session.common is not None and not await self._lifecycle.blobs.hold(
            session.common, session.id, ttl_s=session.ttl_s
        ):
            raise conflict(
                "The session's common data is lost: open a new session.", code="session_lost"
            )

    async def _submit(
        self, caller: Caller, session: Session, card: ModelCard, task_id: str, data: Raw
    ) -> TaskObject:
        """Queue a task, unless it was queued earlier. Raises: ApiError, QueueUnavailable."""
        now = time.time()  # noqa: TID251
        tenant, key_limits = caller.context.tenant, self._lifecycle.key_limits
        request_id = hashlib.sha256(f"{session.id}\0{task_id}".encode()).hexdigest()[:32] + "-0"
        limits = key_limits.limits(session.priority, tenant)
        request_id += self._lifecycle.dispatcher.queue.place(request_id, tenant, limits, None)
        wanted = TaskRecord(
            task_id, request_id, card.queue, card.package,
            hashlib.sha256(bytes(data)).hexdigest(), now, now + session.timeout_s,
            bytes(data).decode()[:MAX_SHOWN_CHARS],
        )  # fmt: skip
        common = session.common
        if common is not None:
            lives_s = session.timeout_s + _COMMON_GRACE_S
            common = await self._lifecycle.blobs.locate(common, lives_s)
        try:
            task, state = await self._store.add(session, wanted, self._limits.max_session_tasks)
        except TaskRefused as refused:
            if refused.reason != "full":
                message = "The session is closed: open a new one."
                raise conflict(message, code="session_closed") from None
            most = self._limits.max_session_tasks
            message = f"The session has the maximum of {most} tasks: open a new session."
            raise conflict(message, code="session_full") from None
        if task.fingerprint != wanted.fingerprint:
            raise conflict(
                f"The task {task_id} has another input: send another id.", code="task_id_reused"
            )
        if state == "new" or (state == "open" and now < task.deadline_at):
            run = Run(data, session.id, common, keep_s=session.idle_s, id=task_id)
            try:
                await self._queue(caller, session, card, task, run)
            except BaseException:
                # Redis may have accepted the call although its reply was lost.
                queue = self._lifecycle.dispatcher.queue
                if state == "new" and await queue.state(task.model, task.request_id) is None:
                    await self._store.settle(session.id, {task_id: "forgotten"})
                raise
            try:
                await self._store.confirm(session.id, task)
                await self._lifecycle.dispatcher.queue.confirm(task.model, [task.request_id])
            except QueueUnavailable:
                raise unavailable() from None
        if state == "new":
            return _show_task(session, task, "pending")
        [state] = await self._find_states(session, [(task, state)])
        return _show_task(session, task, state)

    async def _queue(
        self, caller: Caller, session: Session, card: ModelCard, task: TaskRecord, run: Run
    ) -> None:
        """Raises: Overloaded, QueueUnavailable."""
        lifecycle, tenant = self._lifecycle, caller.context.tenant
        key_limits = lifecycle.key_limits
        key_limits.check(task.model, tenant)
        call = Call(
            id=task.request_id, reply_to=lifecycle.gateway_id, model=task.model, task=run,
            tenant=tenant, priority=session.priority, trace_parent=caller.context.trace_parent,
            is_resumable=True,
        )  # fmt: skip
        limits = key_limits.limits(session.priority, tenant)
        reservation = key_limits.reservation([call], card, limits)
        left_s, most = task.deadline_at - time.time(), key_limits.max_waiting(session.priority)  # noqa: TID251
        charge = key_limits.charge([call], card)
        submission = Submission((), left_s, most, reservation, charge=charge)
        try:
            submitted = await lifecycle.dispatcher.submit([call], submission)
        except QueueRefused as refused:
            raise key_limits.to_error(refused, task.model, tenant) from None
        except DuplicateRequest:
            return
        submitted.close()  # the task continues without a client

    @operation("GET", _SESSION + "/tasks")
    async def list_tasks(self, caller: Caller, query: TasksQuery) -> TaskList:
        """List the tasks of a session."""
        session = (await self._find(caller)).session
        found = await self._store.task_page(session.id, query.after, query.limit)
        if found is None:
            raise invalid("after", "send the id of a task of this session, or leave it out")
        page, has_more = found
        states = await self._find_states(session, page)
        shown = [
            _show_task(session, task, state) for (task, _), state in zip(page, states, strict=True)
        ]
        if query.include == "results":
            ended = zip(shown, page, strict=True)
            results = [self._complete(one, task) for one, (task, _) in ended if one.state in ENDED]
            await asyncio.gather(*results)
        return TaskList(shown, has_more=has_more)

    @operation("GET", _TASK)
    async def retrieve_task(self, caller: Caller, query: TaskQuery) -> TaskObject:
        """Show a task, after waiting at most `wait` seconds for its end."""
        session, task, state = await self._find_task(caller)
        if query.wait and state not in ENDED:
            await self._wait(task, query.wait, caller.context.tenant)
            [state] = await self._find_states(session, [(task, "open")])
        shown = _show_task(session, task, state)
        if state in ENDED:
            await self._complete(shown, task)
            if state == "succeed" and shown.output is UNSET:
                raise _expired()
        return shown

    @operation("POST", _TASK + ":cancel")
    async def cancel_task(self, caller: Caller, body: Empty) -> TaskObject:
        """Cancel a task."""
        session, task, state = await self._find_task(caller)
        if state not in ENDED:
            await self._cancel(session.id, [task])
            [state] = await self._find_states(session, [(task, "open")])
        return _show_task(session, task, state)

    @operation("GET", _TASK + "/events")
    async def stream_task(self, caller: Caller) -> Response:
        """Stream a task from its first item."""
        session, task, state = await self._find_task(caller)
        queue = self._lifecycle.dispatcher.queue
        if state in ENDED and await queue.state(task.model, task.request_id) is None:
            raise _expired()
        call = await self._follow(task, session.timeout_s)
        call.tenant = caller.context.tenant
        head = AnswerHead(task.id, int(task.created_at), session.application, task.package)
        headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
        headers |= {"x-vlm-package": task.package} if task.package else {}
        return StreamingResponse(self._frames(call, head), headers=headers)

    async def _frames(self, call: OpenCall, head: AnswerHead) -> AsyncIterator[bytes]:
        answer = TaskAnswer(head)
        try:
            while not call.choices[0].is_finished or call.pending:
                events = await call.receive(self._lifecycle.settings.keep_alive_s)
                if not events:
                    yield SSE_KEEP_ALIVE
                    continue
                last = events[-1][1]
                totals = Totals() if isinstance(last, Finished) else None
                yield b"".join(data for _, data in answer.frames(events, totals))
                if isinstance(last, Failed):
                    yield sse_event(from_failed(last).event())
        except Gone:
            return
        finally:
            call.close()

    # States of tasks

    async def _find_task(self, caller: Caller) -> tuple[Session, TaskRecord, TaskState]:
        """The task named in the path, and its state. Raises: NotFound, QueueUnavailable."""
        session = (await self._find(caller)).session
        found = await self._store.task(session.id, caller.path["task_id"])
        if found is None:
            raise NotFound("The session has no such task.", param="task", code="task_not_found")
        [state] = await self._find_states(session, [found])
        return session, found[0], state

    async def _find_states(
        self, session: Session, noted: Sequence[tuple[TaskRecord, str]]
    ) -> list[TaskState]:
        """States of recorded tasks. Updates the store for tasks that have ended."""
        tasks = [task for task, state in noted if state not in ENDED]
        found = dict(zip((task.id for task in tasks), await self._read_states(tasks), strict=True))
        ended = {task_id: state for task_id, state in found.items() if state in ENDED}
        await self._store.settle(session.id, ended)
        return [state if state in ENDED else found[task.id] for task, state in noted]

    async def _read_states(self, tasks: Sequence[TaskRecord]) -> list[TaskState]:
        states: dict[str, TaskState] = {}
        for model, group in _by_model(tasks).items():
            ids = [task.request_id for task in group]
            found = await self._lifecycle.dispatcher.queue.states(model, ids)
            for task, state in zip(group, found, strict=True):
                states[task.request_id] = _state_of(task, state)
        return [states[task.request_id] for task in tasks]

    async def _complete(self, shown: TaskObject, task: TaskRecord) -> None:
        """Add the output or the error from the log of the call, if the log is still stored."""
        log = await self._lifecycle.dispatcher.queue.events(task.model, task.request_id)
        events: Sequence[CallEvent] = decode_log(log)
        if shown.state == "succeed" and events:
            shown.output = output_of(events)
        elif shown.state == "failed" and events and isinstance(events[-1], Failed):
            error = from_failed(events[-1])
            shown.error = ErrorFields(error.message, error.type, error.param, error.code)
        elif shown.state == "failed":
            text = "The task's result has expired, or the task did not end in time or was lost."
            shown.error = ErrorFields(text, "server_error", None, ErrorCode.DEADLINE_EXCEEDED.value)

    async def _wait(self, task: TaskRecord, wait_s: float, tenant: str) -> None:
        """Raises: AuthenticationError if the tenant's key is revoked or expires, QueueUnavailable."""
        until = time.monotonic() + wait_s
        call = await self._follow(task, wait_s)
        call.tenant = tenant
        try:
            while (left_s := until - time.monotonic()) > 0 and not call.choices[0].is_finished:
                for _, event in await call.receive(left_s):
                    if isinstance(event, KeyEnded):
                        call.is_resumable = True  # the task continues
                        raise from_failed(event)
        except Gone:
            pass
        finally:
            call.close()

    async def _follow(self, task: TaskRecord, timeout_s: float) -> OpenCall:
        lifecycle = self._lifecycle

        async def listen(model: str, request_id: str):
            return await lifecycle.resume.queue.listen(model, request_id, lifecycle.gateway_id)

        return await lifecycle.dispatcher.follow(
            task.model, task.request_id, listen=listen, timeout_s=timeout_s + BEGINS_WITHIN_S,
            begins_within_s=BEGINS_WITHIN_S,
        )  # fmt: skip

    async def _cancel(self, session_id: str, tasks: Sequence[TaskRecord]) -> None:
        for model, group in _by_model(tasks).items():
            await self._lifecycle.dispatcher.queue.cancel(model, [t.request_id for t in group])
        states = await self._read_states(tasks)  # some may have ended meanwhile
        ended = {
            task.id: state if state in ENDED else "cancelled"
            for task, state in zip(tasks, states, strict=True)
        }
        await self._store.settle(session_id, ended)

    def _show(self, found: SessionState, counts: Mapping[str, int]) -> SessionObject:
        session = found.session
        return copy_fields(
            session,
            SessionObject,
            state=found.state,
            created=int(session.created_at),
            resources=self._lifecycle.models.resources(session.application),
            **{state: counts.get(state, 0) for state in get_args(TaskState)},
        )

    def _check_resources(self, session: Session) -> None:
        """Raises: InvalidRequest if instances have fewer resources than the session requires."""
        wanted, found = session.resources, self._lifecycle.models.resources(session.application)
        if wanted is None or (found and fits(wanted, Resources(**found))):
            return
        raise conflict(
            f"Instances of this application have {Resources(**found) if found else 'unknown resources'}, less than the session requires: "
            "require less, or deploy the application with more.",
            code="insufficient_resources",
        )

    async def _find_card(self, name: str, side: str, tenant: str) -> ModelCard:
        """The application's version for a session. `side`: the session's id. Raises: ApiError, QueueUnavailable."""
        card = await self._lifecycle.models.find(name, side, "run", tenant, "name")
        if "run" not in card.tasks:
            raise InvalidRequest(
                "This is a model, not an application: use a model API, such as /v1/chat/completions.",
                param="name",
                code="wrong_task",
            )
        return card


def _expired() -> NotFound:
    return NotFound("The task's result is no longer stored.", code="result_expired")


def _by_model(tasks: Sequence[TaskRecord]) -> dict[str, list[TaskRecord]]:
    by_model: dict[str, list[TaskRecord]] = {}
    for task in tasks:
        by_model.setdefault(task.model, []).append(task)
    return by_model


def _state_of(task: TaskRecord, found: RequestState | None) -> TaskState:
    """State of a task's call. A call that was never queued, or that Redis has lost, counts as failed."""
    if found is None:
        now = time.time()  # noqa: TID251
        return "pending" if now < task.created_at + BEGINS_WITHIN_S else "failed"
    if found.state in ("queued", "running") and found.remaining_s < 0:
        return "failed"
    return _STATES[found.state]


def _owner(caller: Caller) -> str:
    return owner_of(caller.context.tenant, "session")


def _show_task(session: Session, task: TaskRecord, state: TaskState) -> TaskObject:
    return TaskObject(task.id, session.id, state, task.package, int(task.created_at), task.input)
