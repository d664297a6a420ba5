"""A node that has to isolate applications, and cannot."""

from pathlib import Path

import pytest

from engines.application.sandbox import find_bubblewrap
from shared.settings.load import load_settings
from shared.settings.tree import SettingsError
from worker.node.agent import NodeAgent


def test_a_node_refuses_to_start_without_the_sandbox_that_is_required(tmp_path, monkeypatch):
    monkeypatch.setattr("engines.application.sandbox.find_bubblewrap", lambda: None)
    store = {"store": f"file://{tmp_path}"}
    settings = load_settings(deploy=store, node={"isolation": "require"})
    with pytest.raises(SettingsError, match="VLM_NODE__ISOLATION=require: bubblewrap"):
        NodeAgent(settings)


def test_a_container_that_lets_bubblewrap_mount_no_proc_has_no_sandbox(tmp_path: Path, monkeypatch):
    program = tmp_path / "bwrap"
    program.write_text('#!/bin/sh\ncase "$*" in *--proc*) exit 1;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    find_bubblewrap.cache_clear()
    try:
        assert find_bubblewrap() is None
        program.write_text("#!/bin/sh\n")
        find_bubblewrap.cache_clear()
        assert find_bubblewrap() == str(program)
    finally:
        find_bubblewrap.cache_clear()
