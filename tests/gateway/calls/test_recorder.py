"""What the metrics show of a request, and when."""

from tests.factories_gateway import make_body


async def test_a_client_that_has_its_answer_finds_it_in_the_metrics(gateway, worker):
    for count in range(1, 4):
        await gateway.chat(make_body())
        shown = (await gateway.client.get("/metrics")).text
        assert f'vlm_time_to_first_token_seconds_count{{model="tiny"}} {count}.0' in shown
