"""A checkpoint's tokenizer.json or tekken.json: text to ids as in transformers, ids to bytes. Thread-safe."""

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engines.base import UnsupportedCheckpoint
from engines.packages.checkpoint_json import Fields, one_line, read_json, shown
from engines.text.detokenizer import ControlToken

MAX_VOCAB_SIZE = 2**21
#: Limit of the factor by which a normalizer or decoder lengthens a text.
MAX_GROWTH = 64
_NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_MAX_TOKEN_BYTES = 512


class HfTokenizer:
    """A checkpoint's tokenizer. Added tokens in `template` are control tokens too. Raises: UnsupportedCheckpoint."""

    def __init__(self, directory: Path, image_token_id: int | None, template: str = "") -> None:
        """`image_token_id` is None for a text-only model."""
        content = _read_tokenizer_json(directory)
        settings = read_json(directory / "tokenizer_config.json")
        #: Template variables such as `bos_token`.
        self.special_variables = {
            name: _to_added_token(settings, name, settings.get(name)).content
            for name in _NAMED
            if settings.get(name)
        }
        backend = _load_backend(content, settings)
        self._ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self._texts = {index: text for text, index in self._ids.items()}
        if image_token_id is not None and image_token_id not in self._texts:
            raise UnsupportedCheckpoint(
                f"the tokenizer has no token with the image's id {image_token_id}"
            )
        self.image_token = "" if image_token_id is None else self._texts[image_token_id]
        self.vocab_size = max(self._texts) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise UnsupportedCheckpoint(
                f"tokenizer.json: model.vocab has the id {self.vocab_size - 1}; ids must be below {MAX_VOCAB_SIZE}"
            )
        self.bos_token: str | None = self.special_variables.get("bos_token")
        self.eos_token_ids: frozenset[int] = frozenset(
            _eos_token_ids(directory, self._ids, self.special_variables)
        )
        self.control_tokens: Mapping[str, ControlToken] = self._find_control_tokens(
            backend, template
        )
        self.surround(backend)
        self._first, self._later = _piece_encoders(content, self.control_tokens.keys())
        decoder = ByteDecoder(content.get("decoder"))
        self.drops_leading_space = decoder.drops_leading_space
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._bytes = [
            b""
            if index in special or index not in self._texts
            else decoder.decode(self._texts[index])
            for index in range(self.vocab_size)
        ]

    def surround(self, backend: Backend) -> None:
        """Add the special tokens of a tokenizer's post-processor around texts."""
        backend.no_padding()
        backend.no_truncation()
        #: Token ids around every text, unless the chat template begins with BOS.
        self.prefix_ids, self.suffix_ids = _surrounding_ids(backend)

    def encode(self, text: str) -> list[int]:
        return self.encode_piece(text, is_first=True)

    def encode_piece(self, text: str, *, is_first: bool) -> list[int]:
        """Token ids of plain text at the start of a prompt or after a control token."""
        backend = self._first if is_first else self._later
        tokens = backend.encode(text, add_special_tokens=False).tokens
        if any(token in self.control_tokens for token in tokens):
            # The vocabulary may contain control tokens as plain tokens; single characters cannot form them.
            tokens = [t for c in text for t in backend.encode(c, add_special_tokens=False).tokens]
        return [self._ids[token] for token in tokens]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_string(self, token_id: int) -> str:
        return self._texts.get(token_id, "")

    def _find_control_tokens(self, backend: Backend, template: str) -> dict[str, ControlToken]:
        added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        names = {t for t, token in added.items() if token.special or (t.strip() and t in template)}
        names |= {self.image_token} | {
            self._texts[i] for i in self.eos_token_ids if i in self._texts
        }
        strips = {name: (token.lstrip, token.rstrip) for name, token in added.items()}
        return {
            name: ControlToken(self._ids[name], name, *strips.get(name, ()))
            for name in sorted(names)
            if len(name) > 1
        }


def _surrounding_ids(backend: Backend) -> tuple[list[int], list[int]]:
    """Ids that the post-processor adds before and after a text, such as BOS."""
    with readable():
        plain = backend.encode("a", add_special_tokens=False).ids
        full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise UnsupportedCheckpoint(
        "tokenizer.json: post_processor does not keep the text's own tokens"
    )


