"""Batch priority: how a client requests it, and how the response reports it."""

from shared.protocol import Priority
from tests.factories_gateway import make_body
from tests.gateway.api.chat.test_streams import read_events


async def test_the_header_overrides_the_tier_and_the_response_reports_the_tier(gateway, worker):
    refused = await gateway.chat(make_body(), headers={"x-vlm-priority": "urgent"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-vlm-priority")
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
    assert not [name for name in answer.headers if "ratelimit" in name]  # no rate limit is set
    *chunks, done = read_events(await gateway.stream(make_body(service_tier="flex")))
    assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
    assert done == "[DONE]"
    text = (await gateway.client.get("/metrics")).text  # wait times are measured by priority
    assert 'vlm_queue_wait_seconds_count{model="tiny",priority="batch"} 3.0' in text
    assert 'vlm_queue_wait_seconds_count{model="tiny",priority="interactive"} 5.0' in text
    assert 'vlm_batch_backlog{model="tiny"} 0.0' in text
