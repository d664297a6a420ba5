from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.torch_backend.loading import threads
from engines.torch_backend.loading.threads import ONE_THREAD_BYTES, cpu_share, set_num_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pretend that this process is in control groups with these files."""

    def enter(own: str, **files: str) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_max", ".max").replace(
                "_cfs", ".cfs"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        monkeypatch.setattr(threads, "_CGROUP", tmp_path)
        monkeypatch.setattr(threads, "_OWN_CGROUP", tmp_path / "own")

    return enter


def test_a_group_without_a_limit_has_every_processor(in_group):
    in_group("0::/\n", cpu_max="max 100000")
    assert cpu_share() == float("inf")
    in_group("0::/gone\n")
    assert cpu_share() == float("inf")


def test_the_smallest_share_of_a_group_and_those_around_it_counts(in_group):
    in_group("0::/a/b\n", a__cpu_max="250000 100000", a__b__cpu_max="400000 100000")
    assert cpu_share() == 2.5


def test_groups_of_the_first_version_count_too(in_group):
    quota = {"cpu__x__cpu_cfs_quota_us": "300000", "cpu__x__cpu_cfs_period_us": "100000"}
    in_group("4:memory:/x\n1:cpu,cpuacct:/x\n0::/\n", **quota)
    assert cpu_share() == 3.0
    in_group("1:cpu,cpuacct:/x\n", **quota | {"cpu__x__cpu_cfs_quota_us": "-1"})
    assert cpu_share() == float("inf")


def test_no_more_threads_than_the_containers_share(in_group):
    in_group("0::/\n", cpu_max="350000 100000")
    set_num_threads(0, CPU, ONE_THREAD_BYTES)
    assert torch.get_num_threads() == 3


def test_less_than_one_processor_is_one_thread(in_group):
    in_group("0::/\n", cpu_max="50000 100000")
    set_num_threads(0, CPU, ONE_THREAD_BYTES)
    assert torch.get_num_threads() == 1


def test_members_share_the_threads(in_group):
    in_group("0::/\n", cpu_max="600000 100000")
    set_num_threads(0, CPU, ONE_THREAD_BYTES, num_members=4)
    assert torch.get_num_threads() == 1


def test_a_small_model_has_one_thread(in_group):
    in_group("0::/\n")
    set_num_threads(0, CPU, ONE_THREAD_BYTES - 1)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("weight_bytes", [0, ONE_THREAD_BYTES])
def test_what_is_asked_for_goes_before_all(in_group, weight_bytes):
    in_group("0::/\n", cpu_max="100000 100000")
    set_num_threads(5, CPU, weight_bytes)
    assert torch.get_num_threads() == 5


def test_the_environment_goes_before_the_default(in_group, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    in_group("0::/\n", cpu_max="100000 100000")
    set_num_threads(0, CPU, ONE_THREAD_BYTES)
    assert torch.get_num_threads() == 8