def _piece_encoders(content: dict[str, Any], control_tokens: Set[str]) -> tuple[Backend, Backend]:
    """Tokenizers without control tokens, for the first piece of a prompt and for later ones.

    They differ where Metaspace adds a space before the `first` piece only.
    """
    added = content.get("added_tokens") or []
    plain = content | {
        "added_tokens": [t for t in added if t["content"] not in control_tokens],
        "post_processor": None,
    }
    later = plain | {"pre_tokenizer": _never_first(plain.get("pre_tokenizer"))}
    first = Backend.from_str(json.dumps(plain))
    return first, first if later == plain else Backend.from_str(json.dumps(later))


def _never_first(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "Sequence":
        steps = [_never_first(step) for step in pre_tokenizer["pretokenizers"]]
        return pre_tokenizer | {"pretokenizers": steps}
    if pre_tokenizer.get("prepend_scheme") == "first":
        return pre_tokenizer | {"prepend_scheme": "never"}
    return pre_tokenizer


def _load_backend(content: dict[str, Any], settings: Fields) -> Backend:
    """The tokenizer with all special tokens, including those of tokenizer_config.json."""
    fields = Fields("tokenizer.json", content)
    if fields.section("model").get("type", "BPE") != "BPE":
        raise UnsupportedCheckpoint(
            "tokenizer.json is not a byte-pair encoding, which the LLaMA family uses"
        )
    for name in ("normalizer", "decoder"):
        if _growth(fields.section(name).values) > MAX_GROWTH:
            raise fields.refuse(name, f"makes texts more than {MAX_GROWTH} times as long")
    with readable():
        backend = Backend.from_str(json.dumps(content))
    declared = settings.section("added_tokens_decoder")
    if not all(index.isascii() and index.isdigit() for index in declared.values):
        raise settings.refuse("added_tokens_decoder", "has a key that is not a token id")
    for index in sorted(declared.values, key=int):
        backend.add_tokens([_to_added_token(declared, index, declared.get(index))])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [(name, settings.get(name)) for name in _NAMED if settings.get(name)]
    for name, entry in [*named, *_extras(settings)]:
        token = _to_added_token(settings, name, entry)
        if token.content not in known:  # adding it again would change its flags
            backend.add_special_tokens([token])
    return backend


@contextmanager
def readable(name: str = "tokenizer.json") -> Iterator[None]:
    """Raises: UnsupportedCheckpoint for any error of the library, including panics, which are no `Exception`."""
    try:
        yield
    except (UnsupportedCheckpoint, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UnsupportedCheckpoint(f"{name} cannot be read: {one_line(error)}") from None


def _growth(step: Mapping[str, Any]) -> float:
    """Largest factor by which a normalizer or decoder lengthens a text."""
    inner = step.get("normalizers") or step.get("decoders")
    if isinstance(inner, list):
        return math.prod(_growth(part) for part in inner if isinstance(part, dict))
    pattern, content = step.get("pattern"), step.get("content")
    if step.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    # A regular expression may match between any two characters.
    return max(1.0, len(content) / len(literal)) if literal else 1.0 + len(content)


def _extras(settings: Fields) -> Iterable[tuple[str, Any]]:
    for key in ("extra_special_tokens", "additional_special_tokens"):
        found = settings.get(key) or []
        if not isinstance(found, dict | list):
            raise settings.refuse(key, f"is {shown(found)}, neither a list nor an object")
        yield from (
            (key, entry) for entry in (found.values() if isinstance(found, dict) else found)
        )


def _to_added_token(fields: Fields, name: str, entry: Any) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True, normalized=False)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise fields.refuse(name, f"is {shown(entry)}, which is not a token")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{flag: bool(entry.get(flag, False)) for flag in flags})


