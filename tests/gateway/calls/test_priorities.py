"""How a client says that its request is batch work, and what it is told."""

from shared.protocol import Priority
from tests.factories_gateway import make_body
from tests.gateway.api.chat.test_streams import read_events

FLEX = make_body(service_tier="flex")


async def test_the_header_goes_before_the_tier_and_the_answer_names_what_was_done(gateway, worker):
    for body, header, priority, tier in (
        ({}, None, Priority.INTERACTIVE, None),
        ({"service_tier": None}, None, Priority.INTERACTIVE, None),
        ({"service_tier": "auto"}, None, Priority.INTERACTIVE, "default"),
        ({"service_tier": "priority"}, None, Priority.INTERACTIVE, "default"),
        ({"service_tier": "flex"}, None, Priority.BATCH, "flex"),
        ({}, "batch", Priority.BATCH, None),
        ({"service_tier": "flex"}, "interactive", Priority.INTERACTIVE, "default"),
    ):
        headers = {} if header is None else {"x-vlm-priority": header}
        answer = await gateway.chat(make_body(**body), headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json().get("service_tier") == tier
        assert worker.requests[-1].priority == priority


async def test_each_chunk_of_a_stream_names_the_tier(gateway, worker):
    *chunks, done = read_events(await gateway.stream(FLEX))
    assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
    assert done == "[DONE]"


async def test_an_unknown_priority_is_refused_by_name(gateway):
    answer = await gateway.chat(make_body(), headers={"x-vlm-priority": "urgent"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-vlm-priority"


async def test_waits_are_measured_by_priority(gateway, worker):
    await gateway.chat(FLEX)
    text = (await gateway.client.get("/metrics")).text
    assert 'vlm_queue_wait_seconds_count{model="tiny",priority="batch"} 1.0' in text
    assert 'vlm_queue_wait_seconds_count{model="tiny",priority="interactive"} 0.0' in text
    assert 'vlm_batch_backlog{model="tiny"} 0.0' in text
