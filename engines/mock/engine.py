"""An engine without a model: real scheduling, blocks and text, simulated computation.

For tests and development. An answer is the SHAKE-128 stream of its prompt, read as words. A token depends on prompt,
images, seed and position only, so the answer is the same when batched, preempted or taken over.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Items
from hashlib import sha256, shake_128
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from engines.base import (
    Adapter,
    AdapterLimits,
    BadAdapter,
    Decode,
    EngineCall,
    LoadedEngine,
    OpenAudio,
    OpenVideo,
    PreparedImage,
    Progress,
    can_decode_video,
    sample_evenly,
)
from engines.core.engine import BatchingEngine
from engines.core.runner import (
    NO_LIMITS,
    PixelLimits,
    PromptScore,
    StepResult,
    TokenChoice,
    sample_drafts,
    token_mask,
)
from engines.core.sequence import (
    NO_OPTIONS,
    Batch,
    EngineRequest,
    ImageInput,
    Prompt,
    ScheduledSequence,
    Sequence,
)
from engines.core.settings import BatchingSettings
from engines.image_decoder import open_image
from engines.text.detokenizer import Tokenizer
from engines.text.reasoning import REASONING_FORMATS, Reasoning
from engines.text.tools import HERMES, describe_in_text
from shared.protocol import (
    ChatMessage,
    Ending,
    Generate,
    ImagePart,
    ImageRef,
    TemplateOption,
    Tools,
)

EOS_ID = 256
IMAGE_ID = 257
FIRST_WORD_ID = 258
SYLLABLES = [a + b for a, b in zip("bdfghjklmnprstvz", "aeiouaeiouaeioua", strict=True)]
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES]
VOCAB_SIZE = FIRST_WORD_ID + len(WORDS)

MAX_MODEL_LEN = 8192
KV_BYTES_PER_TOKEN = 1024
#: Limit of blocks computed from `kv_cache_bytes`, because the mock allocates a list of all blocks.
_MAX_KV_BLOCKS = 1 << 20
_SPECIAL = {EOS_ID: "<eos>", IMAGE_ID: "<image>"}
FEATURE_BYTES_PER_TOKEN = 1024


#: Reasoning markers, one token per byte.
THINK_START, THINK_END = b"<think>\n", b"\n</think>\n\n"
#: End of a prompt with reasoning disabled.
NO_THINKING = list(b"<think>\n\n</think>\n\n")


class MockSettings(BaseModel):
    """Parameters of the simulation. Units: seconds, tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    vision_s: float = Field(default=0.02, ge=0)
    """Simulated time to encode one image."""
    prefill_s_per_token: float = Field(default=0.00002, ge=0)
    """Simulated time per prompt token."""
    decode_s: float = Field(default=0.005, ge=0)
    """Simulated time of one step."""
    tokens_per_image: int = Field(default=64, ge=1)
    """Tokens of one image."""
    num_reasoning_tokens: int = Field(default=0, ge=0)
    """Reasoning words before an answer, in `<think>`."""
    num_output_tokens: int = Field(default=24, ge=1)
    """Tokens of an answer, unless the request ends or extends it."""


class MockEngineSettings(BatchingSettings):
    """Real scheduling, simulated computation."""

    mock: MockSettings = MockSettings()


