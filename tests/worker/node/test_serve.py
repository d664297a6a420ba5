"""What `vlm serve` makes of the settings."""

from pathlib import Path

import yaml

from shared.settings.tree import EngineValues, RedisSettings, Settings, WorkerSettings
from worker.node.serve import create_node

ROOT = Path(__file__).parents[3]


def test_the_redis_of_compose_has_the_same_bound():
    command = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["redis"]["command"]
    bound = command[command.index("--maxmemory") + 1]
    default = RedisSettings().max_memory_bytes
    assert bound == f"${{VLM_REDIS__MAX_MEMORY_BYTES:-{default}}}"


def test_another_model_has_a_worker_of_its_own_on_the_cpu():
    settings = Settings(
        _env_file=None,  # type: ignore[call-arg]
        engine=EngineValues.model_validate({"kind": "mock"}),
        worker=WorkerSettings(lora=("a=/adapters/a",)),
    )
    node = create_node(settings, 2, also=["shapes-clip"])
    *workers, other, gateway = node.children
    assert [child.arguments for child in node.children] == 3 * [["worker"]] + [["gateway"]]
    assert {child.environment["VLM_ENGINE__KIND"] for child in workers} == {"mock"}
    assert other.environment["VLM_ENGINE__MODEL"] == "shapes-clip"
    assert other.environment["VLM_ENGINE__DEVICE"] == "cpu"
    assert not {"VLM_ENGINE__KIND", "VLM_WORKER__LORA"} & other.environment.keys()
    assert gateway.must_start
