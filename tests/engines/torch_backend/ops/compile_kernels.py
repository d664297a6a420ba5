"""Compile every kernel for an H200 (sm_90), without one: as the launchers call it, on the shapes of real models.

Run as a program: the interpreter of the other tests and the compiler cannot share a process. Prints a line for each
kernel compiled.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import engines.torch_backend  # noqa: F401 - before transformers, which imports torchvision
from engines.torch_backend.ops.registry import Site, discover
from tests.factories_torch import make_text_config

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages")
#: LLaVA-1.5-7B's decoder, and one with grouped heads
SHAPES: dict[str, dict[str, Any]] = {
    "7b": {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "hidden_size": 4096},
    "grouped": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 4096},
}


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
    """Stands for `JITFunction.run`."""
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    names = [name for name in self.arg_names if name not in constants]
    signature = {name: type_of(value) for name, value in zip(names, args, strict=True)}
    signature = {name: signature.get(name, "constexpr") for name in self.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, value in enumerate(args)
        if isinstance(value, torch.Tensor)
        or (isinstance(value, int) and value % 16 == 0 and names[place] != "table_width")
    }
    source = ASTSource(self, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    assert compiled.asm["cubin"], "no machine code"
    print(self.__name__, compiled.metadata.shared, "bytes shared")


def main() -> None:
    JITFunction.run = compile_instead
    for name, shape in SHAPES.items():
        text = make_text_config(intermediate_size=11008, **shape)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for kv_dtype in ("auto", "int8"):
                site = Site(torch.device("cpu"), dtype, text, 16, kv_dtype, interprets=True)
                print(f"# {name}, {dtype}, {kv_dtype}", flush=True)
                for op in discover():
                    for candidate in op.candidates:
                        if candidate.name == "triton":
                            op.example(candidate.build(site), site)


if __name__ == "__main__":
    sys.exit(main())
