"""Any server of OpenAI's embeddings API, or of Jina's rerank API: vLLM, SGLang, llama-server, Infinity or a hosted one.

The worker tokenizes, truncates and normalizes; the server receives token ids, or pairs of texts. Batches, priorities
and the result cache are those of the pooling engine.

Source: OpenAI API reference, "Create embeddings"; Jina API reference, "Reranker".
"""

import math
import time
from array import array
from base64 import b64decode
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from engines.base import (
    EngineLoadFailed,
    InvalidRequest,
    LoadedEngine,
    PreparedImage,
    Progress,
    UnsupportedCheckpoint,
)
from engines.packages.checkpoint_json import read_json
from engines.packages.resolve import default_name, resolve_model
from engines.pooling.batch import NOT_FINITE, Row
from engines.pooling.checkpoint import SentenceConfig, read_sentence_config, read_shorter_dimensions
from engines.pooling.engine import PoolingEngine, PoolingModel
from engines.pooling.texts import Texts, Words
from engines.text.tokenizer import MAX_VOCAB_SIZE, readable
from engines.upstream.client import UpstreamClient
from engines.upstream.load import DEFAULT_MAX_LEN, closed_on_failure, connect
from engines.upstream.settings import VectorSettings
from engines.upstream.streams import BUSY, OPERATOR, error_message
from shared.protocol import Embed, Rerank

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TIMEOUT_S = 120.0  #: time limit of one batch
RETRY_S = (0.2, 1.0, 5.0)  #: pauses after a failure of the server


class _Pair(NamedTuple):
    query: str
    document: str


class VectorModel(PoolingModel):
    def __init__(
        self, client: UpstreamClient, model: str, texts: Texts, config: SentenceConfig
    ) -> None:
        self._client, self._model = client, model
        self.texts = texts
        self.prompts = config.prompts
        self.tasks = ("rerank",)

    def probe(self) -> None:
        """Ask the server for a vector, or else for a score. Raises: EngineLoadFailed."""
        row = Row(Words((0,), (0,)), 1)
        self.compute([row])
        if not row.error:
            self.tasks, self.dimensions = ("embed",), len(row.result) // 4
            return
        pair = Row(_Pair("a", "b"), 2)
        self.compute([pair])
        if pair.error:
            raise EngineLoadFailed(
                f"{self._client.url} serves neither {EMBEDDINGS} ({row.error}) nor {RERANK} ({pair.error})"
            )

    def row(self, task: Embed, index: int, images: Sequence[PreparedImage]) -> Row:
        if not task.is_normalized:
            raise InvalidRequest("This model only returns vectors of length 1.", "normalized")
        return super().row(task, index, images)

    def pair(self, task: Rerank, index: int) -> Row:
        if task.is_raw:
            raise InvalidRequest("This model returns no raw scores: omit raw_scores.", "raw_scores")
        words = self.texts.pair(task, index)
        _, second = self.texts.encode_pair(task, index)
        query = task.queries[index if len(task.queries) > 1 else 0]
        end = second.offsets[-1][1] if second.offsets else 0
        pair = _Pair(query, task.documents[index][:end])
        return Row(pair, len(words.ids), identity=words.identity)

    def compute(self, rows: Sequence[Row]) -> None:
        """Set the result or error of each row. Raises: EngineLoadFailed if the server fails."""
        if isinstance(rows[0].content, Words):
            self._send(list(rows))
            return
        for _, same in groupby(rows, key=lambda row: row.content.query):
            self._send(list(same))

    def _send(self, rows: list[Row]) -> None:
        """Send rows in one request. If the server refuses several rows, each row is sent alone."""
        first = rows[0].content
        body: dict[str, Any] = {"model": self._model}
        if isinstance(first, Words):
            path = EMBEDDINGS
            body |= {"input": [list(row.content.ids) for row in rows], "encoding_format": "base64"}
        else:
            path = RERANK
            documents = [row.content.document for row in rows]
            body |= {"query": first.query, "documents": documents}
        response = self._post(path, body)
        if not response.is_error:
            try:
                _read(response.json(), rows)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise EngineLoadFailed(
                    f"{self._client.url}{path} returned an unexpected response: {error!r}"
                ) from None
        elif len(rows) > 1:
            for row in rows:
                self._send([row])
        else:
            message = error_message(response.content)
            rows[0].error = message or f"the server returns status {response.status_code}"

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The response, which may refuse the request. Raises: EngineLoadFailed."""
        reason = ""
        for pause_s in (*RETRY_S, 0.0):
            try:
                response = self._client.request("POST", path, timeout_s=TIMEOUT_S, json=body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                status = response.status_code
                is_probe = not self.dimensions and status in OPERATOR
                if status < 500 and status not in BUSY and (status not in OPERATOR or is_probe):
                    return response
                reason = f"status {status} {error_message(response.content)}"
            time.sleep(pause_s)
        raise EngineLoadFailed(f"{self._client.url}{path}: {reason}")

    def close(self) -> None:
        self._client.close()


def _read(answer: Any, rows: Sequence[Row]) -> None:
    """Set the results of rows. Raises: KeyError, IndexError, TypeError, ValueError."""
    if isinstance(rows[0].content, Words):
        entries = sorted(answer["data"], key=lambda entry: entry["index"])
        for row, entry in zip(rows, entries, strict=True):
            row.result = _unit(entry["embedding"], row.dimensions)
    else:
        entries = answer if isinstance(answer, list) else answer["results"]
        if len(entries) != len(rows):
            raise ValueError(f"{len(entries)} scores for {len(rows)} documents")
        for entry in entries:
            score = entry["relevance_score"] if "relevance_score" in entry else entry["score"]
            score = array("f", [math.nan if score is None else float(score)])
            rows[entry["index"]].result = score.tobytes()
    for row in rows:
        if not all(map(math.isfinite, array("f", row.result))):
            row.error = NOT_FINITE


def _unit(embedding: str | list[float], dimensions: int) -> bytes:
    """The first numbers of a vector, scaled to length 1."""
    vector = array("f")
    if isinstance(embedding, str):
        vector.frombytes(b64decode(embedding))
    else:
        vector.extend(embedding)
    vector = vector[: dimensions or None]
    length = math.sqrt(sum(x * x for x in vector)) or 1.0
    return array("f", [x / length for x in vector]).tobytes()


def load_vector_engine(settings: VectorSettings, progress: Progress | None) -> LoadedEngine:
    """Connect to a server. Raises: EngineStartError, EngineLoadFailed."""
    directory = resolve_model(settings.model, needs_weights=False)
    if not (directory / "tokenizer.json").is_file():
        raise UnsupportedCheckpoint(f"{directory} has no tokenizer.json")
    config, fields = read_sentence_config(directory), read_json(directory / "config.json")
    vocab_size = fields.get("vocab_size") or MAX_VOCAB_SIZE
    client, found = connect(settings, 1, TIMEOUT_S, progress)
    limits = (settings.max_model_len, config.max_tokens, found.get("max_model_len"))
    max_tokens = min((limit for limit in limits if limit), default=DEFAULT_MAX_LEN)
    with readable():
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = VectorModel(
        client, found["id"], Texts(tokenizer, max_tokens, vocab_size, config), config
    )
    with closed_on_failure(client, None, "a server of vectors or scores"):
        model.probe()
        model.shorter_dimensions = read_shorter_dimensions(directory, model.dimensions)
    engine = PoolingEngine(model, settings)
    name = settings.served_name or default_name(settings.model)
    card = engine.card(name, max_model_len=max_tokens, vocab_size=vocab_size)
    return LoadedEngine(engine, card)
