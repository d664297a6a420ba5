"""The tokenizer: a byte-level BPE of about a thousand tokens that can spell any text.

Spaces belong to the end of a word ("red " and "red" are tokens), so that an answer begins without one
after "ASSISTANT: ", and a conversation reads the same whether it was generated or typed.
"""

from collections.abc import Iterator

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1024
SPECIAL_TOKENS = BOS, EOS, UNK, PAD, IMAGE = ("<s>", "</s>", "<unk>", "<pad>", "<image>")
BOS_ID, EOS_ID, UNK_ID, PAD_ID, IMAGE_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (  # as llava-hf's: a message's images first, then its text
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% if not loop.last %}{{ ' ' }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ ' ' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)

_PIECE = Regex(r"\p{L}+ ?|\p{N} ?|[^\p{L}\p{N}\s]+ ?|\s+")


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are those of the texts."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECE, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
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
