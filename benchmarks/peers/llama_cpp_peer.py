"""llama.cpp as a peer, through the bindings of `llama-cpp-python`, with its own batches, caches and kernels.

Runs in the peers' environment, with llama.cpp's defaults except the number of threads. Its multimodal library encodes
the image. A context is computed once and copied to every sequence of a batch; each sequence continues from its copy.
"""

import ctypes
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np
from llama_cpp import mtmd_cpp  # pyright: ignore[reportMissingImports]

from benchmarks.peers.gguf_files import write_decoder, write_tower
from benchmarks.peers.peer import NUM_TEXT_TOKENS
from engines.torch_backend.models.registry import find_family

_MAX_STEPS = 128
_TOWER_KIND = "F16"  # the type that llama.cpp's converter writes
_FILE_TYPES = {"Q8_0": 7, "Q4_0": 2}  # llama_ftype


class LlamaCpp:
    def __init__(
        self,
        checkpoint: Path,
        precision: str,
        num_threads: int,
        max_batch_size: int,
        num_context: int,
        folder: str,
    ) -> None:
        """Write missing files and load the model. Raises: RuntimeError."""
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        mtmd_cpp.mtmd_helper_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        config = find_family(checkpoint)[1]
        files = Path(folder) / "gguf" / checkpoint.name
        self._vocab_size: int = config.text.vocab_size
        self._num_context = num_context
        self._random = random.Random(0)
        model = llama_cpp.llama_model_load_from_file(
            bytes(decoder_file(checkpoint, files, precision, num_threads)),
            llama_cpp.llama_model_default_params(),
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_batch_size * (self._num_context + _MAX_STEPS)
        params.n_seq_max = max_batch_size
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not model or not self._context:
            raise RuntimeError("llama.cpp did not load the decoder")
        self._memory = llama_cpp.llama_get_memory(self._context)
        tower = _made(files / "tower.gguf", partial(write_tower, checkpoint, kind=_TOWER_KIND))
        self._tower = _Tower(tower, model, num_threads, config)

    def decode(self, batch_size: int, num_steps: int) -> float:
        """Decode one token of every sequence per call."""
        self._prepare_contexts(batch_size)
        tokens = [5] * batch_size
        elapsed = 0.0
        for step in range(num_steps + 1):
            started = time.perf_counter()
            batch = _Batch(
                [(token, self._num_context + step, seq) for seq, token in enumerate(tokens)], True
            )
            tokens = self._compute(batch)
            if step:  # the first step is a warm-up
                elapsed += time.perf_counter() - started
        return elapsed

    def prefill(self) -> float:
        """Compute a prompt in one call, which llama.cpp splits into micro-batches."""
        return self._prefill(self._text(self._num_context))

    def image(self) -> float:
        """Encode an image, without preprocessing."""
        return self._tower.encode(self._random)[0]

    def first_token(self) -> float:
        """Encode an image, then decode its features and the text."""
        elapsed, features = self._tower.encode(self._random)
        text = self._text(NUM_TEXT_TOKENS)
        llama_cpp.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        self._compute(_Batch.of_features(features))
        self._compute(_Batch([(t, len(features) + i, 0) for i, t in enumerate(text)], False))
        return elapsed + time.perf_counter() - started

    def _prefill(self, token_ids: list[int]) -> float:
        llama_cpp.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        self._compute(_Batch([(t, i, 0) for i, t in enumerate(token_ids)], False))
        return time.perf_counter() - started

    def _prepare_contexts(self, batch_size: int) -> None:
        """Copy the context of the last prompt to every sequence."""
        if llama_cpp.llama_memory_seq_pos_max(self._memory, 0) < self._num_context - 1:
            self._prefill(self._text(self._num_context))
        llama_cpp.llama_memory_seq_rm(self._memory, 0, self._num_context, -1)
        for seq in range(1, batch_size):
            llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, 0, seq, -1, -1)

    def _compute(self, batch: "_Batch") -> list[int]:
        """The likeliest next tokens. Raises: RuntimeError."""
        code = llama_cpp.llama_decode(self._context, batch.struct)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        size = self._vocab_size
        rows = (llama_cpp.llama_get_logits_ith(self._context, place) for place in batch.outputs)
        return [int(np.ctypeslib.as_array(row, (size,)).argmax()) for row in rows]

    def _text(self, count: int) -> list[int]:
        return [self._random.randrange(3, self._vocab_size - 64) for _ in range(count)]


