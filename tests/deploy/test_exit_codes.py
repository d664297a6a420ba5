"""Exit codes and messages of deployment commands, without nodes."""

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock
from urllib.error import HTTPError

import httpx
import pytest
import yaml
from typer.testing import CliRunner, Result

import vlm
from shared.gateway_client import Client
from shared.settings.tree import DeploySettings
from tests.factories_gateway import make_settings, run_gateway_on_socket
from vlm_app import Session, SessionError

KEY = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"  # an invalid key
SHAPES = ("deploy", "--name", "n", "--application", "shapes")
NOBODY = "http://127.0.0.1:9"  # port of the discard service, on which nothing listens


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
async def url(redis_server, redis_prefix, tmp_path) -> AsyncIterator[str]:
    """A gateway with an empty store."""
    settings = make_settings(redis_server, redis_prefix, gateway={"deploy_keys": ("may-deploy",)})
    store = DeploySettings(store=f"file://{tmp_path}/store")
    settings = settings.model_copy(update={"deploy": store})
    async with run_gateway_on_socket(settings, refresh=False) as running:
        yield str(running.client.base_url)


def run(*arguments: str | Path, url: str = NOBODY, key: str = "may-deploy") -> Result:
    given = ["--url", url, "--api-key", key]
    return CliRunner().invoke(vlm.app, [*map(str, arguments), *given])


def said(done: Result) -> str:
    """The error output on one line, for any terminal width."""
    return " ".join(done.stderr.split())


def deploy_of(package: Path, *more: str | Path) -> list[str | Path]:
    return ["deploy", "--name", "n", "--application", package, "--set", "kind=mock", *more]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["deploy", "--name", "n"], "--application"),
        ([*SHAPES, "--set", "int8"], "NAME=VALUE"),
        ([*SHAPES, "--set", "quantization=int8", "--entry", "app:A"], "--set is for models"),
        ([*SHAPES, "--min-instances", "9"], "larger"),
        ([*SHAPES, "--secret", f"T=sk-{KEY}"], "secrets.T"),
        ([*SHAPES, "--secret", f"T{KEY}"], "secrets: "),
        (["deploy", "--name", "a b", "--application", "shapes"], "--name a b: send 1 to 63"),
        ([*SHAPES, "--resources", "memory=4x"], "--resources memory=4x: write"),
        ([*SHAPES, "--canary", "200%"], "--canary 200%: write"),
        ([*SHAPES, "--start-s", "nan"], "'--start-s': nan is not"),
        ([*SHAPES, "--idle-s", "-1"], "--idle-s: Expected `float` > 0"),
        ([*SHAPES, "--command", "'bin/x"], "--command: No closing quotation"),
        (["rollback", "n", "--to", "first"], "--to"),
        (["scale", "n"], "--min"),
        (["gc", "--keep", "0"], "--keep"),
        (["run", "n"], "INPUT"),
        (["run", "n", "@/no/such/file"], "/no/such/file"),
        (["session", "create"], "application"),
        (["session", "create", "n", "--resources", "cpu=x"], "--resources cpu=x: write"),
        (["session", "forget"], "forget"),
    ],
)
def test_wrong_arguments_end_with_1(arguments: list[str], says: str):
    done = run(*arguments)
    assert done.exit_code == 1
    assert says in said(done)
    assert KEY not in done.output


def test_an_invalid_package_ends_with_2(package: Path):
    for path, data in (("weights.bin", b""), ("notes.json", b"\x80\x04N.")):
        (package / path).write_bytes(data)
        done = run(*deploy_of(package))
        assert (done.exit_code, path in said(done)) == (2, True)
        (package / path).unlink()
    for option, value, says in (
        ("--set", "blok_size=8", "--set blok_size: "),
        ("--set", "mock__decode=1", "did you mean --set mock__decode_s"),
        ("--set", "mock__decode_s=fast", "--set mock__decode_s: "),
        ("--set", "max_num_seqs=0", "--set max_num_seqs: "),
        ("--sign", package / "config.json", "config.json cannot sign"),
    ):
        done = run(*deploy_of(package, option, value))
        assert (done.exit_code, says in said(done)) == (2, True)


def test_a_store_that_cannot_be_written_ends_with_3(package: Path):
    (package.parent / "file").write_text("no folder")
    assert run("gc", "--store", f"file://{package.parent}/missing").exit_code == 3
    for arguments in (
        deploy_of(package, "--store", "http://no.store"),
        deploy_of(package, "--store", f"file://{package.parent}/file/store"),
        ["gc", "--store", "http://no.store"],
    ):
        done = run(*arguments)
        assert done.exit_code == 3, done.output
        assert "store" in said(done)


@pytest.mark.parametrize(
    "command",
    ["apps", "scale n --max 2", "gc", "run n 1", "session list", "run n [NaN]", "app n\x01"],
)
def test_an_unreachable_gateway_and_an_invalid_request_end_with_4(command: str):
    done = run(*command.split(" "))
    says = "cannot be sent" if "\x01" in command or "NaN" in command else "does not answer"
    assert (done.exit_code, says in said(done)) == (4, True)


