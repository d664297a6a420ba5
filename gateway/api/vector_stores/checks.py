"""Validates requests to vector stores, and splits files into chunks."""

import base64
import binascii
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.fields import check_chars, check_most, check_num, invalid
from gateway.api.vector_stores.schemas import (
    ChunkingStrategy,
    ItemInput,
    QueryInput,
    SearchRequest,
    Vector,
)
from gateway.calls.key_limits import CHARS_PER_TOKEN
from gateway.http.errors import InvalidRequest
from gateway.http.unknown_fields import unsupported
from gateway.media.loader import ImageSource
from shared.protocol import ModelCard
from shared.search import FileRecord, Filter
from shared.settings.limits import (
    MAX_FILTER_VALUES,
    MAX_IMAGE_URL_CHARS,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    LimitSettings,
)

#: OpenAI's defaults, in tokens.
CHUNK_TOKENS, OVERLAP_TOKENS = 800, 400
#: Maximum size of a chunk relative to the model's context, as token counts are estimates.
_CHUNK_SHARE = 0.75
#: Preferred ends of a chunk, the best first, in its last quarter.
_ENDS = ("\n\n", "\n", ". ", " ")


def check_text(param: str, value: str) -> str:
    """Raises: InvalidRequest for control characters, which are unsafe in logs and files."""
    if any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in value):
        raise invalid(param, "send it without control characters")
    return value


def find_prompt(param: str, asked: str | None, card: ModelCard, usual: Sequence[str]) -> str:
    """The requested prompt, or the model's default for this use. Raises: InvalidRequest."""
    if asked is None:
        return next((name for name in usual if name in card.prompts), "")
    if asked and asked not in card.prompts:
        offered = ", ".join(card.prompts) or "none"
        raise invalid(param, f"the prompts of this model are: {offered}")
    return asked


def pack_vector(vector: Vector, param: str) -> bytes:
    """Little-endian float32. Raises: InvalidRequest."""
    if isinstance(vector, str):
        try:
            data = base64.b64decode(vector, validate=True)
        except (binascii.Error, ValueError):
            data = b"?"
        if not data or len(data) % 4:
            raise invalid(param, "send numbers, or float32 in base64")
        return data
    if not vector:
        raise invalid(param, "send at least one number")
    return array("f", vector).tobytes()


def to_image(url: str, param: str) -> ImageSource:
    """An image by URL, or in bare base64."""
    if not url[:8].lower().startswith(("data:", "http://", "https://")):
        url = f"data:;base64,{url}"
    return ImageSource(url, param)


def name_of_image(url: str | None, param: str) -> str:
    """The stored name of an image: its URL, or `inline`. Raises: InvalidRequest."""
    if url is None:
        return ""
    if not url[:8].lower().startswith(("http://", "https://")):
        return "inline"
    if len(url) > MAX_IMAGE_URL_CHARS:
        raise invalid(param, f"send a URL of at most {MAX_IMAGE_URL_CHARS} characters")
    return url


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Refuse control characters. Raises: InvalidRequest."""
    for key, value in (metadata or {}).items():
        check_text("metadata", key + value)


def check_attributes(attributes: Mapping[str, Any] | None, param: str) -> None:
    """Refuse numbers that are not finite. Raises: InvalidRequest."""
    for key, value in (attributes or {}).items():
        check_text(param, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(param, "send finite numbers")


def check_items(items: Sequence[ItemInput], limits: LimitSettings) -> None:
    """Raises: InvalidRequest."""
    check_num("items", len(items), limits.max_inputs, "items")
    places: dict[str, int] = {}
    for index, item in enumerate(items):
        place = f"items.[{index}]"
        check_text(f"{place}.id", item.id)
        if places.setdefault(item.id, index) != index:
            raise invalid(f"{place}.id", f"items.[{places[item.id]}] has this id too")
        if item.embedding is None and (item.text is None) == (item.image is None):
            raise invalid(place, "send either text or image, or an embedding")
        if item.embedding is None and item.text == "":
            raise invalid(f"{place}.text", "send text that is not empty")
        if len(item.text or "") > limits.max_item_chars:
            raise InvalidRequest(
                f"The text is too long: send at most {limits.max_item_chars} characters, "
                "or a file, which is cut into chunks.",
                param=f"{place}.text",
                code="text_too_long",
            )
        check_attributes(item.attributes, f"{place}.attributes")
    check_chars(sum(len(item.text or "") for item in items), limits.max_input_chars, "items")


def check_search(request: SearchRequest, limits: LimitSettings) -> None:
    """Raises: InvalidRequest."""
    if request.rewrite_query:
        raise unsupported("rewrite_query")
    if request.filters is not None:
        check_filter(request.filters, limits)
    num = len(request.query) if isinstance(request.query, list) else 1
    check_num("queries", num, limits.max_search_queries, "query")


def check_filter(where: Filter, limits: LimitSettings) -> None:
    """Raises: InvalidRequest that names the part."""
    num_left = limits.max_filters

    def check(part: Filter, param: str, depth: int) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise invalid("filters", f"send at most {limits.max_filters} filters")
        if depth > limits.max_filter_depth:
            raise invalid("filters", f"nest at most {limits.max_filter_depth} filters")
        if part.type in ("and", "or"):
            if part.key or part.value is not None or not part.filters:
                raise invalid(param, f"send {part.type} only with filters, at least one")
            for index, inner in enumerate(part.filters):
                check(inner, f"{param}.filters.[{index}]", depth + 1)
        else:
            _check_comparison(part, param)

    check(where, "filters", 1)


def _check_comparison(part: Filter, param: str) -> None:
    if part.filters or not 0 < len(part.key) <= MAX_METADATA_KEY_CHARS:
        raise invalid(f"{param}.key", f"send a key of 1 to {MAX_METADATA_KEY_CHARS} characters")
    values = part.value if isinstance(part.value, list) else [part.value]
    if isinstance(part.value, list) != (part.type in ("in", "nin")) or part.value is None:
        raise invalid(f"{param}.value", "send a list with in and nin, one value with the others")
    check_most(f"{param}.value", len(values), MAX_FILTER_VALUES, "values")
    for value in values:
        if isinstance(value, str) and len(value) > MAX_METADATA_VALUE_CHARS:
            raise invalid(
                f"{param}.value", f"send texts of at most {MAX_METADATA_VALUE_CHARS} characters"
            )
        is_number = isinstance(value, float) and not isinstance(value, bool)
        if is_number and not math.isfinite(value):  # type: ignore[arg-type]
            raise invalid(f"{param}.value", "send a finite number")
        if part.type in ("gt", "gte", "lt", "lte") and not is_number:
            raise invalid(f"{param}.value", f"{part.type} compares numbers: send a number")


def read_query(
    query: str | Sequence[str] | QueryInput,
) -> tuple[list[str], list[str | ImageSource], list[bytes]]:
    """The query as texts, inputs to embed, and vectors. Raises: InvalidRequest."""
    if isinstance(query, QueryInput):
        if sum(x is not None for x in (query.text, query.image, query.embedding)) != 1:
            raise invalid("query", "send one of text, image and embedding")
        if query.image is not None:
            return [], [to_image(query.image, "query.image")], []
        if query.embedding is not None:
            return [], [], [pack_vector(query.embedding, "query.embedding")]
        query = query.text or ""
    texts = [query] if isinstance(query, str) else list(query)
    if not all(texts):
        raise invalid("query", "send text that is not empty")
    return texts, list(texts), []


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
