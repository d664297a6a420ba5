"""The contract of engines that generate: driven directly by their thread, and behind a worker, Redis and the gateway.

An engine joins by its name in the registry and a line in `SETTINGS`; pooling engines join in `test_pooling_engine.py`.
The capabilities of an engine decide which tests apply.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Raw, structs
from msgspec.structs import replace

from benchmarks.make_checkpoint import make_checkpoint
from engines.base import (
    Capabilities,
    Engine,
    EngineCall,
    LoadedEngine,
    PreparedImage,
    RequestError,
)
from engines.core.engine import BatchingEngine
from engines.image_decoder import decode_image
from engines.registry import create_engine, engine_kinds, register
from shared.protocol import (
    Call,
    ChatMessage,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Generate,
    ImagePart,
    ImageRef,
    Run,
    SamplingParams,
    Task,
    TextPart,
    Tokenize,
    Tokens,
    TokensPart,
)
from shared.settings.limits import LimitSettings
from tests.contract.test_pooling_engine import SETTINGS as POOLING_SETTINGS
from tests.contract.toys.engine import TOY
from tests.engines.upstream import asking, sglang, vllm
from tests.engines.upstream.llama import run_llama_server, write_model
from tests.engines.upstream.stand_in import StandIn, run_stand_in
from tests.factories_engine import Transcript, make_mock
from tests.factories_gateway import RunningGateway, make_body, make_settings, run_gateway_on_socket
from tests.factories_images import encoded
from tests.factories_queue import MODEL, Ends, make_request
from tests.factories_worker import Answers, StoppableEngine, run_worker, text
from tests.waiting import until
from tests.worker.conftest import answers as answers

#: Engines whose server is simulated.
STAND_INS = ("vllm", "sglang", "openai")
#: Real vLLM and SGLang servers on a CPU.
VLLM_CPU, SGLANG_CPU = "vllm-cpu", "sglang-cpu"
#: Servers whose sampling noise does not depend on the position. vLLM's does on GPUs, with model runner V2.
RESTARTS_NOISE = ("llama-server", VLLM_CPU, SGLANG_CPU)
SETTINGS: dict[str, dict[str, Any]] = {
    "mock": {"mock": make_mock(num_output_tokens=12).model_dump()},
    "torch": {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 4 * 2**20},
    "toy": {"greeting": "you said:"},
    "application": {"entry": "app:Words", "isolation": "none"},
    **{name: {} for name in ("vllm", VLLM_CPU, "sglang", SGLANG_CPU, "llama-server")},
    "openai": {"takes_images": True},
}
APPLICATION = """
from vlm_app import Application

class Words(Application):
    def run(self, task):
        yield from task["words"]
"""
QUESTION = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("tiny", directory, seed=3)
    return directory


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("application")
    (directory / "app.py").write_text(APPLICATION)
    return directory


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    """A simulated server with the APIs of vLLM and SGLang."""
    with run_stand_in() as server:
        yield server


#: Real servers: their model, the function that writes it, and the function that runs them.
REAL: dict[str, tuple[str, Callable[..., Path], Callable[..., Any]]] = {
    "llama-server": ("tiny.gguf", write_model, run_llama_server),
    VLLM_CPU: ("tiny", vllm.write_model, vllm.run_vllm),
    SGLANG_CPU: ("tiny", sglang.write_model, sglang.run_sglang),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[str, Path]]]:
    """Returns a function that starts a real server once, and returns its URL and model."""
    with ExitStack() as stack:

        @cache
        def start(name: str) -> tuple[str, Path]:
            file, write, run = REAL[name]
            model = write(tmp_path_factory.mktemp(name) / file)
            return stack.enter_context(run(model))[0], model

        yield start


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the toy as an engine that the project does not know."""
    monkeypatch.setattr("engines.registry.kinds", dict(engine_kinds()))
    register("toy", TOY)