class MockTokenizer:
    """A vocabulary of all bytes, and of the answers' words with a leading space."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS_ID})
    drops_leading_space = True

    def __init__(self) -> None:
        self._token_bytes = [bytes([value]) for value in range(256)]
        self._token_bytes += [b"", b""]
        self._token_bytes += [b" " + word.encode() for word in WORDS]

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes[token_id]

    def token_string(self, token_id: int) -> str:
        """Bytes as Latin-1, words, or special tokens in angle brackets."""
        if token_id in _SPECIAL:
            return _SPECIAL[token_id]
        return self._token_bytes[token_id].decode("latin-1")


class MockMedia(Struct, frozen=True):
    num_tokens: int
    num_frames: int = 0
    kind: str = "image"


class MockProcessor:
    """Builds prompts with a simple template."""

    is_quick = True
    decodes_images = False
    takes_video = can_decode_video()
    max_audio_s = 3600.0 if takes_video else 0.0
    tool_format = HERMES
    shows_tools = True
    spelled: Mapping[int, str] = {}

    def __init__(self, tokens_per_image: int, *, thinks: bool = False) -> None:
        self.reasoning = Reasoning(REASONING_FORMATS["think"]) if thinks else None
        self.template_options = frozenset({"enable_thinking"} if thinks else ())
        self.tokenizer: Tokenizer = MockTokenizer()
        self.tokens_per_image = self.image_tokens = tokens_per_image

    def process_image(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> tuple[int, int]:
        return image.size

    def process_video(self, video: OpenVideo) -> MockMedia:
        """One token per frame. Raises: InvalidImage."""
        num_frames = len(video.frames(sample_evenly(video)))
        return MockMedia(num_frames, num_frames)

    def process_audio(self, audio: OpenAudio) -> MockMedia:
        """Ten tokens per second. Raises: InvalidImage."""
        return MockMedia(-(-len(audio.samples(16_000)) // 6400), kind="audio")

    def build_prompt(
        self,
        messages: Items[ChatMessage],
        images: Items[tuple[str, Any]],
        options: Mapping[str, TemplateOption] = NO_OPTIONS,
        tools: Tools | None = None,
        ending: Ending = "answer",
    ) -> Prompt:
        """`role: text` lines with one run of slots per image."""
        if tools is not None or any(m.tool_calls or m.role == "tool" for m in messages):
            messages = describe_in_text(messages, tools)
        token_ids: list[int] = []
        inputs: list[ImageInput] = []
        for message in messages:
            token_ids += self.tokenizer.encode(f"{message.role}: ")
            for part in message.parts:
                if isinstance(part, ImagePart):
                    image_hash, content = images[part.image]
                    is_media = isinstance(content, MockMedia)
                    media = content if is_media else MockMedia(self.tokens_per_image)
                    where = (len(token_ids), media.num_tokens, image_hash, content)
                    item = ImageInput(*where, num_frames=media.num_frames, kind=media.kind)
                    inputs.append(item)
                    token_ids += [IMAGE_ID] * media.num_tokens
                else:
                    token_ids += self.tokenizer.encode(part.text)
            token_ids += self.tokenizer.encode("\n")
        if ending == "message":
            token_ids.pop()
        elif ending == "answer":
            token_ids += self.tokenizer.encode("assistant:")
        if self.reasoning is not None and options.get("enable_thinking") is False:
            token_ids += NO_THINKING
        return Prompt(token_ids, tuple(inputs))

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> Prompt:
        """The bytes of a text, without special tokens."""
        return Prompt(self.tokenizer.encode(text))


class MockStep(Struct):
    """A step on a simulated device, which runs one step after another."""

    result: StepResult
    ready_at: float  #: `time.perf_counter`; 0 without simulated times
    can_be_followed: bool = True

    def wait(self) -> StepResult:
        if self.ready_at and (rest_s := self.ready_at - time.perf_counter()) > 0:
            time.sleep(rest_s)
        return self.result


class MockRunner:
    """Simulates steps: samples words, counts images, sleeps."""

    vocab_size = VOCAB_SIZE
    max_model_len = MAX_MODEL_LEN
    runs_async = False
    shares_prefixes = True
    binds_prompts = False

    def __init__(self, settings: MockEngineSettings) -> None:
        self.block_size = settings.block_size
        self.num_blocks = _num_kv_blocks(settings)
        self._mock = settings.mock
        self._answers: dict[str, bytes] = {}  # stream of words so far, by request
        self._held_images: dict[str, set[str]] = {}  # images with features, by request
        self._encoder_cache: OrderedDict[str, int] = OrderedDict()  # bytes by image, oldest first
        self._encoder_cache_limit = settings.encoder_cache_bytes
        self._encoder_cache_bytes = 0
        self._num_encoder_queries = 0
        self._num_encoder_hits = 0
        self._free_at = 0.0  # end of the last simulated step, `time.perf_counter`

    def launch(self, batch: Batch) -> "MockStep":
        """Sample tokens; `wait` returns them after the simulated time."""
        items = batch.items
        choices = [
            self._choose(item.sequence, item.output_position) if item.samples else None
            for item in items
        ]
        if any(item.draft for item in items):
            sample_drafts(
                items,
                choices,
                lambda places, num_more: [
                    self._choose(items[p].sequence, items[p].output_position + num_more)
                    for p in places
                ],
            )
        num_prefill_tokens = 0
        num_images = 0
        scores: dict[str, list[PromptScore]] = {}
        for item in items:
            if item.num_new_tokens > 1 or item.start < item.sequence.num_prompt_tokens:
                num_prefill_tokens += item.num_new_tokens
                num_images += self._encode_images(item)
                if scored := item.scored:
                    scores[item.sequence.request_id] = _score(item.sequence, scored)
        mock = self._mock
        vision_s = mock.vision_s * num_images
        step_s = vision_s + mock.decode_s + mock.prefill_s_per_token * num_prefill_tokens
        if step_s > 0:
            self._free_at = max(self._free_at, time.perf_counter()) + step_s
        return MockStep(StepResult(choices, vision_s, prompt_scores=scores), self._free_at)

    def split(self, image: ImageInput) -> tuple[ImageInput]:
        return (image,)

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> Adapter:
        """An adapter with any `adapter_config.json`. Raises: BadAdapter if it is missing or too large."""
        file = directory / "adapter_config.json"
        if not file.is_file():
            raise BadAdapter(f"there is no {file.name}: give a directory that peft has saved")
        content = file.read_bytes()
        if len(content) > limits.max_bytes:
            raise BadAdapter(f"the adapter has {len(content)} bytes: at most {limits.max_bytes}")
        return Adapter(sha256(content).hexdigest()[:32])

    def release(self, request_id: str) -> None:
        self._answers.pop(request_id, None)
        self._held_images.pop(request_id, None)

    def encoder_cache_counts(self) -> tuple[int, int, int]:
        return self._num_encoder_queries, self._num_encoder_hits, self._encoder_cache_bytes

    def memory_bytes(self) -> dict[str, int]:
        return {
            "weights": 0,
            "kv_cache": self.num_blocks * self.block_size * KV_BYTES_PER_TOKEN,
            "encoder_cache": self._encoder_cache_bytes,
        }

    def close(self) -> None:
        """There is no device."""

    def _choose(self, sequence: Sequence, position: int) -> TokenChoice:
        sampling = sequence.sampling
        num_thought, marker_byte = self._thought(sequence, position)
        num_tokens = position + 1
        ends = (
            num_tokens >= num_thought + self._mock.num_output_tokens
            and num_tokens > sampling.min_tokens
            and not sampling.ignore_eos
        )
        value = self._answer(sequence, position)
        token_id = EOS_ID if ends else FIRST_WORD_ID + value
        if marker_byte is not None:
            token_id = marker_byte
        allowed = sampling.allowed_token_ids
        if allowed and token_id not in allowed:
            token_id = allowed[value % len(allowed)]
        if sequence.constraint is not None:
            token_id = _choose_allowed(token_mask(sequence), token_id, value)
        num_logprobs = sampling.num_logprobs
        if num_logprobs is None:
            return TokenChoice(token_id)
        rivals = [FIRST_WORD_ID + (value + rank) % len(WORDS) for rank in range(1, num_logprobs)]
        ranked = enumerate([token_id, *rivals][:num_logprobs])
        top = tuple((rival, _logprob(rank)) for rank, rival in ranked)
        return TokenChoice(token_id, _logprob(0), top)

    def _thought(self, sequence: Sequence, position: int) -> tuple[int, int | None]:
        """Number of reasoning tokens, and the marker byte at this position, if any."""
        num_words, num_prompt = self._mock.num_reasoning_tokens, sequence.num_prompt_tokens
        if not num_words:
            return 0, None
        if sequence.token_ids[num_prompt - len(NO_THINKING) : num_prompt] == NO_THINKING:
            return 0, None
        end_at = len(THINK_START) + num_words
        num_thought = end_at + len(THINK_END)
        if position < len(THINK_START):
            return num_thought, THINK_START[position]
        is_end = end_at <= position < num_thought
        return num_thought, THINK_END[position - end_at] if is_end else None

    def _answer(self, sequence: Sequence, position: int) -> int:
        """The number at one position of the answer."""
        stream = self._answers.get(sequence.request_id, b"")
        if len(stream) <= position:
            stream = answer_stream(sequence, num_bytes=max(2 * position, 64))
            self._answers[sequence.request_id] = stream
        return stream[position]

    def _encode_images(self, item: ScheduledSequence) -> int:
        """Simulate encoding the item's images; returns the number of cache misses."""
        num_encoded = 0
        for image in item.images:
            held = self._held_images.setdefault(item.sequence.request_id, set())
            if image.image_hash in held:
                continue
            held.add(image.image_hash)
            self._num_encoder_queries += 1
            if image.image_hash in self._encoder_cache:
                self._num_encoder_hits += 1
                self._encoder_cache.move_to_end(image.image_hash)
            else:
                num_encoded += 1
                num_bytes = image.num_tokens * FEATURE_BYTES_PER_TOKEN
                self._encoder_cache[image.image_hash] = num_bytes
                self._encoder_cache_bytes += num_bytes
                while self._encoder_cache_bytes > self._encoder_cache_limit:
                    self._encoder_cache_bytes -= self._encoder_cache.popitem(last=False)[1]
        return num_encoded


