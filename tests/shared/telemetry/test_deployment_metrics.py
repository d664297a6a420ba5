"""What graphs see of deployments: the state of now, and counts that only grow."""

from msgspec.structs import replace
from prometheus_client import generate_latest

from shared.packages.deployments import Spec
from shared.packages.rollout import App, Revision, Slot
from shared.protocol import ModelCard
from shared.queue.registry import WorkerRecord
from shared.telemetry.metrics import GatewayMetrics

OLD, NEW = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


def shown(metrics: GatewayMetrics) -> set[str]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {line for line in lines if line.startswith("vlm_deployment_")}


def worker(digest: str, name: str, num_finished: int, num_failed: int = 0) -> WorkerRecord:
    card = ModelCard(f"n@{digest[7:19]}", 1, 10, 10)
    return WorkerRecord(name, card, "mock", num_finished=num_finished, num_failed=num_failed)


def test_versions_instances_and_what_their_workers_answered():
    metrics = GatewayMetrics()
    app = App(
        "n", 2, active=Revision(1, OLD, Spec()),
        candidate=Revision(2, NEW, Spec(canary=0.1), is_canary=True),
        slots=(Slot(1, OLD, "ready"), Slot(2, OLD, "ready"), Slot(3, NEW, "starting")),
        desired=2, num_promoted=1, start_s=2.5,
    )  # fmt: skip
    metrics.deployments.observe({"n": app}, [worker(OLD, "x", 5), worker(NEW, "y", 1, 2)])
    metrics.deployments.observe({"n": app}, [worker(OLD, "x", 7), worker(NEW, "y", 1, 2)])
    version, other = OLD[7:19], NEW[7:19]
    assert shown(metrics) == {
        'vlm_deployment_generation{application="n"} 2.0',
        'vlm_deployment_desired_instances{application="n"} 2.0',
        'vlm_deployment_canary_ratio{application="n"} 0.1',
        'vlm_deployment_start_seconds{application="n"} 2.5',
        f'vlm_deployment_instances{{application="n",digest="{version}",state="ready",version="active"}} 2.0',
        f'vlm_deployment_instances{{application="n",digest="{other}",state="starting",version="candidate"}} 1.0',
        'vlm_deployment_rollouts_total{application="n",outcome="active"} 1.0',
        'vlm_deployment_rollouts_total{application="n",outcome="rolled_back"} 0.0',
        f'vlm_deployment_requests_total{{application="n",digest="{version}",outcome="finished"}} 7.0',
        f'vlm_deployment_requests_total{{application="n",digest="{version}",outcome="failed"}} 0.0',
        f'vlm_deployment_requests_total{{application="n",digest="{other}",outcome="finished"}} 1.0',
        f'vlm_deployment_requests_total{{application="n",digest="{other}",outcome="failed"}} 2.0',
    }


def test_a_worker_that_was_silent_is_not_counted_again_and_old_versions_go():
    metrics = GatewayMetrics()
    app = App("n", 1, active=Revision(1, OLD, Spec()))
    for workers in ([worker(OLD, "x", 5)], [], [worker(OLD, "x", 6)], [worker(OLD, "z", 2)]):
        metrics.deployments.observe({"n": app}, workers)
    line = f'vlm_deployment_requests_total{{application="n",digest="{OLD[7:19]}",outcome="finished"}} 8.0'
    assert line in shown(metrics)
    updated = replace(app, active=Revision(2, NEW, Spec()))
    metrics.deployments.observe({"n": updated}, [])
    assert not [each for each in shown(metrics) if OLD[7:19] in each]
    metrics.deployments.observe({}, [])
    assert not [each for each in shown(metrics) if "generation" in each]


def test_a_worker_that_outlives_many_others_is_counted_once():
    metrics = GatewayMetrics()
    app = App("n", 1, active=Revision(1, OLD, Spec()), num_promoted=1)
    lasting = worker(OLD, "x", 5)
    for others in ("a", "b"):
        workers = [worker(OLD, f"{others}{number}", 1) for number in range(4000)]
        metrics.deployments.observe({"n": app}, [*workers, lasting])
    metrics.deployments.observe({"n": app}, [lasting])
    found = shown(metrics)
    answers = (
        f'vlm_deployment_requests_total{{application="n",digest="{OLD[7:19]}",outcome="finished"}}'
    )
    assert f"{answers} 8005.0" in found
    assert 'vlm_deployment_rollouts_total{application="n",outcome="active"} 1.0' in found