@dataclass
class Case:
    """One of the engines that run here."""

    name: str
    models: Mapping[str, Path]
    url: str = ""  #: the server of an upstream engine
    stand_in: StandIn | None = None
    loaded: list[LoadedEngine] = field(default_factory=list)
    shared: dict[str, LoadedEngine] = field(default_factory=dict)  #: used by all tests, by name

    @property
    def started(self) -> LoadedEngine:
        """The engine shared by all tests that leave no request in it."""
        if self.name in self.shared and self.shared[self.name].engine.has_work():  # a test failed
            self.shared.pop(self.name).engine.close()
        if self.name not in self.shared:
            self.shared[self.name] = self.create()
        return self.shared[self.name]

    @property
    def engine(self) -> Engine:
        return self.started.engine

    def with_tokenizer(self) -> Engine:
        engine = self.engine
        if "tokenize" not in engine.capabilities().tasks:
            pytest.skip("it has no tokenizer")
        return engine

    @contextmanager
    def held(self, engine: StoppableEngine) -> Iterator[None]:
        """Holds back all but the first tokens of an answer."""
        engine.steps_left = 1 if self.stand_in is None else None
        engine.counts_empty_steps = (
            False  # steps of a server return nothing until its events arrive
        )
        if self.stand_in is not None:  # a step can return all tokens of such a server, or none
            self.stand_in.released.clear()
            self.stand_in.hold_after = 1
        try:
            yield
        finally:
            if self.stand_in is not None:
                self.stand_in.hold_after = None
                self.stand_in.released.set()

    @property
    def kind(self) -> str:
        return self.name.removesuffix("-cpu")

    def create(self, **changes: Any) -> LoadedEngine:
        values = {"kind": self.kind, "served_name": MODEL, **SETTINGS[self.name], **changes}
        if self.kind in self.models:
            values["model"] = str(self.models[self.kind])
        if self.url:
            values["url"] = self.url
        return create_engine(values)

    def load(self, **changes: Any) -> LoadedEngine:
        self.loaded.append(self.create(**changes))
        return self.loaded[-1]

    def start(self, **changes: Any) -> Engine:
        return self.load(**changes).engine

    @property
    def capabilities(self) -> Capabilities:
        if self.name not in KNOWN:
            KNOWN[self.name] = self.engine.capabilities()
        return KNOWN[self.name]

    def task(self, prompt: str = QUESTION, **sampling: Any) -> Task:
        """Returns a task of several steps that the engine supports; `sampling` applies to engines that sample."""
        if "generate" in self.capabilities.tasks:
            return make_call(prompt=prompt, **sampling).task
        return Run(Raw(json.dumps({"words": prompt.split()})), is_streamed=True)

    def call(self, request_id: str = "r", **wishes: Any) -> EngineCall:
        return EngineCall(request_id, self.task(**wishes))

    def request(self) -> Call:
        return make_request(task=self.task())

    async def ask(self, gateway: RunningGateway) -> httpx.Response:
        """Sends the task over HTTP."""
        task = self.task()
        if isinstance(task, Run):
            body = b'{"input":%s}' % bytes(task.input)
            headers = {"content-type": "application/json"}
            path = f"/v1/applications/{MODEL}/run"
            return await gateway.client.post(path, content=body, headers=headers)
        return await gateway.chat(ask())


#: Capabilities of the engines above, cached.
KNOWN: dict[str, Capabilities] = {}


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, LoadedEngine]]:
    engines: dict[str, LoadedEngine] = {}
    yield engines
    for loaded in engines.values():
        loaded.engine.close()


@pytest.fixture(params=SETTINGS)
def case(
    request: pytest.FixtureRequest,
    checkpoint: Path,
    application: Path,
    shared: dict[str, LoadedEngine],
    real: Callable[[str], tuple[str, Path]],
) -> Iterator[Case]:
    models = {"application": application} | dict.fromkeys(("torch", "vllm", "sglang"), checkpoint)
    case = Case(request.param, models, shared=shared)
    if case.name in STAND_INS:
        case.stand_in = request.getfixturevalue("stand_in")
        case.url = case.stand_in.url
    if case.name in REAL:
        case.url, models[case.kind] = real(case.name)
    yield case
    for loaded in case.loaded:
        loaded.engine.close()


@pytest.fixture
def generating(case: Case) -> Case:
    if "generate" not in case.capabilities.tasks:
        pytest.skip("it does not generate")
    return case


@asynccontextmanager
async def served(case: Case, ends: Ends, redis_server: str, load: Any = None):
    """Runs a gateway and a worker with the engine."""
    async with (
        run_worker(ends, load=load or case.load) as worker,
        run_gateway_on_socket(make_settings(redis_server, ends.prefix)) as gateway,
    ):
        yield gateway, worker


def test_every_engine_is_in_this_suite():
    assert set(engine_kinds()) == {*SETTINGS, *POOLING_SETTINGS} - {VLLM_CPU, SGLANG_CPU}


# Direct calls


