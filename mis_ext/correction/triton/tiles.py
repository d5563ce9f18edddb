"""Tiles: at most ``TILE`` consecutive tokens of one sequence, the share of one program of a kernel."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout

TILE = 512
"""Tokens per tile; a multiple of 8, so that every tile begins at a whole byte of keep bits."""

_MAX_TOKENS = 2**31 - TILE


class Tiles(NamedTuple):
    """Tiles of ``P`` pieces, as ``locate_tile`` in the kernels reads them.

    ``table`` is int32 on the device: the piece of each tile ``[num_tiles]``; then of each piece the first tile
    ``[P + 1]``, the first token ``[P + 1]``, and the first token in the whole responses ``[P]``.
    """

    table: Tensor
    num_tiles: int
    num_pieces: int


class LayoutTiles(NamedTuple):
    """Tiles of the local tokens, and where these are not all tokens, of the whole responses too.

    ``keep_byte_S`` says where the keep bits of each sequence begin, ``[S + 1]`` int32; whole bytes per sequence.
    """

    local: Tiles
    whole: Tiles | None
    keep_byte_S: Tensor | None
    num_keep_bytes: int


@functools.lru_cache(maxsize=2)
def tiles_of(layout: PackedLayout) -> LayoutTiles:
    """The tiles of ``layout``: one copy to its device, which the host does not wait for."""
    if layout.num_whole_tokens > _MAX_TOKENS:
        raise ValueError(f"the Triton backend takes at most {_MAX_TOKENS} tokens, got {layout.num_whole_tokens}")
    pieces, lengths = layout.pieces, layout.response_lengths
    local = _host_table(pieces.lengths, pieces.whole_starts)
    if layout.is_whole:
        (table,) = _to_device([local], layout.device)
        return LayoutTiles(_tiles(table, len(pieces.lengths)), None, None, 0)
    whole = _host_table(lengths, _offsets(lengths)[:-1])
    keep_bytes = _offsets((length + 7) // 8 for length in lengths)
    table, whole_table, keep_byte_S = _to_device([local, whole, keep_bytes], layout.device)
    return LayoutTiles(
        local=_tiles(table, len(pieces.lengths)),
        whole=_tiles(whole_table, len(lengths)),
        keep_byte_S=keep_byte_S,
        num_keep_bytes=keep_bytes[-1],
    )


def _host_table(lengths: Sequence[int], whole_starts: Sequence[int]) -> array[int]:
    # The lengths of a micro-batch are new in training, so this runs once per call: iterators, which are faster here
    # than small tensors.
    tiles = [(length + (TILE - 1)) // TILE for length in lengths]
    piece_of_tile = array("i", chain.from_iterable(map(repeat, range(len(tiles)), tiles)))
    return piece_of_tile + _offsets(tiles) + _offsets(lengths) + array("i", whole_starts)


def _offsets(counts: Iterable[int]) -> array[int]:
    return array("i", accumulate(counts, initial=0))


def _tiles(table: Tensor, num_pieces: int) -> Tiles:
    return Tiles(table, num_tiles=len(table) - 3 * num_pieces - 2, num_pieces=num_pieces)


def _to_device(tables: list[array[int]], device: torch.device) -> tuple[Tensor, ...]:
    host = torch.frombuffer(sum(tables[1:], tables[0]), dtype=torch.int32)
    if device.type == "cuda":
        # Pinned memory, so that the copy does not wait for the device.
        host = host.pin_memory()
    return torch.split(host.to(device, non_blocking=True), list(map(len, tables)))
