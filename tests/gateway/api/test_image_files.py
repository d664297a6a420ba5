"""Uploaded images: requests of every API can name the file ID instead of a URL."""

import hashlib
import itertools
from base64 import b64decode
from typing import Any

import httpx
import openai
import pytest

from shared.protocol import ImagePart
from tests.factories_gateway import CHAT, MODEL, make_body
from tests.factories_images import data_url, encoded, image_part

PNG = b64decode(data_url().partition(",")[2])
ONE, TWO = ({"authorization": f"Bearer sk-{name}"} for name in ("one", "two"))

pytestmark = pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ["sk-one", "sk-two"]}}])


@pytest.fixture
def api_key() -> str:
    return "sk-one"


#: The request fields with an image, by the path of each API.
WORDS = {
    CHAT: lambda image: make_body([image_part(image)]),
    "/v1/responses": lambda image: {"input": turn({"type": "input_image", "file_id": image})},
    "/v1/messages": lambda image: {
        "max_tokens": 9,
        "messages": turn({"type": "image", "source": {"type": "file", "file_id": image}}),
    },
}


def turn(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


async def ask(gateway: Any, path: str, image: str, headers: dict[str, str]) -> httpx.Response:
    body = {"model": MODEL, **WORDS[path](image)}
    return await gateway.client.post(path, json=body, headers=headers)


async def test_every_api_accepts_the_id_of_an_uploaded_image(client, gateway, worker):
    file = await client.files.create(file=("scene.png", PNG), purpose="vision")
    assert (file.purpose, file.bytes, file.filename) == ("vision", len(PNG), "scene.png")
    sha256 = hashlib.sha256(PNG).hexdigest()
    names = (file.id, f"sha256:{sha256}")
    for path, name in itertools.product(WORDS, names):
        response = await ask(gateway, path, name, ONE)
        assert response.status_code == 200, response.text
    tasks = [request.task for request in worker.requests]
    assert {task.images[0].sha256 for task in tasks} == {sha256}
    assert all(task.messages[0].parts == (ImagePart(0),) for task in tasks)
    assert await worker.blobs.get(tasks[0].images[0]) == PNG
    assert (await client.files.retrieve(file.id)).id == file.id
    for purpose, listed in (("vision", [file]), (openai.omit, [file]), ("batch", [])):
        assert (await client.files.list(purpose=purpose)).data == listed
    assert (await client.files.content(file.id)).content == PNG
    worker.answers.clear()
    for path, name in itertools.product(WORDS, (*names, "file-image-none", "sha256:none")):
        response = await ask(gateway, path, name, TWO)  # this key has uploaded no image
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "file_not_found")
        assert error["param"].startswith("input" if "resp" in path else "messages")
    assert worker.requests == []


async def test_a_page_can_begin_at_a_deleted_image(client):
    made = [
        await client.files.create(file=("scene.png", encoded(seed)), purpose="vision")
        for seed in range(3)
    ]
    await client.files.delete(made[1].id)
    for place, first in (("after", made[2]), ("before", made[0])):
        page = {"limit": 1, "extra_query": {place: made[1].id}}
        listed = await client.files.list(purpose="vision", **page)
        assert [file.id for file in listed.data] == [first.id]


async def test_an_image_that_is_deleted_is_not_found(client, gateway, worker):
    file = await client.files.create(file=("scene.png", PNG), purpose="vision")
    again = await client.files.create(file=("again.png", PNG), purpose="vision")
    assert again.id == file.id
    for method in ("GET", "DELETE"):  # a file ID is not a response ID
        path = f"/v1/responses/{file.id}"
        assert (await gateway.client.request(method, path, headers=ONE)).status_code == 404
    assert (await client.files.delete(file.id)).deleted
    assert (await ask(gateway, CHAT, file.id, ONE)).status_code == 400
    assert not (await client.files.list(after=file.id)).data  # clients delete a list page by page
    for gone in (client.files.retrieve(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError):
            await gone
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("scene.png", b"no image"), purpose="vision")
    assert refused.value.param == "file"
