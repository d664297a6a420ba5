"""The tokenizer: a byte-level BPE of 512 tokens that can spell any text, in lower case."""

from collections.abc import Iterator

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
MAX_TOKENS = 64
SPECIAL_TOKENS = BOS, EOS, UNK, PAD = ("<s>", "</s>", "<unk>", "<pad>")
BOS_ID, EOS_ID, UNK_ID, PAD_ID = range(len(SPECIAL_TOKENS))


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are those of the texts."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
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
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_TOKENS,
    )
