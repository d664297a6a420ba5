"""Every limit: a request at the limit passes; one above it is refused, and the error names the field and the limit."""

import re
import time
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.completions import ChatCompletionRequest, translate
from gateway.calls.lifecycle import check_images
from gateway.http.body import Admission, HeldBody, JsonBody, read_body
from gateway.http.errors import InvalidRequest
from gateway.http.exchange import Exchange, RequestContext
from gateway.media.loader import ImageHeader, ImageRefused, ImageSource, check_header
from shared.settings import limits as limits_module
from shared.settings.limits import LimitSettings
from tests.factories_gateway import CARD, make_body
from tests.factories_images import data_url, encoded, load
from tests.factories_settings import make_group

JSON = {b"content-type": b"application/json"}


def admit(body: dict[str, Any], limits: LimitSettings) -> None:
    """Runs all checks that need neither the fleet nor the bytes of images. Raises: InvalidRequest."""
    request = JsonBody(ChatCompletionRequest).decode(msgspec.json.encode(body))
    card = msgspec.structs.replace(CARD, supports_video=True, supports_audio=True)
    plan = translate(request, RequestContext("0" * 32, {}, 0.0), card, limits)
    check_images(plan.images, "generate", card, limits)


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def media(kind: str, n: int = 1, **options: Any) -> dict[str, Any]:
    return user(*[{"type": kind, kind: {"url": "data:", **options}}] * n)


#: Limits that an operator can change: the limit, a function from a quantity to a body, and the field in the error.
BODY_ROWS = [
    ("max_messages", lambda n: {"messages": [{"role": "user", "content": ""}] * n}, "messages"),
    ("max_text_chars", lambda n: {"messages": [{"role": "user", "content": "é" * n}]}, "messages"),
    ("max_text_chars", lambda n: user(*[{"type": "text", "text": "x"}] * n), "messages"),
    ("max_images", lambda n: media("image_url", n), "messages.[0].content.[{limit}].image_url"),
    ("max_videos", lambda n: media("video_url", n), "messages.[0].content.[{limit}].video_url"),
    ("max_audios", lambda n: media("audio_url", n), "messages.[0].content.[{limit}].audio_url"),
    ("max_video_frames", lambda n: media("video_url", num_frames=n), "messages.[0].content.[0].video_url.num_frames"),
    ("max_choices", lambda n: {"n": n}, "n"),
    ("max_output_tokens", lambda n: {"max_tokens": n}, "max_tokens"),
    ("max_output_tokens", lambda n: {"max_completion_tokens": n}, "max_completion_tokens"),
    ("max_stop_strings", lambda n: {"stop": ["x"] * n}, "stop"),
    ("max_stop_chars", lambda n: {"stop": "x" * n}, "stop"),
    ("max_stop_chars", lambda n: {"stop": ["x" * n]}, "stop"),
    ("max_logit_bias", lambda n: {"logit_bias": {str(i): 1 for i in range(n)}}, "logit_bias"),
    ("max_top_logprobs", lambda n: {"logprobs": True, "top_logprobs": n}, "top_logprobs"),
    ("max_stop_token_ids", lambda n: {"stop_token_ids": [1] * n}, "stop_token_ids"),
    ("max_allowed_token_ids", lambda n: {"allowed_token_ids": [1] * n}, "allowed_token_ids"),
]  # fmt: skip

