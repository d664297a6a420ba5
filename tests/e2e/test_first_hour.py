"""A user's first hour: from the checkout, and installed from a wheel with pipx and uv (`make first-hour`)."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from loadtest.albums import to_png_url
from tests.factories_images import image_part
from tests.integration.fleet_process import ROOT, SAMPLE, Served
from tests.long import long
from tests.waiting import wait_for

pytestmark = [long("first-hour"), pytest.mark.timeout(1800)]

IMAGES = ROOT / "engines" / "packages" / "shapes_clip" / "samples"
WHEEL_HOME = ROOT / ".cache" / "first-hour"
ANSWER = "A white background with a red star at the top left"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["star", "circle", "square"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@dataclass
class User:
    """A user with `vlm` in a folder."""

    programs: Path
    folder: Path
    served: Served | None = None

    def vlm(self, *arguments: str) -> str:
        ours = ("VLM_", "PYTHON")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        if self.served is not None:
            environment["VLM_URL"] = self.served.url
        done = subprocess.run(
            [self.programs / "vlm", *arguments],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


def install_wheel() -> Path:
    """Installs the wheel with its extras in an environment; returns the folder of its programs."""
    shutil.rmtree(WHEEL_HOME / "dist", ignore_errors=True)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, str(WHEEL_HOME / "dist")], cwd=ROOT, check=True, capture_output=True)
    [wheel] = WHEEL_HOME.glob("dist/*.whl")
    programs = WHEEL_HOME / "bin"
    if not (programs / "pip").exists():
        venv.create(WHEEL_HOME, with_pip=True)
    torch = shlex.split(os.environ.get("TORCH_ARGS", ""))
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *torch, "torch", "torchvision"], check=True)
    subprocess.run([*pip, "--upgrade", f"{wheel}[torch,search]"], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)
    return programs


def install_by(tool: str) -> Path:
    """Installs with the README's line for pipx or uv; returns the folder of the programs."""
    [command] = re.findall(rf"^({tool} .*?)(?: +#.*)?$", (ROOT / "README.md").read_text(), re.M)
    tools, home = WHEEL_HOME / "tools", WHEEL_HOME / tool
    if not (tools / "bin" / tool).exists():
        venv.create(tools, with_pip=True)
        subprocess.run([tools / "bin" / "pip", "install", "--quiet", "pipx", "uv"], check=True)
    constraints = str(ROOT / "constraints.txt")
    environment = {
        **os.environ, "PATH": f"{tools / 'bin'}:{os.environ['PATH']}",
        "PIPX_HOME": str(home), "PIPX_BIN_DIR": str(home / "bin"), "PIP_CONSTRAINT": constraints,
        "UV_TOOL_DIR": str(home), "UV_TOOL_BIN_DIR": str(home / "bin"), "UV_CONSTRAINT": constraints,
    }  # fmt: skip
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run(["bash", "-ec", command], cwd=ROOT, env=environment, check=True)
    return home / "bin"


@pytest.fixture(scope="module", params=["checkout", "wheel", "pipx", "uv"])
def user(request, tmp_path_factory) -> User:
    folder = tmp_path_factory.mktemp("home")
    if request.param == "checkout":
        return User(Path(sys.executable).parent, folder)
    return User(install_wheel() if request.param == "wheel" else install_by(request.param), folder)


@pytest.fixture(scope="module")
def serving(user: User) -> Iterator[User]:
    command = f"{user.programs}/vlm serve --also shapes-clip --port 0 --data-dir {user.folder}/data"
    with Served.start(command.split(), user.folder) as user.served:
        yield user


def ask(user: User, **body) -> dict:
    assert user.served is not None
    image = image_part(to_png_url(SAMPLE.read_bytes()))
    content = [image, {"type": "text", "text": "What shape is at the top left?"}]
    messages = [{"role": "user", "content": content}]
    body = {"model": "shapes", "temperature": 0, "messages": messages, **body}
    answer = httpx.post(f"{user.served.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def test_the_version_and_the_models_are_shown_before_anything_runs(user):
    assert user.vlm("--version").startswith("vlm-fleet ")
    assert "shapes" in user.vlm("models")


def test_an_image_is_described_in_words_json_and_a_call(serving):
    assert ANSWER in serving.vlm("chat", "--image", str(SAMPLE), "Describe the image.")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert json.loads(ask(serving, response_format=form)["content"]).keys() == {"kind"}
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    [call] = ask(serving, tools=[tool], tool_choice="required")["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]).keys() == {"kind"}


def test_search_finds_an_image_by_words(serving):
    assert "wreath.png" in serving.vlm("search", str(IMAGES), "a red star", "--limit", "1")


def test_a_model_is_deployed_answers_and_is_rolled_back(serving):
    deploy = ("deploy", "--name", "captioner", "--application", "shapes")
    serving.vlm(*deploy)
    assert ask(serving, model="captioner")["content"]
    serving.vlm(*deploy, "--set", "quantization=int8")
    serving.vlm("rollback", "captioner")
    wait_for(lambda: bool(ask(serving, model="captioner")["content"]), 60)
