"""Token IDs equal those of transformers, bytes add up to its decoding, and users cannot type control tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.integrations.mistral.tokenizer import MistralConverter

from engines.text.chat_template import PLAIN_TEMPLATE
from engines.text.detokenizer import Detokenizer
from engines.text.processor import MultimodalProcessor, create_processor
from engines.text.tokenizer import HfTokenizer
from engines.torch_backend.models.config import UnsupportedCheckpoint
from tests.factories_tekken import make_tekken
from tests.factories_tokenizers import TOKENIZERS, change_json, image_token_id, make_byte_level

CONTROLS = ["<image>", "</s>", "<s>", "<unk>", "<pad>"]
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [*CONTROLS, " ", "  ", "\n", "▁", "<0x0A>", "🍎", "é", "三", "<", ">", "How many"]
        ),
    ),
    max_size=8,
).map("".join)
LENIENT = settings(max_examples=60, suppress_health_check=list(HealthCheck))


class Pair:
    """One tokenizer, loaded by us and by transformers."""

    def __init__(self, directory: Path) -> None:
        self.ours = HfTokenizer(directory, image_token_id(directory))
        self.theirs: Any = AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module", params=TOKENIZERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("tokenizer") / "checkpoint"
    return Pair(TOKENIZERS[request.param](directory))


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    return make_byte_level(tmp_path / "checkpoint")


def load(directory: Path) -> HfTokenizer:
    return HfTokenizer(directory, image_token_id(directory))


def decode(tokenizer: HfTokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(map(detokenizer.append, ids)) + detokenizer.finish()


@LENIENT
@given(text=TEXTS)
def test_ids_and_bytes_of_text_equal_those_of_transformers_with_control_tokens_split(
    pair: Pair, text: str
) -> None:
    ids = pair.ours.encode(text)
    assert ids == pair.theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert decode(pair.ours, ids) == pair.theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@LENIENT
@given(data=st.data())
def test_bytes_of_any_sequence_of_tokens_add_up(pair: Pair, data: st.DataObject) -> None:
    """Tokens of complete characters in any order, with special tokens between them, as a model can emit them."""
    whole = [
        index
        for index in range(pair.ours.vocab_size)
        if len(token := pair.ours.token_bytes(index)) != 1 or token < b"\x80"
    ]
    ids = data.draw(st.lists(st.sampled_from(whole), max_size=20))

    assert decode(pair.ours, ids) == pair.theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_end_tokens_are_read_from_the_first_file_that_has_them(byte_level: Path) -> None:
    change_json(byte_level / "generation_config.json", eos_token_id=[2, 7])
    change_json(byte_level / "config.json", text_config={"eos_token_id": 9})
    assert load(byte_level).eos_token_ids == {2, 7}
    (byte_level / "generation_config.json").unlink()
    assert load(byte_level).eos_token_ids == {9}
    change_json(byte_level / "config.json", text_config={"eos_token_id": None})
    assert load(byte_level).eos_token_ids == {2}


def test_added_tokens_of_the_template_and_of_the_settings_are_control_tokens(
    byte_level: Path,
) -> None:
    content = json.loads((byte_level / "tokenizer.json").read_text())
    turn = content["added_tokens"][0] | {"id": 322, "content": "<|turn|>", "special": False}
    content["added_tokens"].append(turn)
    (byte_level / "tokenizer.json").write_text(json.dumps(content))

    change_json(byte_level / "tokenizer_config.json", additional_special_tokens=["<|end|>"])

    plain = HfTokenizer(byte_level, 320)
    strict = HfTokenizer(byte_level, 320, template="{{ '<|turn|>' }}")

    assert plain.encode("a<|turn|>b") == [*plain.encode("a"), 322, *plain.encode("b")]
    assert 322 not in strict.encode("a<|turn|>b")
    assert strict.token_bytes(322) == b"<|turn|>"
    # a token that only the settings name is added
    assert plain.token_bytes(plain.control_tokens["<|end|>"].id) == b""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"type": "Unigram"}}, "byte-pair encoding"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
        ({"decoder": None}, "no decoder"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "cannot be read"),
    ],
)
def test_unsupported_tokenizers_are_refused_by_name(byte_level: Path, change, reason: str):
    with pytest.raises(UnsupportedCheckpoint, match="id 380"):
        HfTokenizer(byte_level, 380)
    change_json(byte_level / "tokenizer.json", **change)
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(byte_level)
    (byte_level / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"no tokenizer\.json"):
        load(byte_level)


@pytest.fixture
def tekken(tmp_path: Path) -> Path:
    (tmp_path / "tekken.json").write_text(json.dumps(make_tekken()))
    return tmp_path


@LENIENT
@given(TEXTS | st.sampled_from(["What the word\n\nor 1234 the thé", "[INST]", " \n ab"]))
def test_ids_of_a_tekken_file_equal_those_of_transformers(tekken: Path, text: str) -> None:
    ours = HfTokenizer(tekken, None)
    theirs = MistralConverter(str(tekken / "tekken.json")).converted()
    if not any(name in text for name in ours.control_tokens):
        assert ours.encode(text) == theirs.encode(text).ids
    assert b"".join(map(ours.token_bytes, ours.encode(text))) == text.encode()


NO_LISTS = "tekken.json: vocab and special_tokens are not lists of tokens"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"special_tokens": None}, "tekken.json: special_tokens are missing"),
        ({"vocab": [{"rank": 0}]}, NO_LISTS),
        ({"vocab": 3}, NO_LISTS),
        ({"vocab": [{"rank": 0, "token_bytes": "YWFh" * 200}]}, "of more than 512 bytes"),
        ({"config": {"default_vocab_size": 5}}, "config.default_vocab_size is 5"),
        ({"config": {"pattern": "("}}, "tokenizer.json cannot be read"),
    ],
)
def test_damaged_tekken_files_are_refused_by_field(tekken: Path, changes, reason: str) -> None:
    (tekken / "tekken.json").write_text(json.dumps(make_tekken() | changes))
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        HfTokenizer(tekken, None)


def test_a_tekken_file_without_a_chat_template_is_refused(tekken: Path) -> None:
    """Mistral's text models were trained with prompts that only mistral-common can build."""
    tokenizer = HfTokenizer(tekken, None)
    assert tokenizer.control_tokens["[AUDIO]"].id == 24
    assert tokenizer.control_tokens["<SPECIAL_39>"].id == 39
    assert tokenizer.vocab_size == 40 + 256 + 13
    plain = MultimodalProcessor(PLAIN_TEMPLATE)
    with pytest.raises(UnsupportedCheckpoint, match=r"save a chat_template\.jinja"):
        create_processor(tekken, plain)
    (tekken / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert create_processor(tekken, plain).tokenizer.encode("What") == [40 + 256 + 7]
