"""Calls, events and cards as bytes: JSON by msgspec, readable in redis-cli."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from shared.protocol.call import Call, Envelope
from shared.protocol.card import ModelCard
from shared.protocol.content import Report
from shared.protocol.events import CallEvent, ErrorCode, Failed, Finished, FinishReason
from shared.protocol.version import PROTOCOL_VERSION, UnsupportedVersion, explain_versions


class _Versioned(msgspec.Struct):
    """What calls and cards of every version have; version 1 did not say its number."""

    version: int = 1


class _AnyCard(_Versioned, kw_only=True):
    name: str


class _AnyEvent(Report, frozen=True):
    """What events of every version have: enough to know whether a request has ended."""

    type: str
    request_id: str
    attempt: int


_version_decoder = msgspec.json.Decoder(_Versioned)
_call_decoder = msgspec.json.Decoder(Call)
_events_decoder = msgspec.json.Decoder(tuple[CallEvent, ...])
_event_decoder = msgspec.json.Decoder(CallEvent)
_any_events_decoder = msgspec.json.Decoder(tuple[msgspec.Raw, ...])
_any_event_decoder = msgspec.json.Decoder(_AnyEvent)
_any_card_decoder = msgspec.json.Decoder(_AnyCard)
_card_decoder = msgspec.json.Decoder(ModelCard)
_encoder = msgspec.json.Encoder()
#: How calls of this version begin. One that says no version is of the first, though its fields may fit.
_CALL_HEAD = b'{"version":%d,' % PROTOCOL_VERSION

encode = _encoder.encode


def encode_call(call: Call) -> bytes:
    """The bytes of a call, which begin with the version."""
    return _encoder.encode(call)


def seal(call: Call) -> Envelope:
    """The call as the queue carries it."""
    return Envelope(
        call.id, call.model, call.reply_to, call.tenant, call.priority, encode_call(call)
    )


def decode_call(data: bytes) -> Call:
    """Read a call. Raises: UnsupportedVersion; msgspec.MsgspecError on any departure from the schema."""
    if not data.startswith(_CALL_HEAD):
        version = _version_decoder.decode(data).version
        if version != PROTOCOL_VERSION:
            raise UnsupportedVersion(explain_versions(version, PROTOCOL_VERSION))
    return _call_decoder.decode(data)


def encode_events(events: Iterable[CallEvent]) -> bytes:
    """Events as logs hold them: JSON objects with commas between."""
    return b",".join([_encoder.encode(event) for event in events])


def decode_log(log: Sequence[bytes]) -> tuple[CallEvent, ...]:
    """Read what `encode_events` made, several times over. Raises: msgspec.MsgspecError."""
    return decode_events(b"[" + b",".join(log) + b"]") if log else ()


def decode_events(data: bytes) -> tuple[CallEvent, ...]:
    """Read one mailbox entry; what newer workers add is ignored. Raises: msgspec.MsgspecError."""
    try:
        return _events_decoder.decode(data)
    except msgspec.ValidationError:
        events = [_decode_newer(raw) for raw in _any_events_decoder.decode(data)]
        return tuple(event for event in events if event is not None)


def _decode_newer(raw: msgspec.Raw) -> CallEvent | None:
    """An event in today's words: None for a kind that did not exist, a plain end for an unknown reason."""
    try:
        return _event_decoder.decode(raw)
    except msgspec.ValidationError:
        event = _any_event_decoder.decode(raw)
        fields = msgspec.json.decode(raw)
        if event.type == "failed" and _is_unknown(fields.get("code"), ErrorCode):
            return msgspec.convert({**fields, "code": ErrorCode.ENGINE_FAILURE}, Failed)
        if event.type == "finished" and _is_unknown(fields.get("finish_reason"), FinishReason):
            return msgspec.convert({**fields, "finish_reason": FinishReason.STOP}, Finished)
        if event.type in (
            "started",
            "tokens",
            "vectors",
            "scores",
            "tokenized",
            "failed",
            "finished",
        ):
            raise
        return None


def _is_unknown(word: object, known: type[StrEnum]) -> bool:
    return isinstance(word, str) and word not in set(known)


def decode_card(data: bytes) -> ModelCard:
    """Read a model card; unknown fields are ignored. Raises: msgspec.MsgspecError."""
    card = _any_card_decoder.decode(data)
    if card.version != PROTOCOL_VERSION:
        return ModelCard(card.name, 0, 0, 0, version=card.version)
    return _card_decoder.decode(data)
