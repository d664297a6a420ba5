"""Open WebUI's server in front of a fleet: requests of its users, by its own API."""

import base64
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from loadtest.fleet import free_port
from tests.clients.programs import SKIPPED, NotHad, install_pip

SPEC = "open-webui==0.12.4"
START_S = 300.0
QUESTION = "How many shapes are there?"


def ask_open_webui(url: str, model: str, sample: Path) -> dict[str, str]:
    """Returns the result of each feature."""
    try:
        program = install_pip(SPEC).with_name("open-webui")
    except NotHad as error:
        return {"all": f"{SKIPPED}{error}"}
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "DATA_DIR": folder,
            "WEBUI_SECRET_KEY": "of-the-test",
            "OPENAI_API_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "OLLAMA_BASE_URL": url,
            "OFFLINE_MODE": "true",
            "HF_HUB_OFFLINE": "1",
            "RAG_EMBEDDING_ENGINE": "openai",
        }
        command = [program, "serve", "--host", "127.0.0.1", "--port", port]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, cwd=folder, stdout=log, stderr=log
            )
            try:
                return _ask(process, f"http://127.0.0.1:{port}", model, sample)
            except (httpx.HTTPError, LookupError) as error:
                log.seek(0)
                return {"all": f"{error!r}: {log.read()[-1000:]}"}
            finally:
                process.terminate()
                process.wait()


def _ask(process: "subprocess.Popen[bytes]", url: str, model: str, sample: Path) -> dict[str, str]:
    client = httpx.Client(base_url=url, timeout=120, trust_env=False)
    deadline = time.monotonic() + START_S
    while True:
        try:
            if client.get("/health").is_success:
                break
        except httpx.HTTPError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
        time.sleep(1)
    user = {"name": "a", "email": "a@example.com", "password": "Secret-of-the-test-1"}
    token = client.post("/api/v1/auths/signup", json=user).json()["token"]
    client.headers["authorization"] = f"Bearer {token}"
    image = f"data:image/png;base64,{base64.b64encode(sample.read_bytes()).decode()}"
    content = [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": image}},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    told = {"role": "user", "content": QUESTION, "images": [image.partition(",")[2]]}
    of_ollama = {"model": model, "messages": [told], "stream": False}
    checks: dict[str, Callable[[], bool]] = {
        "models": lambda: model in client.get("/api/models").text,
        "images": lambda: "3" in _answer(client, "/api/chat/completions", body),
        "stream": lambda: (
            "[DONE]" in _answer(client, "/api/chat/completions", {**body, "stream": True})
        ),
        "as Ollama": lambda: "3" in _answer(client, "/ollama/api/chat", of_ollama),
    }
    return {name: "yes" if check() else "no" for name, check in checks.items()}


def _answer(client: httpx.Client, path: str, body: dict[str, object]) -> str:
    answer = client.post(path, json=body)
    if not answer.is_success:
        return f"{answer.status_code} {answer.text[:300]}"
    if body.get("stream"):
        return answer.text
    found = answer.json()
    return str(found["choices"][0]["message"] if "choices" in found else found["message"])