def make_call(
    request_id: str = "r", *, prompt: str = QUESTION, num_images: int = 0, **sampling: Any
) -> EngineCall:
    parts = (*(ImagePart(place) for place in range(num_images)), TextPart(prompt))
    wishes = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling})
    return EngineCall(request_id, Generate((ChatMessage("user", parts),), wishes))


def add(engine: Engine, call: EngineCall, *seeds: int) -> None:
    """Prepares and adds a call with images."""
    images = []
    for seed in seeds:
        data = encoded(seed, size=(64 + seed, 48))
        ref = ImageRef(f"sha-{seed}", len(data), "image/png", 64 + seed, 48)
        content = engine.prepare_image(data, ref, decode_image)
        images.append(PreparedImage(f"hash-{seed}", content))
    engine.add(engine.prepare(call, images))


def skip_if_refused(engine: Engine, call: EngineCall) -> None:
    """Skips a test of a parameter that the engine refuses by name."""
    try:
        engine.prepare(call, [])
    except RequestError as error:
        if error.param is None:
            raise
        pytest.skip(f"it refuses {error.param}")


def run(engine: Engine, *request_ids: str) -> dict[str, Transcript]:
    """Steps until no request is left; returns the transcripts."""
    said = {request_id: Transcript() for request_id in request_ids}
    for _ in range(1000):
        if not engine.has_work():
            break
        for output in engine.step():
            said[output.request_id].append(output)
    assert not engine.has_work()
    for one in said.values():
        assert one.last is not None, "no last output"
    return said


def answer(engine: Engine, call: EngineCall, *seeds: int) -> Transcript:
    add(engine, call, *seeds)
    return run(engine, call.request_id)[call.request_id]


def test_capabilities_do_not_change(case: Case):
    loaded = case.load(max_num_seqs=3)
    before = loaded.engine.capabilities()
    assert 1 <= before.max_num_seqs <= 3
    assert before.max_num_seqs == 3 or "generate" not in before.tasks
    assert before.tasks == loaded.card.tasks
    answer(loaded.engine, case.call())
    assert loaded.engine.capabilities() == before


def test_an_answer_is_complete_and_its_usage_is_right(generating: Case):
    said = answer(generating.engine, make_call(max_tokens=5))
    assert said.text
    assert said.next_index == 5
    assert said.last is not None
    assert said.last.finish_reason is FinishReason.LENGTH
    assert said.last.usage is not None
    assert said.last.usage.num_output_tokens == 5
    assert said.last.usage.num_prompt_tokens > 0
    assert said.last.timings is not None
    assert said.last.timings.decode_s >= 0


def test_the_tokenized_prompt_gives_the_same_answer(generating: Case):
    engine = generating.with_tokenizer()
    call = make_call(max_tokens=6)
    made = engine.tokenize(Tokenize(call.task, with_strings=True), [])
    assert len(made.strings) == len(made.token_ids)
    said = answer(engine, call)
    assert said.last is not None
    assert said.last.usage is not None
    assert said.last.usage.num_prompt_tokens == len(made.token_ids)
    ids = Generate((), call.task.sampling, prompt=TokensPart(tuple(made.token_ids)))
    again = answer(engine, EngineCall("ids", ids))
    assert again.text == said.text


def test_detokenizing_inverts_tokenizing(generating: Case):
    engine = generating.with_tokenizer()
    of = Generate((), SamplingParams(), prompt=TextPart(QUESTION), add_special_tokens=False)
    made = engine.tokenize(Tokenize(of), [])
    back = engine.tokenize(Tokenize(token_ids=tuple(made.token_ids)), [])
    assert back.text == QUESTION
    said = answer(
        engine, EngineCall("r", structs.replace(of, sampling=SamplingParams(max_tokens=3)))
    )
    assert said.next_index == 3
    with pytest.raises(RequestError):
        engine.tokenize(Tokenize(token_ids=(10**6,)), [])
    with pytest.raises(RequestError):
        engine.prepare(EngineCall("x", structs.replace(of, prompt=TokensPart((10**6,)))), [])


def test_answers_in_a_batch_equal_answers_alone(case: Case):
    engine, fresh = case.engine, case.start()
    calls = [case.call(f"r{n}", prompt=f"{QUESTION} {n} times", max_tokens=4 + n) for n in range(4)]
    for call in calls:
        add(engine, call)
    together = run(engine, *(call.request_id for call in calls))
    for call in calls:
        alone = answer(fresh, call)
        beside = together[call.request_id]
        assert (beside.text, beside.token_ids) == (alone.text, alone.token_ids)


