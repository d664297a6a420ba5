"""compose.yaml: its settings exist, and its ports are published on this machine only."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engines.registry import read_settings
from loadtest.fleet import ROOT
from shared.settings.load import load_settings
from tests.e2e.compose_stack import PASSWORDS

DOCKERFILE = ROOT / "config/Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
MOCK = yaml.safe_load((ROOT / "compose.mock.yaml").read_text())["services"]
WORKERS = ("worker", "worker-gpu")


def default_of(value: str) -> str:
    """Returns a value as set by `make up`: defaults for `${NAME:-default}`, generated passwords for `${NAME:?...}`."""
    return re.sub(
        r"\$\{(\w+)(:-|:\?)([^}]*)\}", lambda m: PASSWORDS[m[1]] if m[2] == ":?" else m[3], value
    )


def settings_of(name: str, monkeypatch):
    for variable, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(variable, default_of(value))
    return load_settings()


@pytest.mark.parametrize("name", ["gateway", *WORKERS])
def test_every_variable_is_a_setting(name, monkeypatch):
    settings = settings_of(name, monkeypatch)
    assert settings.redis.url
    assert settings.engine.kind == ("auto" if name == "gateway" else "torch")


def test_the_built_in_model_runs_on_the_cpu_and_a_profile_adds_a_worker_on_a_gpu(monkeypatch):
    cpu, gpu = (SERVICES[name] for name in WORKERS)
    assert "profiles" not in cpu
    assert gpu["profiles"] == ["gpu"]
    assert default_of(cpu["build"]["args"]["TORCH_ARGS"]).endswith("/whl/cpu")
    assert "TORCH_ARGS" not in gpu["build"]["args"], "PyPI's torch has CUDA"
    assert cpu["image"] != gpu["image"]
    assert gpu["networks"]["default"]["aliases"] == ["worker"]
    engines = [settings_of(name, monkeypatch).engine.values() for name in WORKERS]
    assert [read_settings(each).model_dump()["device"] for each in engines] == ["auto", "cuda"]
    assert engines[0]["model"] == "shapes"
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_the_mock_replaces_the_worker_and_its_image():
    [(name, service)] = MOCK.items()
    assert service["image"] == SERVICES["gateway"]["image"]
    assert service["build"]["args"]["ENGINE"] == "mock"
    assert service["environment"].keys() <= SERVICES[name]["environment"].keys()


def test_no_password_has_a_default_and_make_generates_each(tmp_path):
    made = tmp_path / ".env"
    shutil.copy(ROOT / "Makefile", tmp_path)
    command = ["make", ".env", f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    values = dict(line.split("=") for line in made.read_text().splitlines())
    assert values.keys() == PASSWORDS.keys()
    assert len(set(values.values())) == len(values)
    assert all(re.fullmatch("[0-9a-f]{32}", value) for value in values.values())
    assert made.stat().st_mode & 0o077 == 0
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            for word in re.findall(r"\$\{(\w+)([^}]*)\}", str(value)):
                assert (word[0] in PASSWORDS) == word[1].startswith(":?"), name


def test_workers_do_not_reach_the_vector_stores():
    def networks(name):
        return set(SERVICES[name].get("networks", ["default"]))

    inside = {name for name in SERVICES if "stores" in networks(name)}
    assert inside == {"gateway", "search", "postgres"}
    assert all("default" not in networks(name) for name in ("search", "postgres"))


def test_ports_are_published_on_this_machine_only():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_services_have_minimal_privileges(name):
    service = SERVICES[name]
    assert service["read_only"]
    assert "/tmp" in service["tmpfs"]
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    own = "build" in service  # our image sets its user itself
    assert own or service["user"] not in ("root", "0")


def test_mounted_files_exist():
    mounted = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    files = [volume.split(":")[0] for volume in mounted if volume.startswith("./")]
    assert len(files) >= 3
    assert all((ROOT / file).exists() for file in files)
    assert all(volume.endswith(":ro") for volume in mounted if volume.startswith("./"))


def test_caches_of_the_image_are_on_volumes_of_every_worker():
    named = re.findall(r"(HF_HOME|XDG_CACHE_HOME|TRITON_CACHE_DIR)=(\S+)", DOCKERFILE.read_text())
    assert len(named) == 3
    for worker in WORKERS:
        targets = [volume.split(":")[1] for volume in SERVICES[worker]["volumes"]]
        assert all(any(Path(kept).is_relative_to(at) for at in targets) for _, kept in named)


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


def test_prometheus_scrapes_existing_services_and_ports():
    scraped = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text())
    ports = {
        job["job_name"]: (*job["dns_sd_configs"][0]["names"], job["dns_sd_configs"][0]["port"])
        for job in scraped["scrape_configs"]
    }
    worker_port = int(SERVICES["worker"]["environment"]["VLM_WORKER__HEALTH_PORT"])
    assert ports == {"gateway": ("gateway", 8000), "worker": ("worker", worker_port)}


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_processes_have_time_to_drain(name):
    settings = load_settings()
    drain_s = getattr(settings, name).drain_s
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > drain_s
