"""`vlm embed`, `vlm store` and `vlm search`: collections from files, interrupted and resumed, into stores and back."""

import asyncio
import json
from hashlib import sha256

import httpx
import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import vlm
from engines.registry import EngineKind, engine_kinds, register
from engines.settings import EngineSettings
from search.collection import (
    BadCollection,
    FlatIndex,
    Manifest,
    read_manifest,
    write_manifest,
    write_part,
)  # fmt: skip
from search.commands import EmbedError, LocalEmbedder, embed
from shared.search import Filter
from shared.settings.limits import LimitSettings
from tests.factories_images import encoded
from tests.factories_numbers import run_fleet, vector_of
from tests.factories_queue import MODEL
from tests.factories_search import make_items, serve_search

STORES = "/v1/vector_stores"
TEXTS = [f"text number {n}" for n in range(50)]


@pytest.fixture
def embedder():
    embedder = LocalEmbedder("mock_pooling", "")
    yield embedder
    embedder.close()


@pytest.fixture
def inputs(tmp_path):
    path = tmp_path / "inputs.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def run(*arguments: str):
    return CliRunner().invoke(vlm.app, [str(argument) for argument in arguments])


async def run_beside(*arguments: str):
    """Runs a command in a thread, because the gateway runs in this loop."""
    return await asyncio.to_thread(run, *arguments)


def test_an_interrupted_run_continues_after_its_last_part(tmp_path, inputs, embedder, monkeypatch):
    """The collection has the inputs and their vectors in order."""

    class Cut(Exception):
        pass

    def cut(num_done: int, total: int) -> None:
        if num_done == 47:
            raise Cut

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "embedding.json.partial").touch()  # left by a full disk
    reported, options = [], {"part_items": 20, "batch_items": 7}
    with pytest.raises(Cut):
        embed([inputs], tmp_path / "out", embedder, **options, report=cut)
    with pytest.raises(BadCollection, match="run it again"):
        read_manifest(tmp_path / "out")
    report = lambda *progress: reported.append(progress)  # noqa: E731
    manifest = embed([inputs], tmp_path / "out", embedder, **options, report=report)
    assert [part.num_items for part in manifest.parts] == [20, 20, 10]
    assert reported == [(40, 50), (47, 50), (50, 50)]
    index = FlatIndex(tmp_path / "out")
    items = list(index.items())
    assert [(item.id, item.text) for item in items] == [(str(n), t) for n, t in enumerate(TEXTS)]
    rows = np.array([vector_of(text, prompt_name="document") for text in TEXTS], "<f4")
    assert b"".join(item.vector for item in items) == rows.tobytes()
    scores = rows @ rows[7]
    [hits] = index.search(rows[7:8], 5)
    assert [int(hit.item.id) for hit in hits] == np.argsort(-scores)[:5].tolist()
    assert [hit.score for hit in hits] == pytest.approx(sorted(scores)[:-6:-1])
    assert [item.id for item in index.page("45", 3)] == ["46", "47", "48"]
    # A further run has nothing to do.
    monkeypatch.setattr(embedder, "embed", None)
    assert embed([inputs], tmp_path / "out", embedder, **options) == manifest


def test_a_collection_is_not_continued_with_other_inputs_or_values(tmp_path, inputs, embedder):
    whole = embed([inputs], tmp_path / "out", embedder)
    with pytest.raises(EmbedError, match="another dtype"):
        embed([inputs], tmp_path / "out", embedder, dtype="f16")
    embedder.prompt = "query"
    with pytest.raises(EmbedError, match="another prompt"):
        embed([inputs], tmp_path / "out", embedder)
    inputs.write_text("other\n")
    with pytest.raises(EmbedError, match="another collection"):
        embed([inputs], tmp_path / "out", embedder)
    assert read_manifest(tmp_path / "out") == whole


