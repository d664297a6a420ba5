"""Protocol versions: gateways and workers of different versions refuse each other and report which one to update.

The messages of version 1 are stored here as bytes and must not change.
"""

import math
import struct

import msgspec
import pytest

from shared.protocol import (
    Call,
    Embed,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    ImagePart,
    OutputLogprob,
    Priority,
    Rerank,
    Scores,
    TextPart,
    TokenLogprob,
    Tokens,
    TokensPart,
    UnsupportedVersion,
    Usage,
    Vectors,
    decode_call,
    decode_card,
    decode_events,
    encode,
)
from shared.queue.registry import decode_record
from tests.factories_queue import make_image, make_request

CALL_1 = (
    b'{"request_id":"r-0","reply_to":"gateway-1","model":"tiny","messages":[{"role":"user","parts":'
    b'[{"type":"image","image":0},{"type":"text","text":"what?"}]}],"sampling":{"max_tokens":8,'
    b'"temperature":0.0,"seed":3},"images":[{"sha256":"abab","media_type":"image/png","width":8,'
    b'"height":6,"num_bytes":64}],"cache_salt":"t","stream":false,"is_detached":true}'
)
CARD_1 = b'{"name":"tiny","created_at":1,"max_model_len":512,"vocab_size":1000}'
RECORD_1 = (
    b'{"worker_id":"old","card":%s,"engine":"torch","num_running":2,"max_num_seqs":8}' % CARD_1
)


CALL_2 = encode(make_request())


@pytest.mark.parametrize(
    ("call", "versions", "which"),
    [
        (CALL_1, "protocol 1, the worker 2", "gateway"),
        (CALL_2.replace(b'"version":2', b'"version":3'), "protocol 3, the worker 2", "worker"),
    ],
)
def test_a_worker_refuses_other_versions_and_reports_which_end_to_update(call, versions, which):
    with pytest.raises(UnsupportedVersion, match=f"{versions}: update the {which}"):
        decode_call(call)


def test_the_name_and_version_of_a_newer_card_or_record_are_readable():
    card = decode_card(CARD_1)
    assert (card.name, card.version) == ("tiny", 1)
    record = decode_record(RECORD_1)
    assert (record.worker_id, record.card.name, record.card.version) == ("old", "tiny", 1)
    later = b'{"name":"tiny","version":3,"vocab_size":"unknown"}'
    assert decode_card(later).version == 3


def test_a_call_is_decoded_unchanged_and_refused_with_unknown_fields():
    call = make_request(images=(make_image("ab"),), tenant="t", is_resumable=True)
    data = encode(call)
    assert data.startswith(b'{"version":2,')
    assert decode_call(data) == call
    for change in ((b'"tenant"', b'"salt"'), (b'"generate"', b'"embed"')):
        with pytest.raises(msgspec.ValidationError):
            decode_call(data.replace(*change))


def test_tokens_with_ids_omit_the_number_without():
    """Gateways of the first release do not know `num_without_id`, so it is omitted if zero."""
    data = b'{"type":"tokens","request_id":"r","attempt":1,"index":0,"token_ids":[5],"text":"x"}'
    assert encode(Tokens("r", 1, 0, (5,), "x")) == data
    tokens = Tokens("r", 1, 0, (), "x", num_without_id=2)
    assert decode_events(b"[" + encode(tokens) + b"]") == (tokens,)
    assert tokens.num_tokens == 2


@pytest.mark.parametrize(
    ("newer", "read"),
    [
        (b'{"type":"thought","request_id":"1","attempt":1,"text":"hm"}', None),
        (
            b'{"type":"failed","request_id":"1","attempt":2,"code":"sold_out","message":"No.","mood":"sorry"}',
            Failed("1", 2, ErrorCode.ENGINE_FAILURE, "No."),
        ),
        (
            b'{"type":"finished","request_id":"1","attempt":2,"finish_reason":"filter",'
            b'"usage":{"num_prompt_tokens":3}}',
            Finished("1", 2, FinishReason.STOP, Usage(3)),
        ),
    ],
)
def test_unknown_events_and_values_of_a_newer_worker_are_ignored(newer, read):
    known = Failed("2", 1, ErrorCode.CANCELLED, "")
    events = decode_events(b"[" + newer + b"," + encode(known) + b"]")
    assert events == ((known,) if read is None else (read, known))


EMBED_2 = (
    b'{"version":2,"id":"r-1","reply_to":"g","model":"m","task":{"task":"embed","inputs":[{"type":"text",'
    b'"text":"hi"},{"type":"tokens","token_ids":[5,6]},{"type":"image","image":0}],"images":[{"sha256":"ab",'
    b'"num_bytes":3,"media_type":"image/png","width":1,"height":1}],"prompt_name":"query","dimensions":64,'
    b'"is_normalized":false,"truncate":"end","first":256},"wants_stream":false}'
)
RERANK_2 = (
    b'{"version":2,"id":"r-0","reply_to":"g","model":"m","task":{"task":"rerank","queries":["q"],'
    b'"documents":["a","b"],"max_document_tokens":9,"is_raw":true},"priority":"batch"}'
)
NUMBERS_2 = (
    b'[{"type":"vectors","request_id":"r","attempt":1,"dimensions":2,"data":"AACAPgAAAD8="},'
    b'{"type":"scores","request_id":"r","attempt":1,"is_stored":true}]'
)


def test_embedding_calls_and_vectors_keep_their_encoding():
    inputs = (TextPart("hi"), TokensPart((5, 6)), ImagePart(0))
    embed = Embed(inputs, (make_image("ab"),), "query", 64, False, "end", 256)
    rerank = Rerank(("q",), ("a", "b"), 9, is_raw=True)
    for call, data in (
        (Call("r-1", "g", "m", embed, wants_stream=False), EMBED_2),
        (Call("r-0", "g", "m", rerank, priority=Priority.BATCH), RERANK_2),
    ):
        assert encode(call) == data
        assert decode_call(data) == call
    events = (Vectors("r", 1, 2, struct.pack("<2f", 0.25, 0.5)), Scores("r", 1, is_stored=True))
    assert encode(events) == NUMBERS_2
    assert decode_events(NUMBERS_2) == events


@pytest.mark.parametrize(
    ("token_bytes", "spelled"),
    [
        (b" word", '" word"'),
        (b"\xff", '"\ufffdff"'),
        ("\ufffd".encode(), '"\ufffdefbfbd"'),
        ("\ufffdff".encode(), '"\ufffdefbfbd6666"'),
    ],
)
def test_token_logprobs_are_encoded_as_short_arrays(token_bytes, spelled):
    """Redis stores 21 of them per output token."""
    sent = OutputLogprob(TokenLogprob.of(token_bytes, -0.12345678901))
    data = encode(sent)
    assert data == f"[[{spelled},-0.1234568],[]]".encode()
    came = msgspec.json.decode(data, type=OutputLogprob).chosen
    assert (came.token_bytes, came.token) == (token_bytes, token_bytes.decode("utf-8", "replace"))
    assert TokenLogprob.of(token_bytes, -math.inf).logprob == -9999.0


def test_a_part_of_a_request_has_only_its_own_images():
    images = [make_image(name) for name in ("a", "b", "c")]
    task = Embed((ImagePart(2), TextPart("hi"), ImagePart(1), ImagePart(2)), first=5)
    part = task.with_images(images)
    assert part.images == (images[2], images[1])
    assert part.inputs == (ImagePart(0), TextPart("hi"), ImagePart(1), ImagePart(0))