#: Limits that are constants.
FIXED_ROWS = [
    ("MAX_MODEL_CHARS", lambda n: {"model": "x" * n}, "model"),
    ("MAX_USER_CHARS", lambda n: {"user": "x" * n}, "user"),
    ("MAX_NAME_CHARS", lambda n: {"messages": [{"role": "user", "content": "", "name": "x" * n}]}, "messages.[0].name"),
    ("MAX_METADATA_ENTRIES", lambda n: {"metadata": {str(i): "" for i in range(n)}}, "metadata"),
    ("MAX_METADATA_KEY_CHARS", lambda n: {"metadata": {"k" * n: ""}}, "metadata"),
    ("MAX_METADATA_VALUE_CHARS", lambda n: {"metadata": {"k": "v" * n}}, "metadata"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "make", "param"),
    BODY_ROWS + FIXED_ROWS,
    ids=[row[0] for row in BODY_ROWS + FIXED_ROWS],
)
@settings(max_examples=20)
@given(limit=st.integers(1, 40), excess=st.integers(1, 40))
def test_a_body_at_a_limit_passes_and_one_above_is_refused_by_field(
    name, make, param, limit, excess
):
    limit = getattr(limits_module, name, limit)
    limits = LimitSettings() if name.isupper() else make_group(LimitSettings, **{name: limit})
    admit(make_body(**make(limit)), limits)
    with pytest.raises(InvalidRequest) as raised:
        admit(make_body(**make(limit + excess)), limits)
    assert raised.value.status == 400
    assert raised.value.param == param.format(limit=limit)
    assert str(limit) in raised.value.message


async def read(pieces: list[bytes], limits: LimitSettings) -> bytes:
    """Reads a body that arrives in pieces."""
    messages = iter(pieces)

    async def receive() -> dict[str, Any]:
        piece = next(messages)
        return {"type": "http.request", "body": piece, "more_body": piece is not pieces[-1]}

    exchange = Exchange(RequestContext("id", JSON, 0.0), receive, AsyncMock())
    with HeldBody(Admission(1, 10**9)) as held:
        return await read_body(
            exchange,
            held,
            limits,
            timeout_s=5,
            max_commas=limits.max_commas,
            media_type=b"application/json",
        )


@settings(max_examples=50)
@given(st.integers(2, 500), st.integers(2, 500))
def test_images_at_the_limits_of_their_size_pass(width, height):
    header = ImageHeader("image/png", width, height)
    short, long = sorted((width, height))
    fits = make_group(
        LimitSettings, max_image_side=long, max_image_pixels=long * short,
        max_image_aspect=long / short * 1.000001,
    )  # fmt: skip
    check_header(header, fits)
    for name, value in (
        ("max_image_side", long - 1),
        ("max_image_pixels", long * short - 1),
        ("max_image_aspect", long / short * 0.999999),
    ):
        limits = fits.model_copy(update={name: value})
        text = f"{value:g}" if "aspect" in name else f"{value}"
        with pytest.raises(ImageRefused, match=re.escape(text)):
            check_header(header, limits)


async def test_images_at_the_limit_of_bytes_pass():
    data = encoded()
    source = ImageSource(data_url(), "p")
    for room in (0, 1):
        assert (await load(source, max_image_bytes=len(data) + room))[0].data == data
    with pytest.raises(InvalidRequest, match=f"at most {len(data) - 1} bytes") as raised:
        await load(source, max_image_bytes=len(data) - 1)
    assert raised.value.param == "p"


class Nested(msgspec.Struct):
    inner: list["Nested"] = []


def test_a_recursive_type_is_refused_at_its_depth_in_linear_time():
    levels = 50_000
    body = b'{"inner":[' * levels + b"]}" * levels
    began_s = time.process_time()
    with pytest.raises(InvalidRequest) as refused:
        JsonBody(Nested).decode(body)
    assert refused.value.code == "invalid_json"
    assert time.process_time() - began_s < 5  # a quadratic search takes minutes


@settings(max_examples=50)
@given(pieces=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6))
async def test_a_body_is_refused_at_the_piece_that_exceeds_the_limit(pieces):
    pieces = [bytes(bytearray(piece)) for piece in pieces]  # no interned objects
    body = b"".join(pieces)
    limit = len(body) - 1
    assert await read(pieces, LimitSettings.model_construct(max_body_bytes=len(body))) == body
    with pytest.raises(InvalidRequest, match=f"at most {limit} bytes") as raised:
        await read(pieces, LimitSettings.model_construct(max_body_bytes=limit))
    assert raised.value.status == 413
