"""Vectors and scores equal those of transformers, alone and in batches."""

import io
import json
from array import array

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPModel,
    SiglipImageProcessor,
    SiglipModel,
)

from engines.base import (
    EngineCall,
    EngineStartError,
    InvalidRequest,
    PreparedImage,
    PromptTooLong,
    UnsupportedCheckpoint,
)
from engines.image_decoder import decode_image
from engines.pooling.engine import PoolingEngine
from engines.pooling.load import load_encoder
from engines.pooling.settings import PoolingSettings
from engines.torch_backend.ops.registry import cpu_ops
from shared.protocol import Embed, ImagePart, ImageRef, Rerank, TextPart, TokensPart
from tests.factories_encoders import (
    CONFIGS,
    VOCAB_SIZE,
    WORDS,
    make_clip,
    make_encoder,
    make_scorer,
    make_siglip,
    reference,
    reference_score,
)

CPU = torch.device("cpu")
TEXTS = [
    "w1", "w2 w3 w4", "w5 w6 w7", "w9", " ".join(WORDS[20:60]), " ".join(WORDS[100:117]), "w8 unknown w10",
]  # fmt: skip
#: More tokens than fit in one step, in inputs of many lengths.
COMPANY = [" ".join(WORDS[n : n + 10 + n % 50]) for n in range(80)]


def load(directory, **changes):
    return load_encoder(directory, CPU, torch.float32, **changes)


def compute(model, *tasks, images=()):
    """Returns the result of each task, computed together."""
    engine = PoolingEngine(model, PoolingSettings())
    for number, task in enumerate(tasks):
        prepared = [PreparedImage("", content) for content in images]
        engine.add(engine.prepare(EngineCall(str(number), task), prepared))
    outputs = {}
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step()}
    return [
        np.array(array("f", outputs[str(number)].values)).reshape(
            -1, outputs[str(number)].dimensions or 1
        )
        for number in range(len(tasks))
    ]


def are_close(found, expected) -> bool:
    """Returns whether values differ by at most 1e-5 of the largest one, or of 1, because they are not normalized."""
    expected = np.asarray(expected)
    return np.abs(np.asarray(found) - expected).max() <= 1e-5 * max(1, np.abs(expected).max())


def embed(*texts, **options):
    options.setdefault("is_normalized", False)
    return Embed(tuple(map(TextPart, texts)), **options)


@pytest.mark.parametrize(
    ("kind", "pooling", "normalize"),
    [
        *((kind, "last" if kind == "qwen3" else "mean", False) for kind in CONFIGS),
        *(("bert", pooling, pooling != "last") for pooling in ("cls", "mean", "max", "last")),
    ],
)
def test_vectors_equal_those_of_transformers_in_any_batch(kind, pooling, normalize, tmp_path):
    model = load(make_encoder(tmp_path, kind, pooling=pooling, normalize=normalize))
    [together] = compute(model, embed(*TEXTS, *COMPANY))
    for text, vector in zip(TEXTS, together, strict=False):
        expected = reference(tmp_path, text, pooling, normalize=normalize).numpy()
        assert np.abs(vector - expected).max() < 1e-5 * max(1, np.abs(expected).max())
        [[alone]] = compute(model, embed(text))
        assert np.abs(vector - alone).max() < 1e-6 * max(1, np.abs(alone).max())


def test_prompts_and_dimensions_come_from_the_directory(tmp_path):
    own = {"prompts": {"query": "w7 w8 ", "document": ""}, "default_prompt_name": "query"}
    config = {"matryoshka_dimensions": [8, 16, 32]}
    model = load(make_encoder(tmp_path, "bert", config=config, **own))
    assert dict(model.prompts) == {"query": "w7 w8 "}
    assert model.shorter_dimensions == (8, 16)
    [[vector]] = compute(model, embed("w1", is_normalized=True, dimensions=8))
    cut = reference(tmp_path, "w7 w8 w1", "mean")[:8]
    assert np.allclose(vector, torch.nn.functional.normalize(cut, dim=0), atol=1e-5)
    [[bare]] = compute(model, embed("w1", prompt_name=None))
    assert np.allclose(bare, reference(tmp_path, "w1", "mean"), atol=1e-5)
    with pytest.raises(InvalidRequest):
        compute(model, embed("w1", dimensions=9))
    with pytest.raises(InvalidRequest):
        compute(model, embed("w1", prompt_name="nobody"))