def _score(sequence: Sequence, positions: range) -> list[PromptScore]:
    """Logprobs of prompt tokens, each with rank 1; the first has none."""
    num_top = sequence.sampling.num_prompt_logprobs or 0
    scores = [PromptScore(0)] if positions[0] == 0 else []
    for position in positions[len(scores) :]:
        token_id = sequence.token_ids[position]
        rivals = [(token_id + rank) % VOCAB_SIZE for rank in range(num_top)]
        top = tuple((rival, _logprob(rank)) for rank, rival in enumerate(rivals))
        scores.append(PromptScore(position, _logprob(0), 1, top))
    return scores


def _logprob(rank: int) -> float:
    return -0.1 - 3.0 * rank


def answer_stream(sequence: Sequence, num_bytes: int) -> bytes:
    """The first bytes of an answer: a function of prompt, images, adapter and, unless greedy, seed."""
    seed = sequence.sampling.seed if sequence.sampling.temperature > 0 else None
    image_keys = [(image.offset, image.image_hash) for image in sequence.images]
    stream = shake_128(repr((seed, sequence.num_prompt_tokens, image_keys)).encode())
    stream.update(array("q", sequence.token_ids[: sequence.num_prompt_tokens]))
    if sequence.adapter is not None:
        stream.update(sequence.adapter.digest.encode())
    return stream.digest(num_bytes)


