"""A vLLM logits processor that continues an answer whose first tokens are at the end of the prompt.

It runs in vLLM's process, with either model runner, and imports nothing of this package. `extra_args["vlm_fleet"]`
holds an answer's grammar, its penalties, and the number of its tokens in the prompt. All state is a function of the
answer's tokens, so it survives preemption too.

Source: vllm/v1/sample/logits_processor/interface.py, vllm/v1/worker/gpu/sample/logits_processor/interface.py.
"""

# pyright: reportMissingImports=false
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as ProcessorV2

KEY = "vlm_fleet"
VERSION = "vlm_fleet logits processor 1"


class _Answer:
    def __init__(self, wanted: dict[str, Any], tokenizer: Any) -> None:
        self.num_earlier: int = wanted.get("num_earlier", 0)
        self._presence: float = wanted.get("presence_penalty", 0.0)
        self._frequency: float = wanted.get("frequency_penalty", 0.0)
        source = wanted.get("grammar")
        self._matcher = None if source is None else llguidance.LLMatcher(tokenizer, source)
        self._num_consumed = 0

    def edit(self, logits: torch.Tensor, token_ids: list[int]) -> None:
        """Change the logits of the next token, given the answer's tokens so far."""
        if token_ids and (self._presence or self._frequency):
            tokens, counts = np.unique(token_ids, return_counts=True)
            penalty = torch.from_numpy(self._presence + self._frequency * counts)
            logits[torch.from_numpy(tokens).to(logits.device)] -= penalty.to(logits)
        if self._matcher is not None:
            if len(token_ids) < self._num_consumed:
                self._matcher.reset()
                self._num_consumed = 0
            self._matcher.consume_tokens(token_ids[self._num_consumed :])
            self._num_consumed = len(token_ids)
            # After an error only the end token is allowed, as with vLLM's own backends.
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little")[: len(logits)].astype(bool)
            logits[: len(allowed)].masked_fill_(
                torch.from_numpy(~allowed).to(logits.device), -float("inf")
            )


class ContinueAnswer(LogitsProcessor, ProcessorV2):
    """Implements the interfaces of both model runners."""

    def __init__(self, vllm_config: Any, state: Any, is_pin_memory: bool = False) -> None:
        """`state`: the device, or with runner V2 the token ids of all requests."""
        if vllm_config.speculative_config is not None:
            raise ValueError(f"{KEY}: speculative decoding is not supported")
        model = vllm_config.model_config
        self._tokenizer = llguidance.hf.from_tokenizer(
            cached_tokenizer_from_config(model), model.get_vocab_size()
        )
        self._state = state
        self._answers: dict[int, Any] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse other versions of the parameters; workers detect the processor by this error."""
        wanted = (sampling_params.extra_args or {}).get(KEY)
        if wanted is not None and wanted.get("version") != VERSION:
            raise ValueError(VERSION)

    def is_argmax_invariant(self) -> bool:
        return False

    def _begin(self, sampling_params: Any) -> _Answer | None:
        wanted = (sampling_params.extra_args or {}).get(KEY)
        return None if wanted is None else _Answer(wanted, self._tokenizer)

    # Runner V1: rows are requests

    def update_state(self, batch_update: Any) -> None:
        """Track changes of the batch. The lists of output tokens are shared with the runner."""

        def begin(params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> Any:
            answer = self._begin(params)
            if answer is None:
                return None
            start = len(prompt_ids or ()) - answer.num_earlier
            return answer, (prompt_ids or [])[start:], output_ids

        process_dict_updates(self._answers, batch_update, begin)

    # Runner V2: requests have slots

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Whether the request has parameters of this processor."""
        self._answers[req_idx] = self._begin(sampling_params)
        return self._answers[req_idx] is not None

    def _apply_v2(self, logits: torch.Tensor, ctx: Any) -> None:
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            answer = self._answers.get(slot)
            num_prompt = int(self._state.prompt_len.np[slot])
            num_tokens = int(ctx.seq_lens_upper_bound_np[row])
            if answer is not None and num_tokens >= num_prompt:  # the prompt is complete
                start = num_prompt - answer.num_earlier
                token_ids = self._state.all_token_ids.gpu[slot, start:num_tokens]
                answer.edit(logits[row], token_ids.tolist())

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        if ctx is None:
            for row, (answer, earlier, output_ids) in self._answers.items():
                answer.edit(logits[row], [*earlier, *(i for i in output_ids if i >= 0)])
        else:
            self._apply_v2(logits, ctx)
        return logits
