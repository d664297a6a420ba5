"""Vectors of images over HTTP: Jina's objects, among texts, decoded by the worker, in their own places."""

import base64
import io

import pytest
from PIL import Image

from tests.factories_images import encoded
from tests.factories_numbers import EMBEDDINGS, read_vectors, run_fleet, vector_of
from tests.factories_queue import MODEL


@pytest.fixture
async def gateway(ends, redis_server):
    async with run_fleet(ends, redis_server) as (gateway, _):
        yield gateway


async def embed(gateway, given):
    body = {"model": MODEL, "input": given}
    return await gateway.client.post(EMBEDDINGS, json=body)


def as_base64(seed: int) -> str:
    return base64.b64encode(encoded(seed)).decode()


async def test_images_stand_among_texts(gateway):
    image = as_base64(1)
    given = [
        "a text",
        {"image": image},
        {"text": "more"},
        {"image": f"data:image/png;base64,{image}"},
    ]
    response = await embed(gateway, given)
    assert response.status_code == 200, response.text
    first, image, more, again = read_vectors(response.json())
    assert (first, more) == (vector_of("a text"), vector_of("more"))
    assert image == again
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 128
    assert usage["prompt_tokens"] == 128 + 3


async def test_many_images_are_several_calls_and_keep_their_places(gateway):
    seeds = [index % 5 for index in range(60)]
    given = [item for seed in seeds for item in ({"image": as_base64(seed)}, "w " * 400)]
    vectors = read_vectors((await embed(gateway, given)).json())
    alone = {
        seed: read_vectors((await embed(gateway, [{"image": as_base64(seed)}])).json())[0]
        for seed in set(seeds)
    }
    assert vectors[::2] == [alone[seed] for seed in seeds]
    assert len({tuple(vector) for vector in alone.values()}) == 5


async def test_an_image_that_cannot_be_decoded_is_named_where_the_client_put_it(gateway):
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    broken = base64.b64encode(file.getvalue()[:-30]).decode()
    response = await embed(
        gateway, ["w " * 400] * 40 + [{"image": as_base64(1)}, {"image": broken}]
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_image", "input.[41].image")


def turn(*parts, role="user"):
    return [{"role": role, "content": list(parts)}]


def as_part(seed):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{as_base64(seed)}"}}


async def test_vllms_messages_are_one_text_or_one_image(gateway):
    async def ask(messages, **options):
        body = {"model": MODEL, "messages": messages, **options}
        response = await gateway.client.post(EMBEDDINGS, json=body)
        assert response.status_code == 200, response.text
        [vector] = read_vectors(response.json())
        return vector

    [plain] = read_vectors((await embed(gateway, [{"image": as_base64(1)}])).json())
    assert await ask(turn(as_part(1)), input=[]) == plain
    assert (
        await ask(turn({"type": "image_url", "image_url": as_part(1)["image_url"]["url"]})) == plain
    )
    assert await ask([{"role": "user", "content": "one"}]) == vector_of("one")
    texts = turn({"type": "text", "text": "one"}, {"type": "text", "text": "two"})
    assert await ask(texts, dimensions=16) == vector_of("one\ntwo", dimensions=16)
