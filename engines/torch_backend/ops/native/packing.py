"""Packs integer weights for `integer_linear.cpp`, and unpacks them.

A block has the weights of 16 outputs (a tile) and one group of inputs. Incomplete tiles and groups are padded with
zeros. Strips of tiles are packed one at a time, to limit temporary memory.

Shape letters: K inputs, N outputs, G groups of inputs, P outputs padded to whole tiles.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 16
INT8_GROUP = 64  #: inputs whose activations share a scale, for int8 weights
_STRIP_TILES = 16


def pack_int8(integers: Tensor) -> Tensor:
    """Shapes: int8 (N, K); returns uint8 (tiles, G, bytes of a block)."""
    num_outputs, num_inputs = integers.shape
    num_groups = -(-num_inputs // INT8_GROUP)
    blocks = _new_blocks(num_outputs, num_groups, TILE * INT8_GROUP)
    for tiles, rows in _strips(integers):
        padded = _pad(rows.view(torch.uint8), num_groups * INT8_GROUP)
        quads = padded.view(-1, TILE, num_groups, INT8_GROUP // 4, 4)
        blocks[tiles] = quads.permute(0, 2, 3, 1, 4).flatten(2)
    return blocks


def unpack_int8(blocks: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """Inverse of `pack_int8`. Shapes: returns int8 (N, K)."""
    quads = blocks.view(*blocks.shape[:2], INT8_GROUP // 4, TILE, 4)
    rows = quads.permute(0, 3, 1, 2, 4).reshape(blocks.shape[0] * TILE, -1)
    return rows[:num_outputs, :num_inputs].contiguous().view(torch.int8)


def pack_int4(integers: Tensor, scale_zero: Tensor) -> Tensor:
    """Shapes: (N, G, K / G), values 0..15; scale_zero (G, N, 2), floats; returns (tiles, G, bytes of a block)."""
    _, num_groups, group = integers.shape
    scale_bytes = 2 * TILE * scale_zero.dtype.itemsize
    blocks = _new_blocks(integers.shape[0], num_groups, scale_bytes + TILE * group // 2)
    numbers = scale_zero.transpose(0, 1)  # (N, G, 2)
    for tiles, rows in _strips(integers.flatten(1)):
        quads = _pad(rows, rows.shape[1]).view(-1, TILE, num_groups, group // 8, 2, 4)
        quads = quads.permute(0, 2, 3, 4, 1, 5)  # (tiles, G, eights, halves, TILE, 4)
        blocks[tiles, :, scale_bytes:] = (quads[:, :, :, 0] | (quads[:, :, :, 1] << 4)).flatten(2)
        part = numbers[tiles.start * TILE : tiles.stop * TILE].reshape(-1, num_groups * 2)
        part = _pad(part, part.shape[1]).view(-1, TILE, num_groups, 2).permute(0, 2, 3, 1)
        blocks[tiles, :, :scale_bytes] = part.contiguous().view(torch.uint8).flatten(2)
    return blocks


def unpack_int4(
    blocks: Tensor, num_outputs: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_int4`. Shapes: returns uint8 (N, G, K / G), `dtype` (G, N, 2)."""
    num_tiles, num_groups, _ = blocks.shape
    scale_bytes = 2 * TILE * dtype.itemsize
    numbers = blocks[:, :, :scale_bytes].contiguous().view(dtype)
    numbers = numbers.view(num_tiles, num_groups, 2, TILE).permute(1, 0, 3, 2)
    scale_zero = numbers.reshape(num_groups, -1, 2)[:, :num_outputs].contiguous()
    both = blocks[:, :, scale_bytes:].reshape(num_tiles, num_groups, group // 8, 1, TILE, 4)
    quads = torch.cat([both & 15, both >> 4], dim=3).permute(0, 4, 1, 2, 3, 5)
    return quads.reshape(-1, num_groups, group)[:num_outputs], scale_zero


def _new_blocks(num_outputs: int, num_groups: int, num_bytes: int) -> Tensor:
    return torch.empty(-(-num_outputs // TILE), num_groups, num_bytes, dtype=torch.uint8)


def _strips(rows: Tensor) -> list[tuple[slice, Tensor]]:
    """Ranges of tiles, and the rows of their outputs."""
    num_tiles = -(-rows.shape[0] // TILE)
    return [
        (
            slice(start, min(start + _STRIP_TILES, num_tiles)),
            rows[start * TILE : (start + _STRIP_TILES) * TILE],
        )
        for start in range(0, num_tiles, _STRIP_TILES)
    ]


def _pad(rows: Tensor, width: int) -> Tensor:
    """Pad with zeros to whole tiles and to a width. Shapes: (n, k); returns (P, width)."""
    missing = -rows.shape[0] % TILE
    return F.pad(rows, (0, width - rows.shape[1], 0, missing))
