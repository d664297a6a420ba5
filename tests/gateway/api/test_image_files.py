"""Images that are uploaded once, and stand for their URL in requests of every API."""

import asyncio
import hashlib
from base64 import b64decode
from typing import Any

import httpx
import openai
import pytest

from shared.protocol import ImagePart
from tests.factories_gateway import CHAT, MODEL, make_body
from tests.factories_images import data_url, image_part

PNG = b64decode(data_url().partition(",")[2])
BY_SHA256 = "sha256:" + hashlib.sha256(PNG).hexdigest()
ONE, TWO = ({"authorization": f"Bearer sk-{name}"} for name in ("one", "two"))

pytestmark = pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ["sk-one", "sk-two"]}}])


@pytest.fixture
def api_key() -> str:
    return "sk-one"


def chat(image: str) -> tuple[str, dict[str, Any]]:
    return CHAT, make_body([image_part(image)])


def responses(image: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "input_image", "file_id": image}]
    return "/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": parts}]}


def messages(image: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "image", "source": {"type": "file", "file_id": image}}]
    turns = [{"role": "user", "content": parts}]
    return "/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": turns}


async def ask(gateway: Any, words: Any, image: str, headers: dict[str, str]) -> httpx.Response:
    path, body = words(image)
    return await gateway.client.post(path, json=body, headers=headers)


async def test_an_image_is_uploaded_once_and_named_in_every_api(client, gateway, worker):
    file = await client.files.create(file=("scene.png", PNG), purpose="vision")
    assert (file.purpose, file.bytes, file.filename) == ("vision", len(PNG), "scene.png")
    for words in (chat, responses, messages):
        for name in (file.id, BY_SHA256):
            response = await ask(gateway, words, name, ONE)
            assert response.status_code == 200, response.text
    tasks = [request.task for request in worker.requests]
    assert len({task.images for task in tasks}) == 1
    assert tasks[0].images[0].sha256 == hashlib.sha256(PNG).hexdigest()
    assert all(task.messages[0].parts == (ImagePart(0),) for task in tasks)
    assert await worker.blobs.get(tasks[0].images[0]) == PNG
    assert (await client.files.retrieve(file.id)).id == file.id
    assert (await client.files.content(file.id)).content == PNG


@pytest.mark.parametrize("words", [chat, responses, messages])
async def test_only_the_key_that_uploaded_it_finds_it(client, gateway, worker, words):
    file = await client.files.create(file=("scene.png", PNG), purpose="vision")
    for name in (file.id, BY_SHA256, "file-image-none", "sha256:none"):
        response = await ask(gateway, words, name, TWO)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "file_not_found"
    path, _ = words("")
    assert response.json()["error"]["param"].startswith("input" if "resp" in path else "messages")
    assert worker.requests == []


async def test_an_image_that_many_upload_at_once_is_kept_for_all(client, gateway, worker):
    async def upload() -> set[str]:
        made = client.files.create
        return {(await made(file=("scene.png", PNG), purpose="vision")).id for _ in range(20)}

    ids = set().union(*await asyncio.gather(*(upload() for _ in range(8))))
    [name] = ids
    assert (await ask(gateway, chat, name, ONE)).status_code == 200


async def test_an_image_is_no_response(client, gateway):
    file = await client.files.create(file=("scene.png", PNG), purpose="vision")
    for method in ("GET", "DELETE"):
        path = f"/v1/responses/{file.id}"
        assert (await gateway.client.request(method, path, headers=ONE)).status_code == 404
    assert (await client.files.retrieve(file.id)).id == file.id


async def test_an_image_that_is_deleted_is_not_found(client, gateway, worker):
    file = await client.files.create(file=("scene.png", PNG), purpose="vision")
    again = await client.files.create(file=("again.png", PNG), purpose="vision")
    assert again.id == file.id
    assert (await client.files.delete(file.id)).deleted
    assert (await ask(gateway, chat, file.id, ONE)).status_code == 400
    for gone in (client.files.retrieve(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError):
            await gone


async def test_what_is_no_image_is_refused_at_its_upload(client, worker):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("scene.png", b"no image"), purpose="vision")
    assert refused.value.param == "file"