def test_one_seed_gives_one_answer(generating: Case):
    if generating.name == SGLANG_CPU:
        pytest.skip("SGLang's kernels alone take seeds")
    sampled = make_call(temperature=1.0, seed=7)
    assert answer(generating.engine, sampled).text == answer(generating.start(), sampled).text


def test_images_change_the_answer(generating: Case):
    if not generating.started.card.supports_images:
        pytest.skip("it takes no images")
    engine = generating.engine
    first = answer(engine, make_call("a", num_images=1), 0)
    assert answer(engine, make_call("b", num_images=1), 9).text != first.text
    assert answer(engine, make_call("c", num_images=1), 0).text == first.text


def test_abort_is_silent_and_idempotent(case: Case):
    engine = case.engine
    engine.abort("unknown")
    for name in "ab":
        add(engine, case.call(name))
    before = {output.request_id for output in engine.step()}
    engine.abort("a")
    engine.abort("a")
    after = {output.request_id for output in asking.run(engine)}
    assert "a" not in after
    assert "b" in before | after
    assert answer(engine, case.call("a")).next_index > 0


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_stop_string_ends_the_answer(generating: Case, keeps_stop: bool):
    engine = generating.with_tokenizer() if keeps_stop else generating.engine
    whole = answer(engine, make_call()).text
    stop = whole[len(whole) // 2 :][:3]
    call = make_call(stop=(stop,), keeps_stop=keeps_stop)
    skip_if_refused(engine, call)
    said = answer(engine, call)
    assert said.text == whole[: whole.index(stop) + len(stop) * keeps_stop]
    assert said.last is not None
    assert said.last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_stop_token_ends_the_answer(generating: Case, keeps_stop: bool):
    engine = generating.with_tokenizer()
    whole = answer(engine, make_call(ignore_eos=True))
    place = next(n for n in range(2, 6) if whole.token_ids[n] not in whole.token_ids[:n])
    stop = whole.token_ids[place]
    said = answer(engine, make_call(stop_token_ids=(stop,), ignore_eos=True, keeps_stop=keeps_stop))
    assert said.token_ids == whole.token_ids[: place + 1]
    assert said.last is not None
    assert said.last.finish_reason is FinishReason.STOP
    shown = answer(engine, make_call(ignore_eos=True, max_tokens=place + keeps_stop))
    assert said.text == shown.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_sampled(generating: Case, temperature: float):
    engine = generating.with_tokenizer()
    allowed = (50, 60, 70)
    call = make_call(allowed_token_ids=allowed, temperature=temperature)
    skip_if_refused(engine, call)
    said = answer(engine, call)
    assert len(said.token_ids) == 6
    assert {*allowed}.issuperset(said.token_ids)
    never = make_call("never", allowed_token_ids=(50,), stop_token_ids=(50,), min_tokens=2)
    with pytest.raises(RequestError, match="allowed_token_ids"):
        add(engine, never)


def test_logprobs_come_for_each_token(generating: Case):
    call = make_call(num_logprobs=2)
    skip_if_refused(generating.engine, call)
    said = answer(generating.engine, call)
    assert len(said.logprobs) == said.next_index


@pytest.mark.parametrize("num_asked", [0, 2])
def test_prompt_logprobs_equal_those_of_the_generated_tokens(generating: Case, num_asked: int):
    engine = generating.with_tokenizer()
    prompt = (40, 41, 42)
    wish = SamplingParams(temperature=0.0, max_tokens=6, num_logprobs=1, ignore_eos=True)
    said = answer(engine, EngineCall("said", Generate((), wish, prompt=TokensPart(prompt))))
    whole = TokensPart((*prompt, *said.token_ids[:5]))
    again = replace(wish, max_tokens=num_asked, num_prompt_logprobs=2)
    call = EngineCall("scored", Generate((), again, prompt=whole))
    skip_if_refused(engine, call)
    scored = answer(engine, call)
    assert [entry.token_id for entry in scored.prompt_logprobs] == [*whole.token_ids]
    assert [entry.position for entry in scored.prompt_logprobs] == [*range(len(whole.token_ids))]
    assert scored.prompt_logprobs[0].rank == 0
    later = scored.prompt_logprobs[len(prompt) :]
    assert [entry.rank for entry in later] == [1] * 5
    assert [entry.chosen.logprob for entry in later] == pytest.approx(said.logprobs[:5], abs=1e-4)
    assert all(
        (entry.token_id, entry.chosen) == entry.top[0] and len(entry.top) == 2 for entry in later
    )
    assert scored.next_index == num_asked
    assert scored.last is not None
    assert scored.last.finish_reason is FinishReason.LENGTH
    assert scored.last.usage is not None
    usage = scored.last.usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (len(whole.token_ids), num_asked)
    one = replace(call, request_id="one", task=replace(call.task, prompt=TokensPart(prompt[:1])))
    [first] = answer(engine, one).prompt_logprobs
    assert (first.token_id, first.rank) == (prompt[0], 0)
    if num_asked and generating.kind == "torch":  # answers of the mock depend on the whole prompt
        assert scored.token_ids[0] == said.token_ids[5]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(make_call("bad", prompt="word " * 50_000), id="too long"),
        pytest.param(make_call("bad", logit_bias={10**6: 1.0}), id="no such token"),
    ],
)
def test_a_bad_request_is_refused_without_effect_on_others(generating: Case, bad: EngineCall):
    engine = generating.engine
    if generating.kind == "openai" and not bad.task.sampling.logit_bias:
        pytest.skip("its server counts the tokens of a prompt")
    add(engine, make_call("good"))
    with pytest.raises(RequestError) as refused:
        add(engine, bad)
    assert str(refused.value)
    assert run(engine, "good")["good"].text == answer(engine, make_call()).text


