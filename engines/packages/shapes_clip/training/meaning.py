"""What a query means, as a vector made of its facts; used in training only.

Each fact becomes a vector by itself, so that "red" binds to "star" and not to what else is asked for; the
facts' vectors are summed.
"""

import torch
from torch import Tensor, nn

from engines.packages.shapes.training.world import BACKGROUNDS, COLORS, KINDS, PLACES, SIZES
from engines.packages.shapes_clip.training.queries import Fact, Query

_WORDS = (("kind", KINDS), ("color", COLORS), ("size", SIZES), ("place", PLACES))
_WIDTH = 384


class Meaning(nn.Module):
    """Queries to vectors."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        num_words = sum(1 + len(words) for _, words in _WORDS)
        self.words = nn.Embedding(num_words, _WIDTH)
        self.facts = nn.Sequential(
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, _WIDTH),
            nn.GELU(),
            nn.Linear(_WIDTH, dimensions),
        )
        self.backgrounds = nn.Embedding(1 + len(BACKGROUNDS), dimensions)
        self.complete = nn.Parameter(torch.zeros(dimensions))

    def forward(self, queries: list[Query]) -> Tensor:
        """Shapes: (Q, dimensions)."""
        facts = [(row, _ids(fact)) for row, query in enumerate(queries) for fact in query.facts]
        colors = [_index(query.background, BACKGROUNDS) for query in queries]
        made = self.backgrounds(torch.tensor(colors)) * (torch.tensor(colors) > 0)[:, None]
        is_complete = torch.tensor([query.is_complete for query in queries])
        made = made + is_complete[:, None] * self.complete
        if not facts:
            return made
        rows = torch.tensor([row for row, _ in facts])
        vectors = self.facts(self.words(torch.tensor([ids for _, ids in facts])).sum(1))
        return made.index_add(0, rows, vectors.to(made.dtype))


def _ids(fact: Fact) -> list[int]:
    ids, first = [], 0
    for name, words in _WORDS:
        ids.append(first + _index(getattr(fact, name), words))
        first += 1 + len(words)
    return ids


def _index(word: str | None, words: tuple[str, ...]) -> int:
    return 0 if word is None else 1 + words.index(word)
