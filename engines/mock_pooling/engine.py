"""An embedding engine without a model: real batches, simulated computation.

Vectors and scores are SHAKE-128 hashes of the input, read as numbers, so they do not depend on the batch. Each word is
one token.
"""

import hashlib
import math
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from engines.base import (
    Decode,
    InvalidRequest,
    LoadedEngine,
    PreparedImage,
    Progress,
    PromptTooLong,
    check_token_ids,
)
from engines.pooling.batch import Row
from engines.pooling.engine import PoolingEngine, PoolingModel
from engines.pooling.settings import PoolingSettings
from shared.protocol import Embed, ImagePart, ImageRef, Rerank, TextPart, Truncate

MAX_MODEL_LEN = 512
VOCAB_SIZE = 65_536


class MockPooling(BaseModel):
    """Parameters of the simulation. Units: seconds, tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dimensions: int = Field(default=64, ge=1, le=4096)
    """Length of the embeddings."""
    step_s: float = Field(default=0.002, ge=0)
    """Simulated time of one step."""
    s_per_token: float = Field(default=0.00002, ge=0)
    """Simulated time per token of a step."""
    tokens_per_image: int = Field(default=64, ge=1)
    """Tokens of one image."""


class MockPoolingSettings(PoolingSettings):
    """Real batches with simulated computation."""

    mock: MockPooling = MockPooling()


class MockTexts:
    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """One id per word, without special tokens."""
        words = text.split()
        return [zlib.crc32(word.encode()) % VOCAB_SIZE for word in words], words

    def decode(self, token_ids: Sequence[int]) -> str:
        raise InvalidRequest("the mock engine cannot detokenize: it does not store words", "tokens")


class MockPoolingModel(PoolingModel):
    texts = MockTexts()
    tasks = ("embed", "rerank")
    decodes_images = True
    prompts: Mapping[str, str] = {"query": "query: ", "document": "passage: "}

    def __init__(self, settings: MockPoolingSettings) -> None:
        self._mock = settings.mock
        self.max_model_len = settings.max_model_len or MAX_MODEL_LEN
        self.dimensions = settings.mock.dimensions
        self.shorter_dimensions = tuple(
            size for size in (self.dimensions // 4, self.dimensions // 2) if size
        )

    def process_image(self, data: bytes, image: ImageRef, decode: Decode) -> bytes:
        """The hash of an image's pixels. Raises: InvalidImage."""
        return hashlib.sha256(decode(data, (image.width, image.height)).tobytes()).digest()

    def row(self, task: Embed, index: int, images: Sequence[PreparedImage]) -> Row:
        part = task.inputs[index]
        if isinstance(part, ImagePart):
            data, num_tokens = images[part.image].content, self._mock.tokens_per_image
            return Row(data, num_tokens, "image", num_tokens, identity=data)
        if isinstance(part, TextPart):
            prompt = self.prompts[task.prompt_name] if task.prompt_name else ""
            words: Sequence[Any] = (prompt + part.text).split()
        else:
            check_token_ids(part.token_ids, VOCAB_SIZE, task.param(index))
            words = part.token_ids
        words = self._fit(words, task.truncate, task.param(index), task.max_tokens)
        data = repr(words).encode()
        return Row(data, max(1, len(words)), identity=data)

    def pair(self, task: Rerank, index: int) -> Row:
        query = task.queries[index if len(task.queries) > 1 else 0].split()
        document = task.documents[index].split()[: task.max_document_tokens]
        words = self._fit([*query, "\n", *document], task.truncate, task.param(index))
        data = repr(words).encode()
        return Row(data, len(words), identity=data)

    def _fit(
        self, words: Sequence[Any], truncate: Truncate, param: str, max_tokens: int | None = None
    ) -> Sequence[Any]:
        most = min(self.max_model_len, max_tokens or self.max_model_len)
        if len(words) > most and truncate == "none":
            raise PromptTooLong(
                f"The input has {len(words)} tokens: send at most {most}, or truncate.", param
            )
        return words[-most:] if truncate == "start" else words[:most]

    def compute(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.result = numbers_of(row).tobytes()
        num_tokens = sum(row.num_tokens for row in rows)
        if step_s := self._mock.step_s + self._mock.s_per_token * num_tokens:
            time.sleep(step_s)


def numbers_of(row: Row) -> "array[float]":
    """The vector of a row; with 0 dimensions, a score between 0 and 1, or its logarithm if it is not normalized."""
    if row.dimensions == 0:
        stream = hashlib.shake_128(row.content).digest(4)
        score = int.from_bytes(stream, "little") / 2**32
        return array("f", [score if row.is_normalized else math.log(score + 1e-9)])
    stream = hashlib.shake_128(row.content).digest(2 * row.dimensions)
    values = array("h", stream)
    if not row.is_normalized:
        return array("f", values)
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return array("f", [value / length for value in values])


def load_mock_pooling_engine(
    settings: MockPoolingSettings, progress: Progress | None
) -> LoadedEngine:
    model = MockPoolingModel(settings)
    engine = PoolingEngine(model, settings)
    card = engine.card(
        settings.served_name or "mock-embeddings",
        max_model_len=model.max_model_len,
        vocab_size=VOCAB_SIZE,
        image_tokens=settings.mock.tokens_per_image,
        digest=hashlib.sha256(b"mock %d" % model.dimensions).hexdigest(),
    )
    return LoadedEngine(engine, card)