def test_an_id_is_used_once_at_a_time(case: Case):
    engine = case.engine
    add(engine, case.call())
    with pytest.raises(RequestError):
        add(engine, case.call())
    assert run(engine, "r")["r"].next_index > 0
    assert answer(engine, case.call()).next_index > 0


def test_a_continued_answer_equals_the_uninterrupted_one(generating: Case):
    engine = generating.engine
    num_images = int(generating.started.card.supports_images)
    temperature = 0.0 if generating.name in RESTARTS_NOISE else 0.7
    call = make_call(temperature=temperature, seed=1, num_images=num_images, max_tokens=8)
    if not engine.can_continue(call.task):
        pytest.skip("it cannot continue an answer")
    images = range(num_images)
    whole = answer(engine, call, *images)
    other = generating.start()
    add(other, replace(call, output_token_ids=tuple(whole.token_ids[:3])), *images)
    rest = Transcript(3)
    for output in asking.run(other):
        rest.append(output)
    assert rest.token_ids == whole.token_ids[3:]


def test_every_step_counts(case: Case):
    """The worker's watchdog considers an engine hung if this count does not change."""
    engine = case.engine
    add(engine, case.call())
    assert engine.stats().num_running + engine.stats().num_waiting == 1
    counts = []
    while engine.has_work():
        engine.step()
        counts.append(engine.stats().num_steps)
    assert counts == sorted(set(counts))
    assert engine.stats().num_running + engine.stats().num_waiting == 0


def test_close_is_idempotent_with_unfinished_requests(case: Case):
    engine = case.start()
    add(engine, case.call())
    engine.step()
    engine.close()
    engine.close()


# Behind a worker, Redis and the gateway


def ask(question: str = QUESTION, **changes: Any) -> dict[str, Any]:
    return make_body(question, **{"temperature": 0, "max_tokens": 6, **changes})


async def test_an_answer_over_http_equals_the_engines(generating: Case, ends: Ends, redis_server):
    expected = answer(generating.engine, make_call())
    async with served(generating, ends, redis_server) as (gateway, _):
        response = await gateway.chat(ask())
        streamed = await gateway.stream(ask(stream_options={"include_usage": True}))
        refused = await gateway.chat(ask(logit_bias={"999": 1}, max_tokens=10**9))
    assert response.status_code == 200, response.text
    whole = response.json()
    assert whole["choices"][0]["message"]["content"] == expected.text
    assert whole["usage"]["completion_tokens"] == expected.next_index
    chunks = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    texts = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]
    assert "".join(texts) == expected.text
    assert chunks[-1]["usage"]["completion_tokens"] == expected.next_index
    assert refused.status_code == 400, refused.text


