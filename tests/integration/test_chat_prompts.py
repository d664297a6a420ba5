"""Chat prompts of text models equal those of `tokenizer.apply_chat_template`, for any source of the BOS token."""

import engines.torch_backend  # noqa: F401  isort: skip - makes torchvision importable

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.checkpoint_files import make_tokenizer
from engines.registry import create_engine
from tests.engines.torch_backend.models.family_table import text, write_checkpoint
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.factories_queue import MODEL, Ends
from tests.factories_tokenizers import make_sentencepiece
from tests.factories_worker import run_worker

MESSAGES = [
    {"role": "user", "content": "What color is the star?"},
    {"role": "assistant", "content": "Red."},
    {"role": "user", "content": " And the ring "},
]
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' "
    "else message['role'] %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """`prepend` is of a sentencepiece tokenizer, empty for a byte-level one; `single` of the post-processor."""

    template: str
    prepend: str = ""
    single: str = "<s> $A"


CASES = {
    "TinyLlama, BOS in the post-processor": Case(ZEPHYR, "normalizer"),
    "Zephyr, BOS in the post-processor": Case(ZEPHYR, "first"),
    "Llama 3, BOS in both": Case(LLAMA_3),
    "Gemma, BOS in both": Case(GEMMA, "first"),
    "Gemma, BOS in the template": Case(GEMMA, "first", single="$A"),
    "Qwen, BOS in neither": Case(QWEN, single="$A"),
    "Qwen, EOS in the post-processor": Case(QWEN, single="$A </s>"),
}


def write(case: Case, directory: Path) -> Any:
    """Writes a checkpoint; returns transformers' tokenizer for it."""
    write_checkpoint(text("Llama", "Llama", vocab_size=1024), directory)
    file = directory / "tokenizer.json"
    if case.prepend:
        made = make_sentencepiece(directory.with_name("sentencepiece"), prepend=case.prepend)
        file.write_bytes((made / "tokenizer.json").read_bytes())
    else:
        make_tokenizer(900).save(str(file))
    content = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    pieces = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if each == "$A"
        else {"SpecialToken": {"id": each, "type_id": 0}}
        for each in case.single.split()
    ]
    special = {each: {"id": each, "ids": [ids[each]], "tokens": [each]} for each in ("<s>", "</s>")}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces,
        "special_tokens": special,
    }
    file.write_text(json.dumps(content))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(case.template)
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("name", CASES)
async def test_prompts_over_http_are_those_of_transformers(
    name: str, ends: Ends, redis_server: str, tmp_path: Path
):
    theirs = write(CASES[name], tmp_path / "model")
    chat = theirs.apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    plain = theirs("What color is the star?")["input_ids"]
    engine = {
        "kind": "torch",
        "model": str(tmp_path / "model"),
        "served_name": MODEL,
        "device": "cpu",
    }
    settings = make_settings(redis_server, ends.prefix, gateway={"silence_timeout_s": 30.0})
    async with (
        run_worker(ends, load=lambda: create_engine(engine)),
        run_gateway_on_socket(settings) as gateway,
    ):

        async def post(path: str, **body: Any) -> dict[str, Any]:
            answer = await gateway.client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert (await post("/tokenize", messages=MESSAGES))["tokens"] == chat
        answer = await post("/v1/chat/completions", messages=MESSAGES, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == len(chat)
        for last in ("It is a", "  It is \n", "red "):
            begun = [*MESSAGES, {"role": "assistant", "content": last}]
            wanted = theirs.apply_chat_template(
                begun, tokenize=True, continue_final_message=True, return_dict=False
            )
            assert (await post("/tokenize", messages=begun))["tokens"] == wanted
            wanted = theirs.apply_chat_template(begun, tokenize=True, return_dict=False)
            ended = await post("/tokenize", messages=begun, add_generation_prompt=False)
            assert ended["tokens"] == wanted
        # the tokenizer adds its special tokens to a prompt without a template
        assert (await post("/tokenize", prompt="What color is the star?"))["tokens"] == plain
        answer = await post("/v1/completions", prompt="What color is the star?", max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == len(plain)