def _eos_token_ids(directory: Path, ids: dict[str, int], variables: dict[str, str]) -> set[int]:
    """End-of-sequence ids: from generation_config.json, else config.json, else the tokenizer."""
    config = read_json(directory / "config.json")
    sources = (
        read_json(directory / "generation_config.json"),
        config,
        config.section("text_config"),
    )
    for source in sources:
        found = source.get("eos_token_id")
        if found is not None:
            found = found if isinstance(found, list) else [found]
            if not all(type(i) is int and 0 <= i < MAX_VOCAB_SIZE for i in found):
                raise source.refuse("eos_token_id", f"is {shown(found)}, not token ids")
            return set(found)
    name = variables.get("eos_token")
    return {ids[name]} if name in ids else set()


def _read_tokenizer_json(directory: Path) -> dict[str, Any]:
    content = read_json(directory / "tokenizer.json").values
    if not content and (tekken := read_json(directory / "tekken.json")).values:
        content = to_tokenizer_json(tekken)
    if not content:
        raise UnsupportedCheckpoint(
            "the checkpoint has no tokenizer.json; save its fast tokenizer there"
        )
    return {**content, "truncation": None, "padding": None}


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet. Source: `bytes_to_unicode` in github.com/openai/gpt-2, encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class ByteDecoder:
    """Decodes single tokens. `drops_leading_space`: the first space of a text is dropped.

    Raises: UnsupportedCheckpoint if the decoding of a token depends on its neighbours in another way.
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.drops_leading_space = False
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        for step in _flatten(decoder):
            self._read_step(step)

    def decode(self, token: str) -> bytes:
        if self._is_byte_level:
            known = all(character in _ALPHABET for character in token)
            return bytes(_ALPHABET[c] for c in token) if known else token.encode()
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    def _read_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                self._replacements.append((pattern, content))
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.drops_leading_space = True
            case {"type": "Metaspace", "replacement": str(replacement)}:
                self._replacements.append((replacement, " "))
                self.drops_leading_space = step.get("prepend_scheme", "always") != "never"
            case _:
                raise UnsupportedCheckpoint(
                    f"tokenizer.json's decoder {step.get('type')!r} is unknown"
                )


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise UnsupportedCheckpoint("tokenizer.json has no decoder")
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def to_tokenizer_json(tekken: Fields) -> dict[str, Any]:
    """Mistral's tekken.json as the content of a tokenizer.json. Raises: UnsupportedCheckpoint.

    Source: `Tekkenizer` of mistral-common.
    """
    letters = {byte: letter for letter, byte in _ALPHABET.items()}
    settings = tekken.section("config")
    special, vocab = tekken.get("special_tokens"), tekken.get("vocab")
    if not isinstance(special, list):
        raise tekken.refuse("special_tokens", "are missing; save the checkpoint's tokenizer.json")
    count = settings.whole("default_num_special_tokens", len(special), at_most=MAX_VOCAB_SIZE)
    size = settings.whole("default_vocab_size", at_least=count, at_most=MAX_VOCAB_SIZE)
    try:
        names = {each["rank"]: each["token_str"] for each in special}
        tokens = [base64.b64decode(each["token_bytes"]) for each in vocab]
    except (KeyError, TypeError, ValueError):
        raise tekken.refuse("vocab", "and special_tokens are not lists of tokens") from None
    if max(map(len, tokens), default=0) > _MAX_TOKEN_BYTES:
        raise tekken.refuse("vocab", f"has a token of more than {_MAX_TOKEN_BYTES} bytes")
    names = {place: names.get(place, f"<SPECIAL_{place}>") for place in range(count)}
    tokens = tokens if size is None else tokens[: size - count]
    ranks = {"".join(map(letters.__getitem__, x)): count + i for i, x in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spell = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split", "pattern": {"Regex": settings.get("pattern")}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True, **flags} for i, name in names.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, spell]},
        "post_processor": None,
        "decoder": spell,
        "model": {
            "type": "BPE",
            "vocab": {name: i for i, name in names.items()} | ranks,
            "merges": find_merges(ranks),
            "ignore_merges": True,
        },
    }


def find_merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that form another token, in the order of its rank."""
    found = []
    for whole, rank in ranks.items():
        cuts = ((whole[:i], whole[i:]) for i in range(1, len(whole)))
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        found += sorted((rank, ranks[a], ranks[b], a, b) for a, b in pairs)
    return [(a, b) for *_, a, b in sorted(found)]