def test_tasks_beyond_a_budget_do_not_wait_for_the_next_month(monkeypatch: pytest.MonkeyPatch):
    spent = {"error": {"message": "Spent.", "code": "insufficient_quota"}}
    answer = httpx.Response(429, json=spent, headers={"retry-after": "86400"})
    monkeypatch.setattr(Client, "send", lambda *_, **__: answer)
    monkeypatch.setattr("time.sleep", Mock(side_effect=AssertionError))
    done = run("session", "run", "s", "1")
    assert (done.exit_code, said(done)) == (4, "Spent.")
    failed = HTTPError("", 429, "", answer.headers, BytesIO(answer.content))
    monkeypatch.setattr("urllib.request.urlopen", Mock(side_effect=failed))
    with pytest.raises(SessionError, match="Spent"):
        Session("s", url=NOBODY).submit(1)


async def test_a_refusal_of_the_gateway_ends_with_4(package: Path, url: str):
    wrong = [(["apps"], "wrong"), (deploy_of(package), "wrong")]
    for arguments, key in ((["promote", "n"], "may-deploy"), *wrong):
        done = await asyncio.to_thread(run, *arguments, url=url, key=key)
        assert done.exit_code == 4, done.output
        assert done.stderr


async def test_an_interrupted_deploy_says_that_the_rollout_continues(
    package: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deploy.commands.time.sleep", Mock(side_effect=KeyboardInterrupt))
    done = await asyncio.to_thread(run, *deploy_of(package), url=url)
    assert done.exit_code == 130
    assert "the rollout of generation 1 continues" in said(done)


async def test_a_deployment_not_active_in_time_ends_with_5_unless_not_awaited(
    package: Path, url: str
):
    def deploy(*more: str) -> Result:
        return run(*deploy_of(package, *more), url=url)

    planned = await asyncio.to_thread(deploy, "--dry-run")
    assert planned.exit_code == 0
    shown = yaml.safe_load(planned.stdout)
    assert (shown["kind"], shown["engine"], shown["url"]) == ("model", {"kind": "mock"}, url)
    assert shown["digest"].startswith("sha256:")
    late = await asyncio.to_thread(deploy, "--wait", "0.1")
    assert late.exit_code == 5, late.output
    assert all(text in said(late) for text in ("there is no node", "not ready after 0.1 s"))
    assert (await asyncio.to_thread(deploy, "--wait", "0")).exit_code == 0
    listed = await asyncio.to_thread(run, "apps", "-o", "json", url=url)
    assert (listed.exit_code, '"name": "n"' in listed.stdout) == (0, True)


async def test_the_client_key_deploys_unless_a_deploy_key_is_set(url):
    async def ask(**keys: str) -> int:
        env = {"VLM_URL": url.removeprefix("http://"), "DEPLOY_KEY": "", "VLM_API_KEY": "", **keys}
        return (await asyncio.to_thread(CliRunner().invoke, vlm.app, ["apps"], env=env)).exit_code

    assert await ask(VLM_API_KEY="may-deploy") == 0
    assert await ask(DEPLOY_KEY="may-deploy", VLM_API_KEY="asks") == 0
    assert await ask(DEPLOY_KEY="asks", VLM_API_KEY="may-deploy") == 4
    assert await ask() == 4


@pytest.mark.parametrize("command", ["session list", "store export s", "embed TMP"])
async def test_openais_key_is_sent_only_to_the_server_of_openais_variable(
    redis_server, redis_prefix, tmp_path: Path, command: str
):
    (tmp_path / "texts.txt").write_text("one\n")
    arguments = command.replace("TMP", str(tmp_path / "texts.txt")).split()
    if command != "session list":
        arguments += ["--output", str(tmp_path / "new")]

    async def ask(*more: str, **env: str) -> bool:
        """Returns whether the gateway accepted the key."""
        env = {"OPENAI_API_KEY": "", "OPENAI_BASE_URL": "", "VLM_API_KEY": "", "VLM_URL": "", **env}
        done = await asyncio.to_thread(CliRunner().invoke, vlm.app, [*arguments, *more], env=env)
        text = done.output + str(done.exception)
        return "API key" not in text

    settings = make_settings(redis_server, redis_prefix, gateway={"api_keys": ("asks",)})
    async with run_gateway_on_socket(settings) as running:
        url = str(running.client.base_url)
        assert await ask("--url", url, VLM_API_KEY="asks")
        assert await ask(OPENAI_BASE_URL=url + "/v1", OPENAI_API_KEY="asks")
        assert await ask(VLM_URL=url, VLM_API_KEY="asks", OPENAI_BASE_URL=NOBODY)
        assert not await ask(VLM_URL=url, OPENAI_BASE_URL=url, OPENAI_API_KEY="asks")
        assert not await ask("--url", url, OPENAI_API_KEY="asks")
        assert not await ask("--url", url, OPENAI_BASE_URL=url, OPENAI_API_KEY="asks")
