"""Published quantization formats: one reader each, selected by `quantization_config` of `config.json`.

A reader finds the layout of each quantized linear layer in the checkpoint's headers, and loads one layer at a time, as
integers for our kernels or as floats. An unsupported layer is refused with its name and the reason.
"""

from collections.abc import Callable

from engines.packages.checkpoint_json import Fields, shown
from engines.torch_backend.loading.formats.awq import AwqReader
from engines.torch_backend.loading.formats.compressed_tensors import CompressedTensorsReader
from engines.torch_backend.loading.formats.fp8 import Fp8Reader
from engines.torch_backend.loading.formats.gguf import GgufReader
from engines.torch_backend.loading.formats.gptq import GptqReader
from engines.torch_backend.loading.formats.reader import Reader

#: by `quant_method`
READERS: dict[str, Callable[[Fields], Reader]] = {
    "gptq": GptqReader,
    "awq": AwqReader,
    "compressed-tensors": CompressedTensorsReader,
    "fp8": Fp8Reader,
    "fbgemm_fp8": Fp8Reader,
    "gguf": GgufReader,
}

#: Why other formats cannot be read. Transformers needs libraries for them that are not installed.
_REASONS = {
    "bitsandbytes": "there is no kernel for its 4-bit numbers",
    "torchao": "its tensors are laid out by the library",
    "hqq": "the installed transformers does not load it",
    "quanto": "its weights are classes of its library",
    **dict.fromkeys(("aqlm", "vptq", "quip"), "its weights are indices into code books"),
    "eetq": "its integers are laid out for CUDA kernels of its library",
    "spqr": "its outliers are sparse",
    "mxfp4": "there is no kernel for 4-bit numbers with shared exponents",
    "vlm-fleet": "only release 0.1 reads it",
    "bitnet": "its activations are in 8 bits and its weights in less than 2",
}


def detect(config: Fields) -> Reader | None:
    """The reader of a checkpoint by its `config.json`; None if its weights are not quantized.

    Raises: UnsupportedCheckpoint for formats, and for settings of a format, that cannot be read.
    """
    section = config.section("quantization_config")
    if not section.values and isinstance(config.get("text_config"), dict):
        section = config.section("text_config").section("quantization_config")
    if not section.values:
        return None
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        known = ", ".join(sorted(READERS))
        reason = _REASONS.get(method) if isinstance(method, str) else None
        raise section.refuse(
            "quant_method",
            f"{shown(method)} cannot be read{f', as {reason}' if reason else ''}; supported: {known}. "
            "Or use the full-precision checkpoint with --quantization int8 or int4",
        )
    return READERS[method](section)
