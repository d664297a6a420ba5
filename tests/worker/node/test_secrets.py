"""Secrets of a node, and how it passes them to one process."""

import os
from pathlib import Path

import pytest

from engines.application.child import read_variables
from engines.base import EngineStartError
from shared.packages.deployments import BadEnvironment, Environment
from shared.settings.limits import MAX_SECRET_BYTES
from shared.settings.tree import NodeSettings, SettingsError
from worker.node.environment import SecretMissing, Secrets, hand_over


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch) -> Secrets:
    files = {"token": b"from-a-file\n", "both": b"file", "empty": b"", ".hidden": b"x"}
    for name, data in {**files, "nul": b"\0"}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    for name in ("OWN", "both", "OTHER"):
        monkeypatch.setenv(name, "variable")
    return Secrets(NodeSettings(secrets_dir=str(tmp_path), secrets=("OWN", "both", "GONE")))


def test_files_and_named_variables_are_secrets(secrets: Secrets):
    assert secrets.names == ("OWN", "both", "empty", "nul", "token")
    wanted = Environment({"P": "1"}, {"A": "token", "B": "both", "C": "OWN", "D": "empty"})
    found = secrets.read(wanted)
    assert found.all == {"P": "1", "A": "from-a-file", "B": "file", "C": "variable", "D": ""}


@pytest.mark.parametrize("name", ["OTHER", "GONE", "folder", "itself", "nul", "nothing"])
def test_an_unknown_secret_is_reported_by_name(secrets: Secrets, name: str):
    with pytest.raises(SecretMissing, match=name):
        secrets.read(Environment(secrets={"A": name}))


def test_a_folder_that_is_not_there_is_refused_at_start(tmp_path):
    with pytest.raises(SettingsError, match="VLM_NODE__SECRETS_DIR"):
        Secrets(NodeSettings(secrets_dir=str(tmp_path / "none")))


def test_secrets_are_read_once_and_leave_no_open_file(secrets: Secrets):
    given = secrets.read(Environment({"P": "1"}, {"A": "token"}))
    number = hand_over(given)
    assert os.fstat(number).st_nlink == 0
    assert not os.get_inheritable(number)
    assert read_variables(number) == given
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
    with pytest.raises(EngineStartError, match="VARIABLES_FD"):
        read_variables(number)


def test_more_secrets_than_fit_are_refused_by_field_and_limit(tmp_path):
    names = [f"s{number}" for number in range(100)]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * MAX_SECRET_BYTES)
    secrets = Secrets(NodeSettings(secrets_dir=str(tmp_path)))
    wanted = Environment(secrets={name.upper(): name for name in names})
    with pytest.raises(BadEnvironment, match=r"secrets: .* bytes exceed .* of 524288; .* fewer"):
        secrets.read(wanted)
    (tmp_path / "s0").write_bytes(b"x" * (MAX_SECRET_BYTES + 1))
    with pytest.raises(SecretMissing, match="s0 has 65537 bytes; store at most 65536"):
        secrets.read(wanted)