class _Batch:
    """llama.cpp's batch of (token, position, sequence), with logits of all tokens or of the last."""

    def __init__(self, rows: list[tuple[int, int, int]], all_logits: bool) -> None:
        self.struct = llama_cpp.llama_batch_init(len(rows), 0, 1)
        for place, (token, position, sequence) in enumerate(rows):
            self.struct.token[place] = token
            self._place(place, position, sequence, all_logits or place == len(rows) - 1)
        self.struct.n_tokens = len(rows)
        self.outputs = range(len(rows)) if all_logits else [len(rows) - 1]

    @classmethod
    def of_features(cls, features: np.ndarray) -> "_Batch":
        """A batch of embeddings at the first positions of sequence 0. Shapes: (P, C)."""
        batch = cls.__new__(cls)
        batch.struct = llama_cpp.llama_batch_init(*features.shape, 1)
        ctypes.memmove(batch.struct.embd, features.ctypes.data, features.nbytes)
        for place in range(len(features)):
            batch._place(place, place, 0, False)
        batch.struct.n_tokens = len(features)
        batch.outputs = []
        return batch

    def _place(self, place: int, position: int, sequence: int, has_logits: bool) -> None:
        self.struct.pos[place] = position
        self.struct.n_seq_id[place] = 1
        self.struct.seq_id[place][0] = sequence
        self.struct.logits[place] = has_logits

    def __del__(self) -> None:
        llama_cpp.llama_batch_free(self.struct)


class _Tower:
    """llama.cpp's multimodal library, with the tower's file."""

    def __init__(self, file: Path, model, num_threads: int, config) -> None:
        params = mtmd_cpp.mtmd_context_params_default()
        params.use_gpu, params.print_timings = False, False
        params.n_threads = num_threads
        self._config = config
        self._handle = mtmd_cpp.mtmd_init_from_file(bytes(file), model, params)
        if not self._handle:
            raise RuntimeError("llama.cpp did not load the tower")

    def encode(self, source: random.Random) -> tuple[float, np.ndarray]:
        """Seconds and features of an image of noise. Shapes: features (P, C)."""
        size = self._config.vision.image_size
        pixels = (ctypes.c_uint8 * (3 * size * size)).from_buffer_copy(
            source.randbytes(3 * size * size)
        )
        bitmap = mtmd_cpp.mtmd_bitmap_init(size, size, pixels)
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        marker = mtmd_cpp.mtmd_default_marker()
        text = mtmd_cpp.mtmd_input_text(
            text=marker, text_len=len(marker), add_special=False, parse_special=False
        )
        bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if mtmd_cpp.mtmd_tokenize(self._handle, chunks, ctypes.byref(text), bitmaps, 1) != 0:
            raise RuntimeError("llama.cpp did not accept the image")
        chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, 0)
        started = time.perf_counter()
        if mtmd_cpp.mtmd_encode_chunk(self._handle, chunk) != 0:
            raise RuntimeError("llama.cpp did not encode the image")
        elapsed = time.perf_counter() - started
        shape = (self._config.tokens_per_image, self._config.text.hidden_size)
        features = np.ctypeslib.as_array(mtmd_cpp.mtmd_get_output_embd(self._handle), shape).copy()
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        mtmd_cpp.mtmd_bitmap_free(bitmap)
        return elapsed, features


def decoder_file(checkpoint: Path, files: Path, kind: str, num_threads: int) -> Path:
    """The decoder's file of a type, created if it is missing. Raises: RuntimeError, OSError."""

    def write(target: Path) -> None:
        if kind not in _FILE_TYPES:
            return write_decoder(checkpoint, target, kind)
        source = decoder_file(checkpoint, files, "BF16", num_threads)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = _FILE_TYPES[kind], num_threads
        if llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)) != 0:
            raise RuntimeError(f"llama.cpp did not quantize to {kind}")

    return _made(files / f"decoder-{kind}.gguf", write)


def _made(target: Path, write: Callable[[Path], None]) -> Path:
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".tmp")
    write(part)
    return part.rename(target)
