"""Ten times as many requests as the fleet can serve: the accepted are served as fast as ever, the others are refused at once.

P6. Long form (`make faults`): a minute. Nothing of the engine is computed, so that its pace is the same on any machine.
"""

import time

import pytest

from tests.faults.fleet import run_fleet
from tests.faults.load import LoadClient, quantile
from tests.long import IS_LONG

NUM_SEATS = 4
NUM_TOKENS = 10  #: at 20 ms each: the fleet serves almost 20 requests a second
MAX_WAITING = 20  #: about a second's worth
OVERLOAD_S = 60.0 if IS_LONG else 2.0
AFTER_S = 15.0 if IS_LONG else 1.5

pytestmark = pytest.mark.timeout(300)


async def test_ten_times_overload(tmp_path):
    async with run_fleet(tmp_path, VLM_LIMITS__MAX_QUEUE_DEPTH=str(MAX_WAITING)) as fleet:
        await fleet.worker(VLM_ENGINE__MAX_NUM_SEQS=str(NUM_SEATS))
        await overload(LoadClient(fleet.url, NUM_TOKENS))
        await fleet.at_rest()


async def overload(client: LoadClient) -> None:
    """Play it, and compare with what the fleet does when it has only as much as it can serve."""
    usual, capacity = await find_capacity(client)
    began_at = time.monotonic()
    shots = await client.open(10 * capacity, OVERLOAD_S)
    ended_at = time.monotonic()
    after = await client.open(capacity / 2, AFTER_S)
    await client.wait()
    await client.close()

    goodput = shots.rate(200, began_at, ended_at, NUM_SEATS)
    served, refused = shots.seconds(200), shots.seconds(503)
    back_after_s = max(
        (s.sent_at + s.seconds - ended_at for s in after.all if s.seconds > 2 * usual), default=0.0
    )
    print(
        f"capacity {capacity:.1f}/s, offered {len(shots.all) / OVERLOAD_S:.0f}/s, goodput {goodput / capacity:.0%}, "
        f"served in {quantile(served, 0.5):.2f} s (p50) {quantile(served, 0.99):.2f} s (p99), "
        f"{len(refused)} refused in {quantile(refused, 0.5) * 1e3:.0f} ms (p50) "
        f"{quantile(refused, 0.99) * 1e3:.0f} ms (p99) {refused[-1] * 1e3:.0f} ms (most), "
        f"usual {usual:.2f} s again after {back_after_s:.1f} s"
    )
    assert {shot.status for shot in (*shots.all, *after.all)} <= {200, 503}
    assert all(shot.may_retry for shot in shots.all if shot.status == 503)
    assert (
        goodput >= 0.8 * capacity
    )  # measured in turn: other work of the machine may fall into either
    assert quantile(refused, 0.5) < usual / 2
    assert quantile(refused, 0.99) < max(0.1, usual)
    assert quantile(served, 0.99) < usual + 2 * MAX_WAITING / capacity
    assert back_after_s < 10.0


async def find_capacity(client: LoadClient) -> tuple[float, float]:
    """How long one answer takes, and answers a second when all seats are taken."""
    alone = await client.closed(1, 1.0 if IS_LONG else 0.3)
    full = await client.closed(2 * NUM_SEATS, 5.0 if IS_LONG else 0.8)
    capacity = full.rate(200, 0.0, float("inf"), NUM_SEATS)
    return quantile(alone.seconds(200), 0.5), capacity
