"""Command-line options reach the settings of the started processes; a command imports only what it needs."""

import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import vlm
from shared.settings.load import load_settings
from shared.settings.tree import Settings
from shared.version import package_version
from tests.integration.fleet_process import ROOT, run_vlm_on_terminal

ENGINE_OPTIONS = ["--engine", "mock", "--max-num-seqs", "7", "--dtype", "float16"]
REDIS = ["--redis-url", "unix:///nowhere"]
TENSORS = {"torch", "transformers"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records the calls that would start processes."""
    calls: list[tuple[Any, ...]] = []

    def record(target: str) -> None:
        monkeypatch.setattr(target, lambda *arguments: calls.append((target, *arguments)))

    for target in ("worker.node.serve.run_node", "gateway.main.run_gateway"):
        record(target)
    record("shared.process.die_with_parent")
    monkeypatch.setattr("shared.telemetry.logs.setup_logging", lambda settings, name: None)
    return calls


def run(*arguments: str) -> None:
    result = CliRunner().invoke(vlm.app, arguments)
    assert result.exit_code == 0, result.output


def test_serve_passes_on_options_of_every_group(started):
    run("serve", *ENGINE_OPTIONS, "--port", "0", "--allow-open", "--workers", "3", "--search",
        "--also", "shapes-clip", "--ray", "auto")  # fmt: skip
    [(target, *rest)] = started
    settings, *others = rest
    assert target == "worker.node.serve.run_node"
    assert others == [3, None, True, ["shapes-clip"], "auto"]
    assert isinstance(settings, Settings)
    assert settings.engine.values() == {"kind": "mock", "max_num_seqs": 7, "dtype": "float16"}
    assert (settings.gateway.port, settings.gateway.allow_open) == (0, True)


def test_any_setting_can_be_set_and_others_keep_their_defaults(started):
    run("gateway", *REDIS, "--die-with-parent", "17", "--set", "worker.lease_s=5",
        "--set", "engine.mock.decode_s=0.25")  # fmt: skip
    assert started[0] == ("shared.process.die_with_parent", 17)
    assert started[-1][1] == load_settings(
        redis={"url": "unix:///nowhere"},
        engine={"mock": {"decode_s": "0.25"}},
        worker={"lease_s": 5},
    )


def test_a_setting_by_option_overrides_the_environment(started, monkeypatch):
    monkeypatch.setenv("VLM_GATEWAY__API_KEYS", "sk-one")
    run("gateway", *REDIS, "--set", "gateway.api_keys=sk-two,sk-three")
    keys = started[-1][1].gateway.api_keys
    assert [key.get_secret_value() for key in keys] == ["sk-two", "sk-three"]


@pytest.mark.parametrize(
    "wrong",
    [
        "serve --port zero", "serve --nothing", "serve --workers 0", "bench gateway --connections 1-8",
        "bench engine --batch-sizes 1,,8", "bench embeddings --shapes minilm", "bench search --kinds flat,hnsw",
        "loadtest --profile unheard", "loadtest --rate 0", "loadtest --slo speed=3", "node --cpu inf",
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused(wrong, started):
    result = CliRunner().invoke(vlm.app, wrong.split())
    [option] = re.findall(r"--\S+", wrong)
    assert (result.exit_code, option in result.stderr, started) == (2, True, [])


def test_the_version_is_that_of_the_package():
    assert CliRunner().invoke(vlm.app, ["--version"]).stdout == f"vlm-fleet {package_version()}\n"


@pytest.mark.parametrize("url", ["127.0.0.1:99999", "http://[::1", "http://", "http://a:b", "a\nb"])
@pytest.mark.parametrize("command", [["chat", "hi"], ["apps"], ["search", "x", "y"]], ids=" ".join)
def test_an_invalid_gateway_address_is_a_wrong_option(command, url):
    result = CliRunner().invoke(vlm.app, [*command, "--url", url])
    assert isinstance(result.exception, SystemExit)
    assert "'--url'" in result.stderr


@pytest.mark.parametrize(
    "url", ["gateway.example:8000", *(f"http://gateway.example:8000{end}" for end in ("/", "/v1/"))]
)
def test_the_address_for_clients_is_that_of_a_gateway(url, monkeypatch):
    urls: list[str] = []
    monkeypatch.setattr("gateway.chat_client.run_chat", lambda url, *rest: urls.append(url))
    run("chat", "hi", "--url", url)
    assert urls == ["http://gateway.example:8000"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--set", "worker.lease_s"], "worker.lease_s"),
        (["--set", "worker.leese_s=1"], "did you mean VLM_WORKER__LEASE_S?"),
        (["--redis-url", "bla"], "--redis-url: "),
        (["--set", "worker=1", "--set", "worker.lease_s=1"], "worker.lease_s"),
        (["--set", "worker.lease_s=long"], "--set worker.lease_s: "),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_78(wrong, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vlm", "worker", *REDIS, *wrong])
    with pytest.raises(SystemExit) as ended:
        vlm.main()
    assert ended.value.code == 78
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["--help"], ["serve", "--port", "zero"], ["serve", "--host", "203.0.113.1"], ["apps", "--url", "127.0.0.1:9"],
        ["chat", "--url", "127.0.0.1:9", "x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_colors_can_be_disabled(command):
    colour = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9|10)[0-7](?:;\d+)*m")
    assert colour.search(run_vlm_on_terminal(*command)[1])
    plain = run_vlm_on_terminal(*command, NO_COLOR="1")[1]
    assert plain.strip()
    assert not colour.search(plain)


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], {"torch", "numpy", "pydantic", "starlette", "httpx", "locust", "shared.settings.tree"}),
        (["gateway", *REDIS, "--set", "nothing=1"], {"torch", "numpy", "engines.base", "worker.main", "locust"}),
        (["models"], TENSORS),
        (["models", "--nothing"], TENSORS),
        (["bench", "checkpoint", "new", "--shape", "huge"], TENSORS),
        (["search", "engines/packages/shapes_clip/samples", "x", "--model", "no such model"], TENSORS),
        (["worker", *REDIS, "--model", "no such model"], TENSORS),
        (["chat", "--url", "http://127.0.0.1:9", "x"], {"torch", "starlette", "uvicorn", "shared.settings.tree"}),
    ],
)  # fmt: skip
def test_a_command_imports_only_what_it_needs(arguments, unneeded):
    code = "import atexit, sys, vlm; atexit.register(lambda: print(*sys.modules)); vlm.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "vlm" in loaded
    assert not unneeded & loaded
