"""The OpenAPI document describes the chat route, including its limits."""

import pytest

from gateway.api.completions import ChatCompletionRequest
from gateway.api.fields import UNSUPPORTED
from gateway.http.error_codes import ERROR_CODES
from shared.settings.limits import LimitSettings
from tests.factories_gateway import CHAT
from tests.factories_settings import make_group

#: Prefixes of limits that do not apply to a request's fields.
NOT_OF_REQUESTS = ("max_open_", "max_key_", "max_queue_", "max_batch_", "max_header", "max_wrong_",
                   "max_lora", "max_store", "max_file")  # fmt: skip


@pytest.fixture
async def document(gateway):
    return (await gateway.client.get("/openapi.json")).json()


async def test_routes_are_described(document):
    chat, resumed = (document["paths"][CHAT]["post"], document["paths"]["/v1/streams/{id}"]["get"])
    request = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert request == "#/components/schemas/ChatCompletionRequest"
    statuses = {200, *(status for status, _ in ERROR_CODES.values())} - {405}
    assert set(chat["responses"]) == {str(status) for status in statuses}
    assert {*chat["responses"]["200"]["content"]} == {"application/json", "text/event-stream"}
    parameters = [(at["in"], at["name"]) for at in resumed["parameters"]]
    assert parameters == [("path", "id"), ("header", "last-event-id")]
    assert set(resumed["responses"]["200"]["content"]) == {"text/event-stream"}
    assert {"400", "401", "404", "429", "503"} <= set(resumed["responses"])
    scale = document["paths"]["/v1/applications/{name}:scale"]["post"]["responses"]
    assert ("200" in scale, "202" in scale) == (False, True)
    others = {"/v1/models", "/v1/models/{name}", "/healthz", "/readyz", "/metrics"}
    assert others <= set(document["paths"])


async def test_limits_and_unsupported_values_are_in_the_schema(document):
    limits = LimitSettings()
    schema = document["components"]["schemas"]["ChatCompletionRequest"]
    assert "additionalProperties" not in schema  # unknown fields are ignored
    properties = schema["properties"]
    assert set(properties) == set(ChatCompletionRequest.__struct_fields__)
    assert properties["messages"]["maxItems"] == limits.max_messages
    assert properties["n"]["anyOf"][0]["maximum"] == limits.max_choices
    assert properties["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert "end the answer" in properties["stop_token_ids"]["description"]
    body = document["paths"][CHAT]["post"]["requestBody"]["description"]
    assert all(name in body for name in UNSUPPORTED[CHAT])


@pytest.mark.parametrize("changes", [{"limits": {"max_text_chars": 7001, "max_image_bytes": 7003}}])
async def test_every_limit_of_a_request_is_in_the_document(document, changes):
    text = str(document["components"]["schemas"]["ChatCompletionRequest"])
    text += str(document["paths"][CHAT]["post"])
    for name, value in make_group(LimitSettings, **changes["limits"]):
        assert name.startswith(NOT_OF_REQUESTS) or f"{value:g}" in text or str(value) in text, name