@pytest.mark.parametrize(("num_objects", "status"), [(1, 200), (6, 400)])
async def test_a_schema_of_the_most_properties_is_kept_or_refused(
    generating: Case, num_objects: int, status: int, ends: Ends, redis_server
):
    if not generating.capabilities.takes_grammars:
        pytest.skip("it takes no grammars")
    if generating.name in STAND_INS:
        pytest.skip("the stand-in applies no grammars")
    names = map(str, range(LimitSettings.max_schema_properties))
    schema = {"type": "object", "properties": {name: {} for name in names}}
    schema = {"anyOf": [schema] * num_objects}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with served(generating, ends, redis_server) as (gateway, _):
        for seed in range(3):
            response = await gateway.chat(ask(response_format=form, temperature=1, seed=seed))
            # llama-server's model has a small vocabulary, so its grammar can be below the limit
            assert response.status_code == status or generating.name == "llama-server", (
                response.text
            )
            if response.status_code == 200:
                assert response.json()["choices"][0]["message"]["content"].startswith("{")
            else:
                assert response.json()["error"]["code"] == "grammar_too_complex"


async def test_a_prompt_of_token_ids_is_scored_as_lm_eval_asks(
    generating: Case, ends: Ends, redis_server
):
    """The prompt can contain end-of-turn tokens, as chat prompts do."""
    loaded = generating.load()
    if "tokenize" not in loaded.card.tasks:
        pytest.skip("it has no tokenizer")
    if not isinstance(loaded.engine, BatchingEngine):
        pytest.skip("it refuses prompt_logprobs")
    end = min(loaded.engine.tokenizer.eos_token_ids)
    prompts = [[40, end, 41, 42], [50, 51, end, *range(40, 60)]]
    body = {"model": MODEL, "prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0}
    found = []
    async with served(generating, ends, redis_server, lambda: loaded) as (gateway, _):
        for max_tokens in (0, 1):
            told = await gateway.client.post(
                "/v1/completions", json={**body, "max_tokens": max_tokens}
            )
            assert told.status_code == 200, told.text
            found.append([choice["logprobs"] for choice in told.json()["choices"]])
    for num_more, each in enumerate(found):
        for prompt, logprobs in zip(prompts, each, strict=True):
            values = logprobs["token_logprobs"]
            assert len(values) == len(logprobs["tokens"]) == len(prompt) + num_more
            assert values[0] is None
            assert all(value <= 0 for value in values[1:])
    for less, more in zip(*found, strict=True):
        assert less["token_logprobs"][1:] == pytest.approx(more["token_logprobs"][1:-1], abs=1e-4)


async def test_a_disconnected_client_frees_the_engine(case: Case, ends: Ends, redis_server):
    async with served(case, ends, redis_server) as (gateway, running):
        running.engine.gate.clear()
        client = asyncio.create_task(case.ask(gateway))
        await until(lambda: running.engine.added)
        client.cancel()
        await asyncio.wait({client})
        running.engine.gate.set()
        await until(lambda: not running.engine.has_work())


async def test_a_deadline_ends_the_request_in_the_engine_too(
    case: Case, ends: Ends, answers: Answers
):
    async with run_worker(ends, load=case.load) as running:
        running.engine.gate.clear()
        request = await ends.enqueue(case.request(), timeout_s=0.5)
        failed = (await answers.end(request))[-1]
        assert isinstance(failed, Failed)
        assert failed.code is ErrorCode.DEADLINE_EXCEEDED
        running.engine.gate.set()
        await until(lambda: not running.engine.has_work())
        again = (await answers.end(await ends.enqueue(case.request())))[-1]
    assert isinstance(again, Finished)


async def test_after_the_loss_of_its_worker_an_answer_continues_or_fails(
    generating: Case, ends: Ends, answers: Answers
):
    """No part of the answer is returned twice."""
    async with run_worker(ends, "first", load=generating.load) as first:
        with generating.held(first.engine):
            request = await ends.enqueue(make_request(QUESTION))
            await answers.wait_for(
                request, lambda events: any(isinstance(e, Tokens) for e in events)
            )
            await first.vanish()
    async with run_worker(ends, "second", load=generating.load, lease_s=0.6):
        events = await answers.end(request)
    if generating.engine.can_continue(request.task):
        assert isinstance(events[-1], Finished)
    else:
        assert isinstance(events[-1], Failed)
        assert events[-1].code is ErrorCode.WORKER_LOST


async def test_an_answer_without_published_tokens_is_started_again(
    case: Case, ends: Ends, answers: Answers
):
    request = await ends.enqueue(case.request())
    async with run_worker(ends, "first", load=case.load) as first:
        first.engine.gate.clear()
        await until(lambda: first.engine.added)
        await first.vanish()
    async with run_worker(ends, "second", load=case.load, lease_s=0.6):
        events = await answers.end(request)
    assert isinstance(events[-1], Finished)
    assert text(events)