def test_a_text_without_tokens_or_with_one_that_the_model_lacks_is_refused(tmp_path):
    file = make_encoder(tmp_path, "bert") / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    new = {**tokenizer["added_tokens"][0], "id": VOCAB_SIZE, "content": "[NEW]"}
    tokenizer["added_tokens"].append(new)
    file.write_text(json.dumps({**tokenizer, "post_processor": None}))
    model = load(tmp_path)
    for text, message in [(" ", "no tokens"), ("w1 [NEW]", f"id {VOCAB_SIZE} .* outside")]:
        with pytest.raises(InvalidRequest, match=message):
            compute(model, embed("w1", text))


def test_vectors_that_are_not_finite_fail_only_their_call(tmp_path):
    model = load(make_encoder(tmp_path, "bert"))
    weight = model._base.embeddings.word_embeddings.weight
    with torch.no_grad():
        weight[model.texts.encode("w5", add_special_tokens=False)[0][0]] = torch.inf
    engine = PoolingEngine(model, PoolingSettings())
    for name in ("w5", "w1"):
        engine.add(engine.prepare(EngineCall(name, embed(name)), []))
    errors = {output.request_id: output.error for output in engine.step()}
    assert ("not finite" in errors["w5"], errors["w1"]) == (True, None)


def test_long_inputs_are_refused_or_truncated_like_the_tokenizer_does(tmp_path):
    model = load(make_encoder(tmp_path / "encoder", "bert"))
    long = " ".join(WORDS[:90])
    with pytest.raises(PromptTooLong, match="92 tokens") as refused:
        compute(model, embed("w1", long))
    assert refused.value.param == "input.[1]"
    cuts = (
        ({"truncate": "end"}, WORDS[:62]),
        ({"truncate": "start"}, WORDS[28:90]),
        ({"truncate": "end", "max_tokens": 12}, WORDS[:10]),
    )
    for options, words in cuts:
        [[vector]] = compute(model, embed(long, **options))
        expected = reference(tmp_path / "encoder", " ".join(words), "mean")
        assert np.allclose(vector, expected, atol=1e-5)
    scorer = load(make_scorer(tmp_path / "scorer", "bert"))
    with pytest.raises(PromptTooLong) as refused:
        compute(scorer, Rerank((long,), ("w1",), truncate="end"))
    assert refused.value.param == "query"


def test_token_ids_are_used_unchanged(tmp_path):
    model = load(make_encoder(tmp_path, "bert"))
    ids = AutoTokenizer.from_pretrained(tmp_path)("w1 w2")["input_ids"]
    [[vector]] = compute(model, Embed((TokensPart(tuple(ids)),), is_normalized=False))
    assert np.allclose(vector, reference(tmp_path, "w1 w2", "mean"), atol=1e-5)
    with pytest.raises(InvalidRequest):
        compute(model, Embed((TokensPart((10_000,)),)))


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "electra"])
def test_scores_equal_those_of_transformers(kind, tmp_path):
    model = load(make_scorer(tmp_path, kind))
    assert model.tasks == ("rerank",)
    raw, score = compute(
        model, Rerank(("w1 w2",), tuple(TEXTS), is_raw=True), Rerank(("w1 w2",), tuple(TEXTS))
    )
    expected = np.array([reference_score(tmp_path, "w1 w2", text) for text in TEXTS])[:, None]
    assert np.allclose(raw, expected, atol=1e-5)
    assert np.allclose(score, 1 / (1 + np.exp(-expected)), atol=1e-5)
    [cut] = compute(model, Rerank(("w1 w2",), ("w3 w4 w5",), 2, is_raw=True))
    assert np.allclose(cut, reference_score(tmp_path, "w1 w2", "w3 w4"), atol=1e-5)


