"""Splits the text of a file into chunks."""

from gateway.api.fields import invalid
from gateway.api.vector_stores.schemas import ChunkingStrategy
from gateway.calls.key_limits import CHARS_PER_TOKEN
from gateway.http.errors import InvalidRequest
from shared.protocol import ModelCard
from shared.search import (
    FileRecord,
)

#: OpenAI's defaults, in tokens.
CHUNK_TOKENS, OVERLAP_TOKENS = 800, 400
#: Maximum size of a chunk relative to the model's context, as token counts are estimates.
_CHUNK_SHARE = 0.75
#: Preferred ends of a chunk, the best first, in its last quarter.
_ENDS = ("\n\n", "\n", ". ", " ")


def chunk_sizes(strategy: ChunkingStrategy | None, card: ModelCard) -> tuple[int, int]:
    """Tokens of a chunk, and of its overlap with the previous one. Raises: InvalidRequest."""
    if strategy is None or strategy.type == "auto":
        size = min(CHUNK_TOKENS, max(1, int(card.max_model_len * _CHUNK_SHARE)))
        return size, min(OVERLAP_TOKENS, size // 2)
    if strategy.static is None:
        raise invalid("chunking_strategy.static", "send the sizes of static chunks")
    size, overlap = strategy.static.max_chunk_size_tokens, strategy.static.chunk_overlap_tokens
    if overlap > size // 2:
        param = "chunking_strategy.static.chunk_overlap_tokens"
        raise invalid(param, f"send at most half of the chunk's size: {size // 2}")
    return size, overlap


def decode_text(file: FileRecord) -> str:
    """Raises: InvalidRequest."""
    try:
        text = file.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidRequest(
            "The file is not UTF-8 text: convert it before you upload it.",
            param="file_id",
            code="unsupported_file",
        )
    if not text.strip():
        raise invalid("file_id", "the file is empty")
    return text


def cut_chunks(text: str, num_tokens: int, overlap: int) -> list[str]:
    """Chunks of at most `num_tokens` tokens, estimated as four characters each.

    A chunk ends after a paragraph, line, sentence or word, if one ends in its last quarter.
    """
    most, shared = num_tokens * CHARS_PER_TOKEN, overlap * CHARS_PER_TOKEN
    chunks, begin = [], 0
    while begin < len(text):
        end = min(begin + most, len(text))
        if end < len(text):
            end = _find_end(text, begin + most - most // 4, end)
        if chunk := text[begin:end].strip():
            chunks.append(chunk)
        begin = end if end == len(text) else max(begin + 1, end - shared)
    return chunks


def _find_end(text: str, first: int, last: int) -> int:
    for mark in _ENDS:
        found = text.rfind(mark, first, last)
        if found >= 0:
            return found + len(mark)
    return last
