"""Text encoders of transformers: BERT, RoBERTa, XLM-R, DistilBERT and ELECTRA with packed rows, others with padded rows
of similar length.

Shape letters: n rows of one length, L tokens of a row, E hidden size, V numbers of a result.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.pooling.batch import NOT_FINITE, Row
from engines.pooling.checkpoint import Pooling, SentenceConfig
from engines.pooling.engine import PoolingModel
from engines.pooling.layers import Keeps, PackedLayers, num_bytes, num_outputs
from engines.pooling.texts import Texts

#: Largest ratio of padding to real tokens in a batch of padded rows.
MAX_PADDING_RATIO = 0.15
#: Tokens of packed rows per forward pass on a CPU; more are not faster and use more memory.
MAX_CPU_TOKENS = 2048
#: Model types with `PackedLayers`, and the position of a row's first token; None: the padding token's id + 1.
PACKED_TYPES: dict[str, int | None] = {
    "bert": 0,
    "roberta": None,
    "xlm-roberta": None,
    "camembert": None,
    "distilbert": 0,
    "electra": 0,
}
_KEEPS: dict[Pooling, Keeps] = {"cls": "first", "last": "last"}
#: Model types that can score pairs.
SCORER_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")


class Encoder(PoolingModel):
    """A text encoder with pooling, or with a scoring head for pairs."""

    image_tokens = 0

    def __init__(
        self,
        model: Any,
        texts: Texts,
        config: SentenceConfig,
        is_scorer: bool,
        layers: PackedLayers | None = None,
        head: nn.Sequential | None = None,
    ) -> None:
        """`layers`: for models with packed rows; `head`: modules after the pooling."""
        self._model: Any = model
        self.texts = texts
        self._pooling: Pooling = config.pooling
        self._head = head or nn.Sequential()
        self._is_scorer = is_scorer
        self._layers = layers
        self._keeps: Keeps = "all"
        if layers is not None:  # other tokens are not needed
            self._keeps = "first" if is_scorer else _KEEPS.get(config.pooling, "all")
        self.tasks = ("rerank",) if is_scorer else ("embed",)
        size = num_outputs(config.modules, model.config.hidden_size)
        self.dimensions = 0 if is_scorer else size
        self.prompts = config.prompts
        self._base: Any = model.base_model if is_scorer else model

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row]) -> None:
        """Compute rows that are sorted by length."""
        if self._is_scorer:
            scores = self._score(torch.cat(list(self._hidden(rows))), rows)
            for row, score in zip(rows, scores.cpu(), strict=True):
                _give(row, score)
            return
        vectors = torch.cat([self._pool(hidden).float() for hidden in self._hidden(rows)])
        give_vectors(rows, self._head(vectors))

    def _hidden(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """Outputs of the last layer by groups of rows of one length; (n, 1, E) if one token of each row is kept."""
        if self._layers is None:
            for group in padded_groups(rows):
                yield from self._padded(group)
            return
        is_cpu = self._model.device.type == "cpu"
        for part in parts(rows, MAX_CPU_TOKENS) if is_cpu else (rows,):
            yield from self._packed(part, self._layers)

    def _packed(self, rows: Sequence[Row], layers: PackedLayers) -> Iterator[Tensor]:
        lengths, device = [row.num_tokens for row in rows], self._model.device
        first = first_position(self._model.config)
        arguments = {
            "input_ids": [x for row in rows for x in row.content.ids],
            "position_ids": [x for length in lengths for x in range(first, first + length)],
        }
        if getattr(self._model.config, "type_vocab_size", 0) > 1:
            arguments["token_type_ids"] = [x for row in rows for x in row.content.types]
        tensors = {name: torch.tensor([x], device=device) for name, x in arguments.items()}
        with layers.rows(lengths, self._keeps):
            hidden = self._base(**tensors).last_hidden_state[0]
        if self._keeps != "all":
            yield hidden[:, None]
            return
        begin = 0
        for length, group in groupby(lengths):
            num_rows = len(list(group))
            end = begin + num_rows * length
            yield hidden[begin:end].unflatten(0, (num_rows, length))
            begin = end

    def _padded(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        longest, device = rows[-1].num_tokens, self._model.device
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        ids += self._model.config.pad_token_id or 0
        for index, row in enumerate(rows):
            ids[index, : row.num_tokens] = torch.tensor(row.content.ids)
            mask[index, : row.num_tokens] = 1
        hidden = self._base(
            input_ids=ids.to(device), attention_mask=mask.to(device)
        ).last_hidden_state
        index = 0
        for length, group in groupby(rows, key=lambda row: row.num_tokens):
            count = len(list(group))
            yield hidden[index : index + count, :length]
            index += count

    def _pool(self, hidden: Tensor) -> Tensor:
        """Shapes: (n, L, E) to (n, E)."""
        match self._pooling:
            case "cls":
                return hidden[:, 0]
            case "last":
                return hidden[:, -1]
            case "max":
                return hidden.amax(1)
            case _:
                return hidden.float().mean(1)

    def _score(self, hidden: Tensor, rows: Sequence[Row]) -> Tensor:
        """Shapes: (n, L, E) to (n, 1)."""
        model: Any = self._model
        pooler = getattr(self._base, "pooler", None)
        logits = model.classifier(hidden if pooler is None else pooler(hidden)).float()
        wants_activation = torch.tensor([row.is_normalized for row in rows], device=logits.device)
        wants_activation = wants_activation[:, None]
        return torch.where(wants_activation, logits.sigmoid(), logits)

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": num_bytes(self._model) + num_bytes(self._head)}

    def close(self) -> None:
        self._model = self._base = nn.Module()
        self._head = nn.Sequential()


def first_position(config: Any) -> int:
    first = PACKED_TYPES[config.model_type]
    return config.pad_token_id + 1 if first is None else first


def parts(rows: Sequence[Row], num_tokens: int) -> Iterator[Sequence[Row]]:
    """Split rows into parts of at most `num_tokens` tokens, or of one longer row."""
    begin = size = 0
    for index, row in enumerate(rows):
        if index > begin and size + row.num_tokens > num_tokens:
            yield rows[begin:index]
            begin, size = index, 0
        size += row.num_tokens
    yield rows[begin:]


def padded_groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Groups of sorted rows of similar length."""
    group: list[Row] = []
    num_real = 0
    for row in rows:
        if group and row.num_tokens * (len(group) + 1) > (1 + MAX_PADDING_RATIO) * (
            num_real + row.num_tokens
        ):
            yield group
            group, num_real = [], 0
        group.append(row)
        num_real += row.num_tokens
    yield group


def give_vectors(rows: Sequence[Row], vectors: Tensor) -> None:
    """Set the rows' results, truncated and normalized as requested. Shapes: vectors (n, V) float32."""
    units = F.normalize(vectors, dim=1)
    for row, unit, raw in zip(rows, units.cpu(), vectors.cpu(), strict=True):
        vector = unit if row.is_normalized else raw
        if 0 < row.dimensions < len(vector):
            vector = vector[: row.dimensions]
            if row.is_normalized:
                vector = F.normalize(vector, dim=0)
        _give(row, vector)


def _give(row: Row, numbers: Tensor) -> None:
    if numbers.isfinite().all():
        row.result = numbers.numpy().tobytes()
    else:
        row.error = NOT_FINITE
