"""The tokenizer: a byte-level BPE of about two thousand tokens that can spell any text.

Spaces belong to the end of a word ("red " and "red" are tokens), so that an answer begins without one
after "ASSISTANT: ", and a conversation reads the same whether it was generated or typed.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SPECIAL_TOKENS = BOS, EOS, UNK, PAD, IMAGE = ("<s>", "</s>", "<unk>", "<pad>", "<image>")
BOS_ID, EOS_ID, UNK_ID, PAD_ID, IMAGE_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (  # as llava-hf's: a message's images first, then its text; before all, the functions by name
    "{% if tools %}{{ 'TOOLS: ' }}{% for tool in tools %}{{ tool['function']['name'] }}("
    "{% for name in tool['function']['parameters']['properties'] or {} %}{% if not loop.first %}, {% endif %}{{ name }}"
    "{% endfor %}) {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' }}"
    "{% elif message['role'] == 'tool' %}{{ 'TOOL: ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% elif message['content'] %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% if not loop.last %}{{ ' ' }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>\\n{\"name\": \"' }}{{ call['function']['name'] }}"
    "{{ '\", \"arguments\": ' }}{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ ' ' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


def add_words(tokenizer: Tokenizer, texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """The tokenizer with the most frequent pairs of tokens within words as further tokens.

    Signs stay apart: of JSON, each decides something.
    """
    described = json.loads(tokenizer.to_str())
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r"[^\W\d_]+ ?", text))
    kept = sorted((word, count) for word, count in counts.items() if count > 1)
    words = [tokenizer.encode(word, add_special_tokens=False).tokens for word, _ in kept]
    pairs: Counter[tuple[str, str]] = Counter()
    holders: dict[tuple[str, str], set[int]] = {}

    def note(index: int, sign: int) -> None:
        for pair in itertools.pairwise(words[index]):
            pairs[pair] += sign * kept[index][1]
            holders.setdefault(pair, set()).add(index)

    for index in range(len(words)):
        note(index, 1)
    while len(vocabulary) < vocab_size:
        (first, second), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        merges.append([first, second])
        vocabulary.setdefault(first + second, len(vocabulary))
        for index in holders.pop((first, second)):
            note(index, -1)
            words[index] = _merge(words[index], first, second)
            note(index, 1)
        pairs.pop((first, second), None)
    return Tokenizer.from_str(json.dumps(described))


def _merge(tokens: list[str], first: str, second: str) -> list[str]:
    if first not in tokens:
        return tokens
    merged: list[str] = []
    for token in tokens:
        if token == second and merged and merged[-1] == first:
            merged[-1] = first + second
        else:
            merged.append(token)
    return merged


def to_fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as `transformers` has it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )
