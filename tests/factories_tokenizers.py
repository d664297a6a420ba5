"""Small tokenizers of the kinds in LLaVA checkpoints, in directories that transformers can read."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from benchmarks.make_checkpoint import make_checkpoint

CORPUS = [
    "How many shapes are there in the image? Describe what you see, please.",
    "USER: ASSISTANT: What color is the star? It is red, and the ring is blue.",
    "The quick brown fox jumps over the lazy dog </s> <image> <s> 1234567890",
] * 4
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def _trained_sentencepiece() -> str:
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *BYTE_TOKENS],
        show_progress=False,
        initial_alphabet=list("▁<>/"),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def make_sentencepiece(
    directory: Path, *, prepend: str = "first", normalized: bool = False
) -> Path:
    """Writes a tokenizer like LLaMA 2's. `prepend`: `first` or `always` (Metaspace), or `normalizer` (oldest files)."""
    make_checkpoint("tiny", directory)
    content = json.loads(_trained_sentencepiece())
    content["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if prepend == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=normalized) for t in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<image>", "<pad>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    change_json(directory / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", legacy=False)
    token_id = tokenizer.token_to_id("<image>")
    text = {"vocab_size": tokenizer.get_vocab_size(with_added_tokens=True)}
    change_json(directory / "config.json", image_token_index=token_id, text_config=text)
    return directory


def make_byte_level(directory: Path, **tokenizer_config: Any) -> Path:
    """Writes a small tokenizer like LLaMA 3's."""
    make_checkpoint("tiny", directory)
    change_json(directory / "tokenizer_config.json", **tokenizer_config)
    return directory


def change_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    for name, value in changes.items():
        inner = content.get(name)
        content[name] = (
            inner | value if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    file.write_text(json.dumps(content))


def image_token_id(directory: Path) -> int:
    return json.loads((directory / "config.json").read_text())["image_token_index"]


TOKENIZERS: dict[str, Callable[[Path], Path]] = {
    "byte-level": make_byte_level,
    **{
        prepend: partial(make_sentencepiece, prepend=prepend)
        for prepend in ("first", "always", "normalizer")
    },
}
