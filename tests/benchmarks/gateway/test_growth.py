"""Redis's CPU time for running requests is within its bound, measured with a tenth of the intended fleet size."""

from benchmarks.gateway.growth import measure_costs
from shared.settings.tree import WorkerSettings

NUM_WORKERS, OF_FLEET = 20, 200
SETTINGS = WorkerSettings(lease_s=2.0)  # heartbeats are five times as frequent as by default
#: CPU in ms per second for the whole fleet with default settings: four times 5 % of a core, for a busy machine.
MAX_CPU_MS = 200.0


async def test_heartbeats_and_scans_of_a_large_fleet_use_little_of_redis(redis):
    costs = await measure_costs(redis, NUM_WORKERS, 3, SETTINGS)
    least_ms = sum(map(min, costs.values())) * SETTINGS.heartbeat_s / WorkerSettings().heartbeat_s
    assert least_ms * OF_FLEET / NUM_WORKERS < MAX_CPU_MS
