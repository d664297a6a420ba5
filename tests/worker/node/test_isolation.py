"""Isolation of applications is required, but the node has no working sandbox."""

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
    whole, refused = tmp_path / "whole", tmp_path / "refused"
    scripts = {whole: "#!/bin/sh\n", refused: '#!/bin/sh\ncase "$*" in *--proc*) exit 1;; esac\n'}
    for folder, script in scripts.items():
        folder.mkdir()
        (folder / "bwrap").write_text(script)
        (folder / "bwrap").chmod(0o755)
    for folder, found in ((refused, None), (whole, str(whole / "bwrap"))):
        monkeypatch.setenv("PATH", str(folder))
        find_bubblewrap.cache_clear()
        try:
            assert find_bubblewrap() == found
        finally:
            find_bubblewrap.cache_clear()
