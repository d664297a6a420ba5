"""The step loop: scheduler, runner and answers. Called by the worker's engine thread."""

import logging
import time
from collections.abc import Mapping, Set
from collections.abc import Sequence as Items
from pathlib import Path

from engines.base import (
    Adapter,
    AdapterLimits,
    EngineCall,
    EngineOutput,
    EngineStats,
    InvalidRequest,
    PreparedImage,
)
from engines.core.answers import Answer, PromptingEngine
from engines.core.blocks import BlockManager
from engines.core.budget import PrefillLimit, StepLimits
from engines.core.constraint import Constraint
from engines.core.runner import ModelRunner, Processor, SequenceFailure, StepResult, TokenChoice
from engines.core.scheduler import Scheduler, StepPipeline
from engines.core.sequence import Batch, EngineRequest, Prompt, Sequence
from engines.core.settings import BatchingSettings
from engines.core.speculation import Speculator
from engines.text.grammar import GrammarCompiler
from shared.protocol import FinishReason, Generate, Task, Tools

logger = logging.getLogger(__name__)


class BatchingEngine(PromptingEngine[EngineRequest]):
    """Continuous batching over any `ModelRunner`."""

    def __init__(
        self,
        runner: ModelRunner,
        processor: Processor,
        config: BatchingSettings,
        startup_s: Mapping[str, float] | None = None,
        prefill_limit: PrefillLimit | None = None,
    ) -> None:
        """`prefill_limit` is measured; `config.max_mixed_prefill_tokens` overrides it."""
        self.runner = runner
        self.processor = processor
        self.tokenizer = tokenizer = processor.tokenizer
        self.vocab_size = runner.vocab_size
        self.blocks = BlockManager(
            runner.num_blocks,
            runner.block_size,
            enable_prefix_cache=config.enable_prefix_cache and runner.shares_prefixes,
        )
        if (given := config.max_mixed_prefill_tokens) is not None:
            spare_s = prefill_limit and prefill_limit.spare_s
            prefill_limit = PrefillLimit(given, spare_s=spare_s, is_fixed=True)
        most = config.max_num_batched_tokens, config.max_images_per_step
        limits = StepLimits(*most, prefill_limit)
        self.scheduler = Scheduler(
            self.blocks,
            limits,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=tokenizer.eos_token_ids,
            binds_prompts=runner.binds_prompts,
            speculator=_create_speculator(config, runner, tokenizer.eos_token_ids),
        )
        overlaps = config.overlap_steps
        if overlaps is None:  # n-gram drafts need the last token
            overlaps = runner.runs_async and config.speculation != "ngram"
        self.pipeline = StepPipeline(self.scheduler, limits, overlaps)
        self.max_model_len = min(
            runner.max_model_len,
            config.max_model_len or runner.max_model_len,
            # A single sequence must fit.
            runner.num_blocks * runner.block_size,
        )
        self.max_num_seqs = config.max_num_seqs
        self._adapters: dict[str, Adapter] = {}  # by digest
        self._grammars = GrammarCompiler.create(
            tokenizer, runner.vocab_size, processor.reasoning, processor.spelled
        )
        self._shows_tools = config.tools == "any" or processor.shows_tools
        self._answers: dict[str, Answer] = {}  # by request
        self._finished_early: list[EngineOutput] = []  # of requests that were complete when added
        self._startup_s = dict(startup_s or {})
        self._num_steps = 0

    def can_continue(self, task: Task) -> bool:
        """True: grammar state and sampling noise depend only on the tokens and their positions."""
        return True

    def prepare(self, call: EngineCall, images: Items[PreparedImage]) -> EngineRequest:
        """Build the prompt and compile the grammar. Raises: InvalidRequest, BadGrammar, GrammarTooComplex."""
        # the worker checks the task against the capabilities
        assert isinstance(call.task, Generate)
        tools = self._choose_tools(call.task.tools)
        prompt = self._build_prompt(call.task, images, tools)
        constraint = self._constrain(call.task, tools, prompt)
        return EngineRequest(**self._fields(call, prompt, tools), constraint=constraint)

    def _choose_tools(self, tools: Tools | None) -> Tools | None:
        """The functions that the prompt lists; None if calls are optional and the model was not trained for them."""
        if tools is None or tools.is_required:
            return tools
        return tools if self._shows_tools and self._grammars is not None else None

    def _constrain(self, task: Generate, tools: Tools | None, prompt: Prompt) -> Constraint | None:
        grammar = task.grammar
        if grammar is None and tools is None:
            return None
        if self._grammars is None:
            param = "tool_choice" if grammar is None else grammar.param
            raise InvalidRequest(f"the model's engine supports no grammars: omit {param}", param)
        is_thinking = prompt.is_thinking
        if tools is not None:
            form = self.processor.tool_format
            found = self._grammars.compile_tools(tools, form, grammar, is_thinking=is_thinking)
        else:
            assert grammar is not None
            found = self._grammars.compile(grammar, is_thinking=is_thinking)
        if task.sampling.allowed_token_ids:
            found.speller = None  # it may choose a token that is not allowed
        return found

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> Adapter:
        adapter = self.runner.load_adapter(directory, limits)
        return self._adapters.setdefault(adapter.digest, adapter)

    def unload_adapter(self, digest: str) -> None:
        """Unload an adapter; running sequences keep it until they end."""
        self._adapters.pop(digest, None)

    def add(self, request: EngineRequest) -> None:
        """Accept a request. Raises: PromptTooLong, InvalidRequest, and then nothing is queued."""
        self._check_request(request)
        if request.request_id in self._answers:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        max_output_tokens = self._max_output_tokens(request)
        num_positions = self.max_model_len - max_output_tokens
        if max(map(max, request.positions), default=0) >= num_positions:
            raise InvalidRequest(
                f"the prompt's images and videos need positions beyond {num_positions - 1}: send fewer"
            )
        sequence = Sequence.from_request(request, max_output_tokens, self.tokenizer.eos_token_ids)
        sequence.images = tuple(
            chunk for image in request.images for chunk in self.runner.split(image)
        )
        answer = Answer.begin(request, self.processor)
        reason = self.scheduler.find_finish_reason(sequence)
        if answer.is_stopped:
            reason = FinishReason.STOP
        if reason is not None:  # the earlier attempt has reported the whole text
            self._finished_early.append(answer.end(reason))
            return
        speculator = self.scheduler.speculator
        if speculator and (speculator.repeats or sequence.constraint is not None):
            speculator.begin(sequence)
        self._answers[request.request_id] = answer
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; no output follows. Idempotent."""
        if request_id in self._answers:
            self._forget(request_id)
        self._finished_early = [
            output for output in self._finished_early if output.request_id != request_id
        ]

    def step(self) -> list[EngineOutput]:
        """One forward pass of a batch. Returns the outputs of its requests.

        Raises: DeviceOutOfMemory if a step of one token is too large, and any error of the runner that is not a
        SequenceFailure. The engine cannot be used afterwards.
        """
        self._num_steps += 1
        early, self._finished_early = self._finished_early, []
        started_at = time.perf_counter()
        num_preemptions = self.scheduler.num_preemptions
        try:
            batch, result = self.pipeline.run(self.runner)
            if (speculator := self.scheduler.speculator) is not None and speculator.is_timed:
                speculator.note(batch, result, time.perf_counter() - started_at)
            outputs = self._update(batch, result, started_at)
            if self.scheduler.num_preemptions > num_preemptions:
                waiting = [self._answers[name] for name in self.scheduler.waiting]
                outputs += [answer.flush() for answer in waiting if answer.held]
        except SequenceFailure as failure:
            self.blocks.withdraw(self.scheduler.find(failure.request_id))
            answer = self._forget(failure.request_id)
            outputs = [answer.fail(str(failure), failure.code)]
        return early + outputs if early else outputs

    def has_work(self) -> bool:
        return self.scheduler.has_work() or self.pipeline.has_work or bool(self._finished_early)

    def stats(self) -> EngineStats:
        num_queries, num_hits, encoder_cache_bytes = self.runner.encoder_cache_counts()
        blocks, speculator = self.blocks, self.scheduler.speculator
        memory_bytes = self.runner.memory_bytes()
        if self._adapters:
            adapters = tuple(self._adapters.values())
            memory_bytes["adapters"] = sum(each.num_bytes for each in adapters)
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_waiting_batch=sum(s.is_preemptible for s in self.scheduler.waiting.values()),
            num_steps=self._num_steps,
            kv_usage_ratio=1 - blocks.num_free_blocks / blocks.num_blocks,
            num_prefix_query_tokens=blocks.num_query_tokens,
            num_prefix_hit_tokens=blocks.num_hit_tokens,
            num_encoder_queries=num_queries,
            num_encoder_hits=num_hits,
            encoder_cache_bytes=encoder_cache_bytes,
            num_preemptions=self.scheduler.num_preemptions,
            num_drafted_tokens=speculator.num_drafted if speculator else 0,
            num_accepted_tokens=speculator.num_accepted if speculator else 0,
            num_adapters=len(self._adapters),
            memory_bytes=memory_bytes,
            startup_s=self._startup_s,
        )

    def close(self) -> None:
        """Drop all requests and free the device. Idempotent."""
        try:
            self.pipeline.discard()
            for request_id in tuple(self._answers):
                self._forget(request_id)
            self._finished_early.clear()
            if self._grammars is not None:
                self._grammars.close()
        finally:  # free the device after a failure too
            self.runner.close()

    def _update(self, batch: Batch, result: StepResult, started_at: float) -> list[EngineOutput]:
        self.scheduler.update(batch, result)
        outputs: list[EngineOutput] = []
        for item, choice in zip(batch.items, result.choices, strict=True):
            sequence = item.sequence
            answer = self._answers[sequence.request_id]
            if answer.first_token_at is None:
                if answer.scheduled_at is None:
                    answer.scheduled_at = started_at
                    answer.num_cached_tokens = sequence.num_cached_tokens
                if result.vision_s and item.images:
                    answer.vision_s += result.vision_s
            if result.prompt_scores and (scores := result.prompt_scores.get(sequence.request_id)):
                outputs.append(answer.prompt_output(sequence.token_ids, scores))
            if choice is not None:
                output = self._token_output(answer, sequence, choice, started_at)
                if output is not None:
                    outputs.append(output)
            elif not answer.is_announced:
                outputs.append(answer.announce())
        return outputs

    def _token_output(
        self, answer: Answer, sequence: Sequence, choice: TokenChoice, now: float
    ) -> EngineOutput | None:
        if sequence.sampling.max_tokens == 0:  # the request asks for no output
            output = answer.end(FinishReason.LENGTH)
        else:
            tokens = (choice, *choice.following) if choice.following else (choice,)
            output = answer.add(tokens, sequence.finish_reason, now, len(self.scheduler.running))
        if output is not None and output.finish_reason is not None:
            if answer.is_stopped:
                self.scheduler.finish(sequence, FinishReason.STOP)
            del self._answers[sequence.request_id]
            self.runner.release(sequence.request_id)
        return output

    def _forget(self, request_id: str) -> Answer:
        self.scheduler.finish(self.scheduler.find(request_id), FinishReason.ABORT)
        self.runner.release(request_id)
        return self._answers.pop(request_id)


def _create_speculator(
    config: BatchingSettings, runner: ModelRunner, eos_token_ids: Set[int]
) -> Speculator | None:
    """The speculator, if it is enabled and the model's state can be rolled back."""
    if config.speculation == "off":
        return None
    if runner.binds_prompts or not runner.shares_prefixes:
        logger.info(
            "speculation is off: the model's state cannot be rolled back after a rejected draft"
        )
        return None
    return Speculator(eos_token_ids, repeats=config.speculation == "ngram")
