"""A gateway does not route to workers of another protocol version, and says so."""

import pytest
from msgspec.structs import replace

from gateway.calls.models import Route
from tests.factories_gateway import CARD, MODEL


@pytest.mark.parametrize("card", [replace(CARD, version=1)])
async def test_a_model_whose_workers_speak_version_1_is_refused_by_name(gateway, worker):
    response = await gateway.chat()
    models = (await gateway.client.get("/v1/models")).json()["data"]
    assert response.status_code == 503
    assert response.headers["retry-after"]
    error = response.json()["error"]
    assert error["code"] == "unsupported_version"
    assert "the gateway speaks protocol 2, the worker 1: update the worker" in error["message"]
    assert worker.requests == []
    assert MODEL not in [model["id"] for model in models]


async def test_a_deployment_stands_for_its_versions_among_the_served_models(gateway):
    """A vector store without `embedding_model` would else be bound to a version that retires."""
    models = gateway.services.models
    version = replace(CARD, name="emb@3f2a3f2a3f2a", package="emb@sha256:0")
    plain = replace(CARD, name="plain")
    models.cards = {card.name: card for card in (version, plain)}
    models.routes = {"emb": Route(replace(version, name="emb", parent=version.name))}
    assert [card.name for card in models.served()] == ["emb", "plain"]
