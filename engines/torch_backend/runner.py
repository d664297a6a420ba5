"""The torch `ModelRunner`: encodes images, runs the decoder over the paged KV cache, and samples tokens.

Only the engine thread calls the runner. The scheduler chooses the tokens and blocks of each step.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from engines.base import AdapterLimits, EngineStartError
from engines.core.runner import (
    ComputedStep,
    DeviceOutOfMemory,
    RunningStep,
    StepResult,
    TokenChoice,
    sample_drafts,
)
from engines.core.sequence import Batch, ImageInput, ScheduledSequence, Sequence, shorten
from engines.torch_backend.graphs import DecodeGraphs, runs_graphs
from engines.torch_backend.kv_cache import KVCachePool, plan_kv_cache
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.lora import LoraAdapter, Loras
from engines.torch_backend.memory import free_bytes
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.multimodal.image_encoder import (
    EncoderCache,
    ImageEncoder,
    is_out_of_memory,
)
from engines.torch_backend.multimodal.processed import ProcessedImage, split
from engines.torch_backend.ops.registry import CUDA_GRAPH, Ops, Site, choose, cpu_ops
from engines.torch_backend.sampling import needs_host, sample, score_prompts
from engines.torch_backend.settings import TorchSettings
from engines.torch_backend.step import BidirectionalSpan, SequenceRows, StepInputs
from engines.torch_backend.threads import set_num_threads
from shared.protocol import SamplingParams

#: Copies of each recurrent state: before and after the sequence's last step, and after the step that is running.
_STATE_COPIES = 3


class TorchRunner:
    """One model on one device, with KV cache and image cache."""

    def __init__(
        self,
        model: FamilyModel,
        config: TorchSettings,
        device: torch.device,
        dtype: torch.dtype,
        free_before_load: int | None = None,
        ops: Ops | None = None,
    ) -> None:
        """Allocate caches for a loaded model.

        `ops`: the CPU operators that the model was loaded for; None on a GPU. `free_before_load`: free bytes before the
        weights were loaded; needed because the system counts pages of mapped weights as free.
        Raises: EngineStartError if memory is too small, or `max_model_len` exceeds the model's context.
        """
        if device.index:
            torch.cuda.set_device(device)  # the current device is per thread
        self._weight_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        set_num_threads(config.num_threads, device, self._weight_bytes)
        free = free_bytes(device)
        if free_before_load is not None:
            free = max(0, min(free, free_before_load - self._weight_bytes))
        states = _STATE_COPIES * config.max_num_seqs * model.state_bytes_per_sequence
        if states >= free > 0:
            raise EngineStartError(
                f"the recurrent states of {config.max_num_seqs} sequences need {states} bytes; {free} bytes are "
                "free. Lower max_num_seqs."
            )
        free = max(0, free - states)
        shapes = model.kv_shapes
        self.block_size = config.block_size
        self.num_blocks, self.max_model_len = plan_kv_cache(
            model.config.text, config, dtype, free, device.type, shapes
        )
        self.vocab_size = model.config.text.vocab_size
        self.model = model.eval()
        self.shares_prefixes = model.shares_prefixes
        self.binds_prompts = model.binds_prompts
        self.device = device
        self._dtype = dtype
        is_native = isinstance(model.language_model, Llama)
        self.runs_async = is_cuda = is_native and runs_graphs(device)
        num_blocks = self.num_blocks + is_cuda  # the last one is for the graphs' padding rows
        self.kv_pools = [
            KVCachePool(shape, num_blocks, self.block_size, dtype, device) for shape in shapes
        ]
        self.ops = ops or cpu_ops("off")
        self.graphs: DecodeGraphs | None = None
        self._rotary = model.rotary(self.max_model_len, dtype, device) if is_native else None
        if is_cuda and self._rotary is not None:
            self._choose_kernels(config, self._rotary)
        self._num_rows = self._rotary.num_rows if self._rotary else model.num_position_rows
        model.bind(self.ops, dtype)
        model.limit(self.max_model_len)
        self._loras: Loras | None = None  # created with the first adapter
        self._with_states: dict[str, Sequence] = {}
        #: token choices of the last step outside CUDA graphs
        self._sampled: list[TokenChoice | None] = []
        self._encoder_cache = EncoderCache(config.encoder_cache_bytes)
        self._images = ImageEncoder(
            self.model, self._encoder_cache, config.max_images_per_step, device, dtype
        )

    def _choose_kernels(self, config: TorchSettings, rotary: RotaryTable) -> None:
        """Choose a GPU's operators, and create CUDA graphs of decode steps if they help."""
        decoder, disabled = self.model.language_model, config.disabled_ops
        site = Site(self.device, self._dtype, decoder.text, self.block_size, joins=True)
        self.ops = choose(site, disabled)
        # The reference attention copies every context, so a graph would not help.
        has_kernel = self.ops.uses("paged_attention") or self.device.type == "cpu"
        if CUDA_GRAPH not in disabled and has_kernel:
            self.graphs = DecodeGraphs(
                decoder, self.ops, self.kv_pools[0], rotary, config.max_num_seqs
            )

    @torch.inference_mode()
    def launch(self, batch: Batch) -> RunningStep:
        """Start a step; outside CUDA graphs, it is complete on return. Raises: see `ModelRunner.launch`."""
        try:
            return self._launch(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceOutOfMemory(
                f"{self.device}: a step of {batch.num_tokens} tokens"
            ) from error

    def split(self, image: ImageInput) -> list[ImageInput]:
        return split(image) if isinstance(image.pixels, ProcessedImage) else [image]

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> LoraAdapter:
        if self._loras is None:
            dtype = torch.float32 if self.ops.is_native else self._dtype
            self._loras = Loras(self.model, dtype, self.device)
        return self._loras.load(directory, limits)

    def release(self, request_id: str) -> None:
        self._images.release(request_id)
        self._with_states.pop(request_id, None)
        self.model.release(request_id)

    def encoder_cache_counts(self) -> tuple[int, int, int]:
        cache = self._encoder_cache
        return cache.num_queries, cache.num_hits, cache.num_bytes

    def memory_bytes(self) -> dict[str, int]:
        return {
            "weights": self._weight_bytes,
            "kv_cache": sum(pool.data.nbytes for pool in self.kv_pools),
            "encoder_cache": self._encoder_cache.num_bytes,
            **({} if self.shares_prefixes else {"states": self.model.state_bytes}),
        }

    def close(self) -> None:
        if (images := self.__dict__.pop("_images", None)) is not None:
            images.close()
        self._encoder_cache.clear()
        for name in ("model", "graphs", "kv_pools", "_rotary"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """Compute one image, one prompt and one token, so that the first request is not slower.

        It uses KV blocks before the scheduler assigns any, and empties the image cache afterwards.
        """
        image = self.model.example_image()
        num_slots = 0 if image is None else image.num_tokens
        num_blocks = min(self.num_blocks, -(-(num_slots + 2) // self.block_size))
        num_tokens = min(num_slots + 1, num_blocks * self.block_size - 1, self.max_model_len - 1)
        images = (image,) if image is not None and num_tokens > num_slots else ()
        sequence = Sequence(
            "warm-up", [0] * num_tokens, num_tokens, SamplingParams(temperature=0), images
        )
        sequence.block_ids = list(range(num_blocks))
        # Graphs come first, because they are disabled if they cannot be captured.
        if self.graphs is not None and not self.graphs.warm_up():
            self.graphs = None
        for _ in range(2):
            item = ScheduledSequence(sequence, sequence.num_pending_tokens)
            self.launch(Batch([item])).wait()
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.token_ids.append(0)
        self.release(sequence.request_id)
        self._encoder_cache.clear()

    def _launch(self, batch: Batch) -> RunningStep:
        items = batch.items
        is_plain = self._loras is None or not _are_adapted(items)
        if self.graphs is not None and is_plain and self.graphs.can_run(items):
            return self.graphs.launch(items)
        # A GPU encodes images fast enough to need no limit.
        max_vision_s = batch.max_vision_s if self.device.type == "cpu" else None
        result = self._compute(items, max_vision_s)
        self._sampled = result.choices
        # On a GPU, the next step must wait: graphs read earlier tokens from a buffer that only graphs fill.
        # Penalties and masks also make it wait, because they need earlier tokens on the host.
        can_be_followed = not self.runs_async and not (
            result.num_computed or any(needs_host(item.sequence) for item in items)
        )
        return ComputedStep(result, can_be_followed)

    def _compute(self, items: list[ScheduledSequence], max_vision_s: float | None) -> StepResult:
        vision_s, num_computed, over_budget = self._images.encode_missing(items, max_vision_s)
        computed = shorten(items, num_computed) if num_computed else items
        # Sequences with one new token come first in a step; choices are returned in the batch's order.
        pairs = [(place, item) for place, item in enumerate(computed) if item is not None]
        pairs.sort(key=lambda pair: pair[1].num_new_tokens != 1)
        order, ordered = [place for place, _ in pairs], [item for _, item in pairs]
        if not ordered:
            return StepResult([None] * len(items), vision_s, num_computed, over_budget)
        sequences = _to_rows(ordered)
        sampling = [place for place, item in enumerate(ordered) if item.samples]
        rows: list[int] = []
        row_of: dict[int, int] = {}  # by sequence: the row of its next token, before its drafts
        for place in sampling:
            row_of[place] = len(rows)
            stop = sequences[place].stop
            rows += range(stop - 1 - len(ordered[place].draft), stop)
        num_sampled = len(rows)
        for item, own in zip(ordered, sequences, strict=True):
            rows += [own.start + index - 1 - item.start for index in item.scored if index]
        logits = self._logits(ordered, sequences, rows)
        logits, prompt_logits = logits[:num_sampled], logits[num_sampled:]
        prompt_scores = score_prompts(prompt_logits, ordered)
        sampled: list[TokenChoice | None] = [None] * len(ordered)

        def sample_at(places: list[int], num_more: int) -> list[TokenChoice]:
            wanted = [row_of[place] + num_more for place in places]
            scores = logits if len(wanted) == len(logits) else logits[wanted]
            positions = [ordered[place].output_position + num_more for place in places]
            return sample(scores, [ordered[place].sequence for place in places], positions)

        if sampling:
            for place, choice in zip(sampling, sample_at(sampling, 0), strict=True):
                sampled[place] = choice
            sample_drafts(ordered, sampled, sample_at)
        choices: list[TokenChoice | None] = [None] * len(items)
        for place, choice in enumerate(sampled):
            choices[order[place]] = choice
        self._images.unpin_done(ordered)
        return StepResult(choices, vision_s, num_computed, over_budget, prompt_scores)

    @torch.inference_mode()
    def logits(self, items: list[ScheduledSequence]) -> Tensor:
        """Logits after each item's last token; items of one new token must come first. Shapes: (items, vocabulary)."""
        self._images.encode_missing(items)
        sequences = _to_rows(items)
        return self._logits(items, sequences, [own.stop - 1 for own in sequences])

    def _logits(
        self, items: list[ScheduledSequence], sequences: list[SequenceRows], rows: list[int]
    ) -> Tensor:
        """Logits of these rows of the step. Shapes: returns (rows, vocabulary)."""
        if self.model.state_bytes_per_sequence:
            self._free_states(items)
        token_ids: list[int] = []
        positions: list[list[int]] = [[] for _ in range(self._num_rows)]
        for item in items:
            if item.in_flight_index is None:
                token_ids += item.token_ids
            else:
                choice = self._sampled[item.in_flight_index]
                assert choice is not None
                token_ids.append(choice.token_id)
            own = item.sequence.positions(item.start, item.end)
            for place, row in enumerate(positions):
                row += own[place % len(own)]
        inputs = StepInputs.create(
            sequences,
            self.block_size,
            self.device,
            token_ids,
            positions,
            sampled_rows=rows,
            images=self._images.place(items, sequences),
            bidirectional=_bidirectional_spans(items, sequences, self.binds_prompts),
            adapters=[each.sequence.adapter for each in items] if _are_adapted(items) else (),
        )
        applied = self._loras.applied(inputs) if self._loras and inputs.adapters else nullcontext()
        with applied:
            if self._rotary is None:
                return self.model.logits(inputs, self.kv_pools)
            decoder, [pool] = self.model.language_model, self.kv_pools
            embeddings = self.model.embed(inputs.token_ids, inputs.images)
            rotation = self._rotary.at_all(inputs.positions)
            attend = self.ops["paged_attention"](decoder.text.num_heads, pool, inputs, rotation)
            hidden = decoder(embeddings, attend, rows or [0])  # operators need at least one row
            return decoder.logits(hidden) if rows else hidden

    def _free_states(self, items: list[ScheduledSequence]) -> None:
        """Free the recurrent states of preempted sequences, which are recomputed."""
        for request_id, sequence in self._with_states.items():
            if not sequence.block_ids:
                self.model.release(request_id)
        self._with_states |= {item.sequence.request_id: item.sequence for item in items}


def _are_adapted(items: list[ScheduledSequence]) -> bool:
    return any(item.sequence.adapter is not None for item in items)


def _to_rows(items: list[ScheduledSequence]) -> list[SequenceRows]:
    found, start = [], 0
    for item in items:
        sequence = item.sequence
        found.append(
            SequenceRows(
                start, item.num_new_tokens, item.start, sequence.block_ids, sequence.request_id,
                sequence.num_prompt_tokens,
            )
        )  # fmt: skip
        start += item.num_new_tokens
    return found


def _bidirectional_spans(
    items: list[ScheduledSequence], sequences: list[SequenceRows], binds_prompts: bool
) -> list[BidirectionalSpan]:
    """Image slots that attend to each other, or complete prompts if the model's prompts are bidirectional."""
    spans = []
    for item, own in zip(items, sequences, strict=True):
        first_row = own.start - item.start  # row of the sequence's token 0
        if binds_prompts:
            if (asked := own.num_prompt_tokens) > item.start:
                spans.append(BidirectionalSpan(own.start, first_row + asked, asked - 1, True))
            continue
        for image in item.images if item.num_new_tokens > 1 else ():
            for start, stop in image.slot_runs if image.is_whole else ():
                begin, end = max(image.offset + start, item.start), image.offset + stop
                if begin < end <= item.end:
                    spans.append(BidirectionalSpan(first_row + begin, first_row + end, end - 1))
    return spans
