"""Readers of published quantization formats, selected by `quantization_config` of `config.json`.

A reader finds the layout of each quantized linear layer in the checkpoint's headers. It loads one layer at a time, as
integers for our kernels or as floats. An unsupported layer is refused with its name and the reason.
"""

from collections.abc import Callable

from engines.packages.checkpoint_json import Fields, quantization_section, shown
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


def detect(config: Fields) -> Reader | None:
    """The reader for a `config.json`; None if it has no quantization. Raises: UnsupportedCheckpoint."""
    section = quantization_section(config)
    if not section.values:
        return None
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        known = ", ".join(sorted(READERS))
        raise section.refuse(
            "quant_method",
            f"{shown(method)} is not supported; use a checkpoint in one of {known}, or the "
            "full-precision checkpoint with --quantization int8 or int4",
        )
    return READERS[method](section)