def make_image() -> bytes:
    file = io.BytesIO()
    image = Image.new("RGB", (40, 32), (200, 30, 90))
    image.paste((10, 240, 40), (5, 5, 20, 20))
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["clip", "siglip right", "siglip left"])
def test_vectors_of_texts_and_images_equal_those_of_transformers(kind, tmp_path):
    name, _, side = kind.partition(" ")
    padding = {"padding": "max_length", "max_length": 16} if side else {}
    make_siglip(tmp_path, side) if side else make_clip(tmp_path)
    theirs = (SiglipModel if side else CLIPModel).from_pretrained(tmp_path).eval()
    processors = CLIPImageProcessor, SiglipImageProcessor
    image_processor = processors[name == "siglip"].from_pretrained(tmp_path)
    model, data = load(tmp_path), make_image()
    pixels = model.process_image(data, ImageRef("", len(data), "image/png", 40, 32), decode_image)
    task = Embed((TextPart("w1 w2"), ImagePart(0), TextPart("w3")), is_normalized=False)
    [vectors] = compute(model, task, images=[pixels])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.inference_mode():
        for index, text in ((0, "w1 w2"), (2, "w3")):
            ids = tokenizer(text, return_tensors="pt", **padding)["input_ids"]
            assert are_close(vectors[index], theirs.get_text_features(ids).pooler_output[0])
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        inputs = image_processor(picture, return_tensors="pt")
        assert are_close(vectors[1], theirs.get_image_features(**inputs).pooler_output[0])
    if side:
        [row] = model.rows(Embed((TextPart("w1 w2"),)), [])
        assert row.num_tokens - row.num_padding == 4
    if side == "left":  # SigLIP's tokenizer class needs another library, so tokenizer.json is read
        [expected] = compute(model, embed("w1 w2"))
        change(tmp_path / "tokenizer_config.json", tokenizer_class="SiglipTokenizer")
        [found] = compute(load(tmp_path), embed("w1 w2"))
        assert np.array_equal(found, expected)


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_dense_modules_are_applied_after_the_pooling(tmp_path):
    tanh, gelu = "torch.nn.modules.activation.Tanh", "torch.nn.modules.activation.GELU"
    dense = [
        {"in_features": 32, "out_features": 48, "activation_function": tanh},
        {"in_features": 48, "out_features": 48, "bias": False, "activation_function": gelu, "use_residual": True},
        {"in_features": 48, "out_features": 24, "activation_function": "torch.nn.modules.linear.Identity",
         "use_residual": True},
    ]  # fmt: skip
    config = {"matryoshka_dimensions": [8, 24, 32]}
    model = load(make_encoder(tmp_path, "bert", dense=dense, normalize=True, config=config))
    assert (model.dimensions, model.shorter_dimensions) == (24, (8,))
    [vectors] = compute(model, embed(*TEXTS))
    tensors = [load_file(tmp_path / f"{n}_Dense" / "model.safetensors") for n in (2, 3, 4)]
    for text, vector in zip(TEXTS, vectors, strict=True):
        x = reference(tmp_path, text, "mean")
        x = torch.tanh(tensors[0]["linear.weight"] @ x + tensors[0]["linear.bias"])
        x = torch.nn.functional.gelu(tensors[1]["linear.weight"] @ x) + x
        y = tensors[2]["linear.weight"] @ x + tensors[2]["linear.bias"]
        expected = torch.nn.functional.normalize(y + tensors[2]["residual.weight"] @ x, dim=0)
        assert np.abs(vector - expected.numpy()).max() < 1e-5


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "distilbert", "mpnet", "qwen3"])
def test_int8_vectors_have_the_direction_of_float32_vectors(kind, tmp_path):
    make_encoder(tmp_path, kind, config={"hidden_act": "gelu"} if kind == "bert" else {})
    if not cpu_ops("fast").uses("linear_int8", "cpu"):
        with pytest.raises(EngineStartError, match="none"):
            load(tmp_path, is_int8=True)
        pytest.skip("no C++ kernels here")
    small = load(tmp_path, is_int8=True)
    whole = load(tmp_path)
    [found], [expected] = (compute(model, embed(*TEXTS)) for model in (small, whole))
    cosines = torch.cosine_similarity(torch.tensor(found), torch.tensor(expected))
    assert cosines.min() >= 0.995
    for text, vector in zip(TEXTS, found, strict=True):
        [[alone]] = compute(small, embed(text))
        assert np.abs(vector - alone).max() < 1e-5 * max(1, np.abs(alone).max())
    assert small.memory_bytes()["weights"] < whole.memory_bytes()["weights"]


