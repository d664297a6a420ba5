"""A new user's first steps: embed texts offline with the built-in model, serve them, and search with `curl`.

WALK_TEXTS sets the number of texts; `make walk` uses 20,000.
"""

import asyncio
import json
import os
import subprocess
from random import Random

import pytest
from typer.testing import CliRunner

import vlm
from engines.registry import create_engine
from search.collection import read_manifest
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.factories_search import serve_search
from tests.factories_worker import run_worker
from training.shapes.world import sample_scene
from training.shapes_clip.queries import sample_query

NUM_TEXTS = int(os.environ.get("WALK_TEXTS", "300"))
#: Queries, and the words that the nearest texts must contain.
QUESTIONS = {"a red star": {"red", "star"}, "a green ring": {"green", "ring"}}


def embed_offline(folder) -> str:
    """Writes texts and runs `vlm embed`; returns its output."""
    rng = Random(1)
    texts = [sample_query(sample_scene(rng), rng).text for _ in range(NUM_TEXTS - len(QUESTIONS))]
    inputs = folder / "texts.txt"
    inputs.write_text("\n".join([*texts, *QUESTIONS]))
    made = CliRunner().invoke(vlm.app, ["embed", str(inputs), "--output", str(folder / "library")])
    assert made.exit_code == 0, made.output
    return made.output


def curl(url: str, body: dict) -> dict:
    head = ("-H", "content-type: application/json")
    command = ["curl", "-sf", "--noproxy", "*", url, *head, "-d", json.dumps(body)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.timeout(900)
async def test_texts_are_embedded_served_and_found_by_curl(tmp_path, ends, redis_server):
    said = await asyncio.to_thread(embed_offline, tmp_path)
    assert f"of {NUM_TEXTS} items, " in said
    assert "items/s" in said
    library = tmp_path / "library"
    assert read_manifest(library).num_items == NUM_TEXTS
    async with (
        serve_search(
            tmp_path / "s", collections=(str(library),), default_store="library"
        ) as search,
        run_worker(ends, load=lambda: create_engine({"kind": "auto", "model": "shapes-clip"})),
        run_gateway_on_socket(
            make_settings(redis_server, ends.prefix, search=dict(search))
        ) as gateway,
    ):
        for question, words in QUESTIONS.items():
            body = {"text": question, "num_results": 3}
            answer = await asyncio.to_thread(curl, f"{gateway.url}/similar", body)
            assert len(answer["text"]) == 3
            best = answer["text"][0]
            assert words <= set(best.lower().replace(".", "").split()), best
            assert "score:1.00" in best
    print(said)  # printed with -s