#: The first that the grammar allows brings a JSON value closer to its end; 0 is a number.
_CLOSING = tuple(b'}]",0')


def _choose_allowed(mask: bytes, token_id: int, value: int) -> int:
    """`token_id` if the grammar allows it, else another token: for EOS, if possible one that closes a JSON value."""
    allowed = [t for t in range(VOCAB_SIZE) if mask[t >> 3] >> (t & 7) & 1]
    if token_id in allowed:
        return token_id
    if token_id == EOS_ID:
        is_text = {ord("q"), ord("x")} <= set(allowed)
        for closing in (ord('"'),) if is_text else _CLOSING:
            if closing in allowed:
                return closing
    return allowed[value % len(allowed)]


class MockEngine(BatchingEngine):
    """Batching over a mock runner. It calls functions whenever allowed, and opens images without decoding them."""

    def prepare_image(self, data: bytes, image: ImageRef, decode: Decode) -> tuple[int, int]:
        with open_image(data, (image.width, image.height)) as opened:
            return opened.size

    def prepare(self, call: EngineCall, images: Items[PreparedImage]) -> EngineRequest:
        task = call.task
        if isinstance(task, Generate) and task.tools is not None and not task.tools.is_required:
            is_asked = task.messages[-1].role != "tool"
            tools = replace(task.tools, is_required=True) if is_asked else None
            call = replace(call, task=replace(task, tools=tools))
        return super().prepare(call, images)


def load_mock_engine(settings: MockEngineSettings, progress: Progress | None) -> LoadedEngine:
    mock = settings.mock
    processor = MockProcessor(mock.tokens_per_image, thinks=mock.num_reasoning_tokens > 0)
    engine = MockEngine(MockRunner(settings), processor, settings)
    return LoadedEngine(engine, engine.card(settings.served_name or "mock"))


def _num_kv_blocks(settings: MockEngineSettings) -> int:
    """The configured number, else enough blocks for all sequences at their maximum length."""
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks
    if settings.kv_cache_bytes is not None:
        num_blocks = settings.kv_cache_bytes // (KV_BYTES_PER_TOKEN * settings.block_size)
        return min(max(1, num_blocks), _MAX_KV_BLOCKS)
    max_model_len = settings.max_model_len or MAX_MODEL_LEN
    return settings.max_num_seqs * -(-max_model_len // settings.block_size)
