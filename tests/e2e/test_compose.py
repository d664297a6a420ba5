"""compose.yaml: what it sets exists, what it publishes stays on this machine, and it comes up and answers."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from loadtest.client import ChatClient
from loadtest.fleet import ROOT, free_port
from loadtest.pictures import noise_jpeg, to_data_url
from loadtest.scenarios import picture_part, text_part, to_body
from shared.settings_loading import load_settings

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
WORKERS = ("worker", "worker-shapes", "worker-gpu")
PROJECT = f"vlm-test-{os.getpid()}"
EXTRA = ("torch", "torchvision", "transformers", "tokenizers", "safetensors", "open_clip", "numpy")


def succeeds(*command: str) -> bool:
    return shutil.which(command[0]) is not None and (
        subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    )


def compose_command() -> list[str]:
    """How compose is called here; empty where no engine runs."""
    if not succeeds("docker", "info"):
        return []
    for command in (["docker", "compose"], ["docker-compose"]):
        if succeeds(*command, "version"):
            return command
    return []


def default_of(value: str) -> str:
    """A value as it is without any variable set: `${NAME:-default}` is its default."""
    return value.rpartition(":-")[2].rstrip("}") if value.startswith("${") else value


def settings_of(name: str, monkeypatch):
    for variable, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(variable, default_of(value))
    return load_settings()


@pytest.mark.parametrize("name", ["gateway", *WORKERS])
def test_every_variable_is_a_setting(name, monkeypatch):
    settings = settings_of(name, monkeypatch)
    assert settings.redis.url
    assert settings.engine.kind == ("mock" if name == "worker" else "torch")


def test_profiles_add_workers_with_the_real_engine(monkeypatch):
    assert [SERVICES[name].get("profiles") for name in WORKERS] == [None, ["shapes"], ["gpu"]]
    for name in WORKERS[1:]:
        service = SERVICES[name]
        assert service["image"] == "vlm-fleet:torch"
        assert service["build"]["args"] == {"ENGINE": "torch"}
        assert service["networks"]["default"]["aliases"] == ["worker"]
        assert service["read_only"]
    assert settings_of("worker-shapes", monkeypatch).engine.device == "auto"
    assert settings_of("worker-gpu", monkeypatch).engine.device == "cuda"
    [device] = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_ports_are_published_on_this_machine_only():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_files_that_are_mounted_are_there():
    mounted = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    files = [volume.split(":")[0] for volume in mounted if volume.startswith("./")]
    assert len(files) >= 3
    assert all((ROOT / file).exists() for file in files)
    assert all(volume.endswith(":ro") for volume in mounted if volume.startswith("./"))


def test_grafana_finds_the_dashboard_and_its_prometheus():
    grafana = SERVICES["grafana"]
    targets = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    provisioning = ROOT / "config/grafana/provisioning"
    dashboards = yaml.safe_load((provisioning / "dashboards/vlm-fleet.yml").read_text())
    [provider] = dashboards["providers"]
    assert provider["options"]["path"] == targets["./config/grafana/dashboards"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "config/grafana/dashboards" / home.rpartition("/")[2]).exists()
    sources = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())
    [source] = sources["datasources"]
    assert source["url"] == "http://prometheus:9090"
    scraped = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]


def test_prometheus_scrapes_services_that_are_there_on_their_ports():
    scraped = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text())
    ports = {
        job["job_name"]: (*job["dns_sd_configs"][0]["names"], job["dns_sd_configs"][0]["port"])
        for job in scraped["scrape_configs"]
    }
    worker_port = int(SERVICES["worker"]["environment"]["VLM_WORKER__HEALTH_PORT"])
    assert ports == {"gateway": ("gateway", 8000), "worker": ("worker", worker_port)}


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_processes_have_time_to_finish_what_runs(name):
    settings = load_settings()
    drain_s = getattr(settings, name).drain_s
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > drain_s


def test_gateway_and_mock_worker_need_nothing_of_the_torch_extra():
    code = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRA!r}))  # None: an import of them fails
import gateway.main, worker.main, vlm
from engines.factory import EngineSpec, create_engine
create_engine(EngineSpec(kind="mock")).engine.close()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def stack() -> Iterator[str]:
    """The stack from a fresh image on a free port; gone at the end with its volumes."""
    command = compose_command()
    if not command:
        pytest.skip("no docker engine with compose runs here")
    port = free_port()
    command += ["--project-name", PROJECT]
    options = {"cwd": ROOT, "env": {**os.environ, "GATEWAY_PORT": str(port)}, "timeout": 300}
    build = ["docker", "build", "--quiet", "--network", "host", "--file", "config/Dockerfile"]
    build += ["--tag", "vlm-fleet:mock", "."]
    subprocess.run(build, check=True, **options)
    try:
        subprocess.run([*command, "up", "--detach", "--no-build"], check=True, **options)
        wait_until_healthy("gateway")
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([*command, "down", "--volumes"], check=True, **options)


def wait_until_healthy(service: str) -> None:
    """Return when docker says so; a container that dies instead shows its last words."""
    names = ["docker", "ps", "--all", "--quiet", "--filter", f"name={PROJECT}.{service}"]
    [container] = subprocess.check_output(names, text=True).split()
    events = ["docker", "events", "--filter", f"container={container}", "--since", "10m"]
    with subprocess.Popen(events, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "health_status: healthy" in line:
                process.terminate()
                return
            if " die " in line:
                process.terminate()
                logs = subprocess.check_output(["docker", "logs", container], text=True)
                raise AssertionError(f"{service} ended:\n{logs}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [False, True])
def test_stack_answers_a_question_about_a_picture(stack, stream):
    content = [picture_part(to_data_url(noise_jpeg(4_000))), text_part("What is it?")]
    with ChatClient(stack) as client:
        [model] = client.models()
        answer = client.ask(to_body(model, content, 8, stream))
    assert (answer.num_tokens, answer.finish_reason) == (8, "length")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_image_brings_no_torch(stack):
    listing = ["docker", "run", "--rm", "--entrypoint", "python", "vlm-fleet:mock", "-c"]
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    names = subprocess.check_output([*listing, code], text=True).split()
    assert "fastapi" in names
    assert not {"torch", "transformers", "numpy"} & set(names)
