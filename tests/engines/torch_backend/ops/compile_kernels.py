"""Compile every kernel for GPUs that are not here, as the launchers call it, on the shapes of real models.

Run as a program: the interpreter of the other tests and the compiler cannot share a process. Prints a line for each
kernel compiled.
"""

import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import engines.torch_backend  # noqa: F401 - before transformers, which imports torchvision
from engines.torch_backend.ops.registry import Site, discover
from tests.factories_torch import make_text_config

#: An H200 (sm_90) in every precision; what needs most memory on an A100, an L4 and an RTX 50, too.
GENERATIONS: dict[int, tuple[torch.dtype, ...]] = {
    90: (torch.bfloat16, torch.float16, torch.float32),
    80: (torch.float32,),
    89: (torch.float32,),
    120: (torch.float32,),
}
LEAST_SHARED = 99 * 1024  #: bytes that a program has on any of these, on sm_89 and sm_120
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
#: LLaVA-1.5-7B's decoder, one with grouped heads, and one with wide heads
SHAPES: dict[str, dict[str, Any]] = {
    "7b": {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "hidden_size": 4096},
    "grouped": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 4096},
    "wide": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "hidden_size": 2560},
}


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_for(
    capability: int, self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any
) -> None:
    """What `JITFunction.run` would launch."""
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
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.asm["cubin"], "no machine code"
    shared = compiled.metadata.shared
    assert shared <= LEAST_SHARED, f"{self.__name__} wants {shared} bytes of shared memory"
    print(self.__name__, shared, "bytes shared")


def main() -> None:
    for capability, dtypes in GENERATIONS.items():

        def run(self: Any, *args: Any, capability: int = capability, **options: Any) -> None:
            compile_for(capability, self, *args, **options)

        JITFunction.run = run
        for (name, shape), dtype in product(SHAPES.items(), dtypes):
            text = make_text_config(intermediate_size=11008, **shape)
            site = Site(torch.device("cpu"), dtype, text, 16, interprets=True)
            print(f"# sm_{capability}, {name}, {dtype}", flush=True)
            for op in discover():
                for candidate in op.candidates:
                    if candidate.name == "triton":
                        op.example(candidate.build(site), site)


if __name__ == "__main__":
    sys.exit(main())