def test_jsonl_csv_and_images_are_inputs(tmp_path, embedder):
    row = {"id": "x", "body": "one", "n": 3, "ok": True, "big": 10**400, "long": "y" * 600}
    lines = map(json.dumps, (row, "two", {"id": 0, "body": "zero"}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.csv").write_text('body,lang,image\n"three, ""quoted""",en,\n')
    folder = tmp_path / "images" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(encoded(1))
    (tmp_path / "images" / "b.jpg").write_bytes(encoded(2, format="JPEG"))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "images"]
    embed(paths, tmp_path / "out", embedder, text_field="body")
    items = list(FlatIndex(tmp_path / "out").items())
    assert [item.id for item in items] == ["x", "1", "0", "3", "b.jpg", "deep/a.png"]
    assert [item.text for item in items] == ["one", "two", "zero", 'three, "quoted"', "", ""]
    assert items[0].attributes == {"n": 3.0, "ok": True}
    assert items[3].attributes == {"lang": "en"}
    assert len({item.vector for item in items}) == 6


@pytest.mark.parametrize(
    ("name", "content", "reported"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"other": "b"}', "a.jsonl:2 has no text in 'text'"),
        ("a.csv", b'text\na\n""', "a.csv:3 has an empty text in 'text'"),
        ("a.jsonl", b'{"text": "a", "id": "x"}\n{"text": "b", "id": "x"}', "the id 'x'"),
        ("a.jsonl", b'{"text": "\\ud83d"}', "a.jsonl:1 is not valid JSON"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.png", b"x", "a.png"),
        pytest.param("a.jsonl", b"[" * 10**5, "a.jsonl:1 is not valid JSON", id="deep"),
        ("a.gif", b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08", "pixels"),
    ],
)
def test_the_error_of_a_bad_input_names_its_place(tmp_path, embedder, name, content, reported):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EmbedError, match=reported.replace(".", r"\.")):
        embed([tmp_path / name], tmp_path / "out", embedder)


def test_damaged_files_are_refused(tmp_path, inputs, embedder):
    embed([inputs], tmp_path / "out", embedder)
    part = tmp_path / "out" / "part-00000.safetensors"
    whole = part.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"\xff" * 100, b""):
        part.write_bytes(damaged)
        with pytest.raises(BadCollection, match="part-00000"):
            FlatIndex(tmp_path / "out")
    write_part(tmp_path / "out", 0, make_items(3, 64))
    with pytest.raises(BadCollection, match="the parts differ from the manifest"):
        FlatIndex(tmp_path / "out")


def test_the_commands_embed_and_search_a_directory(tmp_path, inputs):
    out = tmp_path / "out"
    made = run("embed", inputs, "--output", out, "--engine", "mock_pooling")
    assert made.exit_code == 0, made.output
    assert "50 items of mock-embeddings" in made.output
    engine = ("--engine", "mock_pooling", "--limit", "2")
    found = run("search", out, TEXTS[7], *engine)
    assert (found.exit_code, len(found.output.splitlines())) == (0, 2), found.output
    for seed in range(5):  # a folder of images can be searched without a collection
        (tmp_path / f"{seed}.png").write_bytes(encoded(seed))
    found = run("search", tmp_path, "--image", tmp_path / "3.png", *engine)
    assert found.exit_code == 0, found.output
    first, second = (line.split() for line in found.stdout.splitlines())
    assert first == ["1.0000", "3.png"]
    assert float(second[0]) < 0.99


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("embed", "nobody.txt", "--output", "out"), "nobody.txt cannot be read"),
        (("embed", "inputs.txt", "--output", "inputs.txt/deep"), "--output"),
        (("embed", "inputs.txt", "--output", "."), "not empty"),
        (("search", "empty", "x"), "has no images"),
        (("search", "cut", "x"), "run it again"),
        (("search", "nolib", "x"), "there is no directory nolib"),
        (("search", "made", "x"), "name the collection's model with --model: mock-embeddings"),
        (("search", "made", "x", "--engine", "needs"), "--model: mock-embeddings"),
    ],
)
def test_missing_arguments_are_reported_before_the_model_is_loaded(
    tmp_path, inputs, monkeypatch, arguments, reported
):
    def load(*arguments, **options):
        raise AssertionError("a model loads")

    monkeypatch.chdir(tmp_path)
    run("embed", "inputs.txt", "--output", "made", "--engine", "mock_pooling")
    monkeypatch.setattr("engines.registry.kinds", dict(engine_kinds()))
    register("needs", EngineKind(EngineSettings, load, needs_checkpoint=True))
    monkeypatch.setattr("engines.registry.create_engine", load)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("httpx.Client.send", _refuse)
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "embedding.json").touch()
    failed = run(*arguments)
    assert failed.exit_code == 1, failed.output
    assert reported in failed.output.replace("\n", " ")
    assert "Errno" not in failed.output


def _refuse(*arguments, **options):
    raise httpx.ConnectError("refused")


async def test_a_collection_is_imported_into_a_store_and_exported(
    tmp_path, inputs, ends, redis_server, monkeypatch
):
    monkeypatch.setenv("NO_PROXY", "*")
    async with (
        serve_search(tmp_path / "search") as settings,
        run_fleet(ends, redis_server, search=dict(settings)) as (gateway, _),
    ):
        monkeypatch.setattr(LimitSettings, "max_input_chars", 200)  # less than the sum of texts
        url = ("--url", gateway.url)
        made = await run_beside(
            "embed", inputs, "--output", tmp_path / "made", "--model", MODEL, *url
        )
        assert made.exit_code == 0, made.output
        loaded = await run_beside("store", "load", tmp_path / "made", "--name", "s", *url)
        assert loaded.exit_code == 0, loaded.output
        assert "50 items" in loaded.output
        again = await run_beside("store", "load", tmp_path / "made", "--name", "s", *url)
        assert again.output.split()[-4:] == loaded.output.split()[-4:]
        found = await run_beside("search", "s", "anything", "--limit", "2", *url)
        assert len(found.stdout.splitlines()) == 2, found.output
        local = await run_beside("search", tmp_path / "made", "anything", "--limit", "2", *url)
        assert local.stdout == found.stdout
        monkeypatch.setattr("search.commands.PAGE", 20)
        monkeypatch.setattr("search.commands.EXPORT_PART_ITEMS", 20)
        export = ("store", "export", "s", "--output", tmp_path / "exported", *url)
        with monkeypatch.context() as cut:
            cut.delattr("search.commands.write_manifest")
            assert (await run_beside(*export)).exit_code == 1
        (tmp_path / "exported" / "part-00002.safetensors").unlink()
        exported = await run_beside(*export)
        assert exported.exit_code == 0, exported.output
        assert "not empty" in (await run_beside(*export)).output
        again = await run_beside("store", "load", tmp_path / "exported", "--name", "t", *url)
        assert again.exit_code == 0, again.output
        stores = (await gateway.client.get(STORES)).json()["data"]
        prompts = [(store["prompt"], store["query_prompt"]) for store in stores]
        assert prompts == [("document", "query")] * 2
    manifest = read_manifest(tmp_path / "exported")
    assert (manifest.prompt, manifest.query_prompt) == ("document", "query")
    assert [part.num_items for part in manifest.parts] == [20, 20, 10]
    first = {item.id: item for item in FlatIndex(tmp_path / "made").items()}
    second = {item.id: item for item in FlatIndex(tmp_path / "exported").items()}
    assert first == second


def test_a_walk_in_pages_sorts_the_ids_of_a_collection_once(tmp_path, monkeypatch):
    items, sorts, found = make_items(100), list[int](), list[str]()
    part = write_part(tmp_path, 0, items)
    fields = {"model": "m", "digest": "d", "dimensions": 8, "dtype": "f32", "num_items": 100}
    write_manifest(tmp_path, Manifest(parts=(part,), **fields))
    count = lambda ids: sorts.append(1) or sorted(ids)  # noqa: E731
    monkeypatch.setattr("search.collection.sorted", count, raising=False)
    index = FlatIndex(tmp_path)
    while page := index.page(found[-1] if found else "", 7):
        found += [item.id for item in page]
    assert found == sorted(item.id for item in items)
    assert len(sorts) == 1


async def test_a_collection_is_a_store_that_every_key_can_search(
    tmp_path, inputs, embedder, ends, redis_server
):
    where = Filter("lt", "n", 3.0)
    inputs.write_text("\n".join(json.dumps({"text": text, "n": n}) for n, text in enumerate(TEXTS)))
    embed([inputs.rename(tmp_path / "inputs.jsonl")], tmp_path / "seed", embedder)
    [hits] = FlatIndex(tmp_path / "seed").search(np.eye(64)[:1], 9, where)
    assert len(hits) == 3
    settings = {"collections": (str(tmp_path / "seed"),), "default_store": "seed"}
    keys = {"api_keys": ["a", "b"]}
    body = {"text": "anything", "num_results": 4}
    async with (
        serve_search(tmp_path / "search", **settings) as served,
        run_fleet(ends, redis_server, search=dict(served), gateway=keys) as (gateway, _),
    ):
        client = gateway.client
        client.headers["authorization"] = "Bearer b"
        store = (await client.get(STORES)).json()["data"][0]
        assert (store["name"], store["num_items"], store["is_read_only"]) == ("seed", 50, True)
        own = [(await client.post(STORES, json={})).json()["id"] for _ in range(3)]
        for order, every in (("asc", [*own, store["id"]]), ("desc", [store["id"], *own[::-1]])):
            listed, has_more = list[str](), True
            while has_more:
                query = {"limit": 1, "order": order, **({"after": listed[-1]} if listed else {})}
                page = (await client.get(STORES, params=query)).json()
                listed += [entry["id"] for entry in page["data"]]
                has_more = page["has_more"]
            assert listed == every
        # The served model has another name than the one that embedded the collection.
        assert (await client.post("/similar", json=body)).status_code == 404
    manifest = msgspec.structs.replace(read_manifest(tmp_path / "seed"), model=MODEL)
    write_manifest(tmp_path / "seed", manifest)
    async with (
        serve_search(tmp_path / "search", **settings) as served,
        run_fleet(ends, redis_server, search=dict(served)) as (gateway, _),
    ):
        client = gateway.client
        answer = (await client.post("/similar", json=body)).json()
        assert len(answer["text"]) == 4
        assert answer["text"][0].startswith("Item: text number ")
        assert "(index: " in answer["text"][0]
        query = np.array([vector_of("anything", prompt_name="query")])
        [hits] = FlatIndex(tmp_path / "seed").search(query, 4)
        for hit, line in zip(hits, answer["text"], strict=True):  # with the query prompt
            assert line.startswith(f"Item: {hit.item.text} (index: {hit.item.id} ")
        words = await client.post("/similar", json={"keywords": ["any", "thing"]})
        assert len(words.json()["text"]) == 10
        for bad in ({}, {"text": ""}, {"text": "a", "keywords": "b"}):
            assert (await client.post("/similar", json=bad)).status_code == 400
        [store] = (await client.get(STORES)).json()["data"]
        fields = msgspec.structs.asdict(manifest)
        del fields["query_prompt"]  # release 0.2 does not write it
        assert store["id"] == f"vs_{sha256(msgspec.json.encode(fields)).hexdigest()[:32]}"
        path, asked = f"{STORES}/{store['id']}/search", {"query": "anything", "max_num_results": 4}
        page = (await client.post(path, json=asked)).json()
        assert [found["id"] for found in page["data"]] == [hit.item.id for hit in hits]
        item = {"items": [{"id": "a", "text": "b"}]}
        for method, path, sent in (("PUT", "/items", item), ("DELETE", "", None), ("POST", "", {})):
            refused = await client.request(method, f"{STORES}/{store['id']}{path}", json=sent)
            code = refused.json()["error"]["code"]
            assert (refused.status_code, code) == (409, "store_read_only")