def _edit(file, do):
    """Applies `do` to the tensors of a file and one of their names."""
    tensors = load_file(file)
    do(tensors, next(name for name in tensors if name.endswith("weight")))
    save_file(tensors, file, {"format": "pt"})


def _spoil(tensors, name):
    tensors[name].view(-1)[3] = torch.nan


def _dense(**fields):
    return lambda d: change(d / "2_Dense" / "config.json", **fields)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda d: (d / "model.safetensors").rename(d / "x.bin"), "safetensors"),
        (lambda d: (d / "modules.json").write_text('[{"type": "a.LSTM", "path": "2_LSTM"}]'), "LSTM"),
        (lambda d: (d / "config.json").write_text('{"model_type": "siglip2"}'), "SiglipModel"),
        (lambda d: (d / "modules.json").write_text('[{"type": "a.Pooling", "path": "../x"}]'), "out of"),
        (lambda d: (d / "modules.json").write_text("{"), "not JSON"),
        (lambda d: (d / "1_Pooling" / "config.json").write_text("{}"), "Pooling"),
        (lambda d: (d / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["cls"]}'), "Pooling"),
        (lambda d: (d / "sentence_bert_config.json").write_text('{"max_seq_length": "9"}'), "max_seq_length"),
        (lambda d: (d / "config_sentence_transformers.json").write_text('{"prompts": ["q"]}'), "prompts"),
        (lambda d: (d / "config.json").write_text("{}"), r"config.json"),
        (lambda d: change(d / "config.json", num_attention_heads="x"), "config.json: .*num_attention_heads"),
        (lambda d: change(d / "config.json", hidden_act="?"), "weights cannot be loaded"),
        (lambda d: change(d / "tokenizer.json", model=5), "the tokenizer cannot be read"),
        (lambda d: change(d / "config.json", matryoshka_dimensions=["8"]), "matryoshka_dimensions"),
        (lambda d: _edit(d / "model.safetensors", lambda tensors, name: tensors.pop(name)), "lack"),
        (lambda d: _edit(d / "model.safetensors", _spoil), "the weight .* not finite"),
        (lambda d: _edit(d / "2_Dense" / "model.safetensors", _spoil), "the weight .* not finite"),
        (lambda d: (d / "2_Dense" / "model.safetensors").unlink(), "2_Dense"),
        (_dense(activation_function="os.system"), "activation"),
        (_dense(activation_function="torch.nn.functional.glu"), "activation"),
        (_dense(in_features=31), "31"),
        (_dense(module_input_name="token_embeddings"), "module_input_name"),
        (_dense(out_features=-1), "out_features"),
        (_dense(bias=False), "bias"),
    ],
)  # fmt: skip
def test_unsupported_encoders_are_refused_with_the_reason(damage, why, tmp_path):
    make_encoder(tmp_path, "bert", dense=[{"in_features": 32, "out_features": 48}])
    damage(tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match=why):
        load(tmp_path)
