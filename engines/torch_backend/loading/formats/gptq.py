"""GPTQ: integers of 4 or 8 bits, packed along the inputs, which can be grouped by activation order (`desc_act`).

Layout: `qweight` (K bits / 32, N), `qzeros` (G, N bits / 32), `scales` (G, N), `g_idx` (K,), the group of each input.
The format `gptq` stores zero points minus one, `gptq_v2` unchanged.
Source: AutoGPTQ and GPTQModel.
"""

from engines.packages.checkpoint_json import Fields
from engines.torch_backend.loading.formats.reader import (
    Integers,
    Layout,
    Reader,
    StoredLinear,
    input_order,
    read_group_size,
    unpack_words,
)

_ONES = {4: 0x11111111, 8: 0x01010101}  #: words in which each integer is 1, by bits per integer


class GptqReader(Reader):
    marker = ("qweight",)
    part_names = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, config: Fields) -> None:
        self._bits = config.whole("bits", 4, at_most=8)
        if self._bits not in _ONES:
            raise config.refuse("bits", f"is {self._bits}; GPTQ is supported with 4 or 8 bits")
        self._group_size = read_group_size(config)
        name = "format" if config.get("checkpoint_format") is None else "checkpoint_format"
        self._is_v1 = config.one_of(name, ("gptq", "gptq_v2"), "gptq") == "gptq"
        self._is_ordered = config.flag("desc_act", False)
        self._is_symmetric = config.flag("sym", True)
        self.name = f"GPTQ of {self._bits} bits"

    def layout(self, linear: StoredLinear) -> Layout:
        per_word = 32 // self._bits
        num_words, num_outputs = linear.expect_matrix("qweight", "I32")
        num_inputs = num_words * per_word
        size = num_inputs if self._group_size == -1 else self._group_size
        num_groups = -(-num_inputs // size)
        linear.expect("scales", (num_groups, num_outputs), "F16", "BF16", "F32")
        linear.expect("qzeros", (num_groups, -(-num_outputs // per_word)), "I32")
        if self._is_ordered or "g_idx" in linear.parts:
            linear.expect("g_idx", (num_inputs,), "I32", "I64")
        return Layout((num_outputs, num_inputs), self._bits, size, self._is_symmetric)

    def read(self, linear: StoredLinear) -> Integers:
        """The integers of a layer, with the inputs of each group contiguous."""
        layout = self.layout(linear)
        values = unpack_words(linear.read("qweight").t(), self._bits)
        zeros = linear.read("qzeros")
        # Packers subtract 1 from all integers of a word at once. Adding to whole words undoes the borrows too.
        zeros = unpack_words(zeros + _ONES[self._bits] if self._is_v1 else zeros, self._bits)
        zero = zeros[:, : layout.shape[0]]
        is_middle = bool((zero == 2 ** (self._bits - 1)).all())
        if self._is_symmetric and not is_middle:
            raise linear.refuse("qzeros", "has asymmetric zero points, but sym is true")
        order = input_order(linear, "g_idx", layout)
        return Integers(
            values if order is None else values[:, order],
            self._bits,
            layout.group_size,
            linear.read("scales").float(),
            None if is_middle else zero.float(),
            order,
        )
