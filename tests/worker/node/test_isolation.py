"""A node that has to isolate applications, and cannot."""

import pytest

from shared.settings.load import load_settings
from shared.settings.tree import SettingsError
from worker.node.agent import NodeAgent


def test_a_node_refuses_to_start_without_the_sandbox_that_is_required(tmp_path, monkeypatch):
    monkeypatch.setattr("engines.application.sandbox.find_bubblewrap", lambda: None)
    store = {"store": f"file://{tmp_path}"}
    settings = load_settings(deploy=store, node={"isolation": "require"})
    with pytest.raises(SettingsError, match="VLM_NODE__ISOLATION=require: bubblewrap"):
        NodeAgent(settings)
