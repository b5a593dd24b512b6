"""Wave quantisation: a GPU runs as many tiles at once as it has multiprocessors, and the last wave may be almost empty.

With T tiles on S multiprocessors that each take one at a time, a product takes ceil(T / S) waves and would need T / S:
132 tiles on 132 multiprocessors are one wave, 133 are two, with half of the second half of the time idle. The same for
what is padded: a dimension that is no multiple of the tile pays for the whole tile.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

# Tiles of cuBLAS's and Triton's 16-bit kernels on tensor cores, largest first.
USUAL_TILES = ((128, 256), (128, 128), (64, 128), (64, 64))
# Tensor cores read 16 bytes at a time, so rows that are multiples of 8 16-bit values; full speed wants 64 (128 bytes,
# a cache line). NVIDIA, "Matrix Multiplication Background User's Guide".
ALIGNMENT = 64


@dataclass(frozen=True)
class Quantisation:
    """How the tiles of a product fill a GPU.

    Attributes:
        tiles: how many there are.  waves: rounds that they take.
        tail: share of the multiprocessors that the last wave uses, 0 to 1.
        efficiency: useful share of the tile slots that the waves have, padding included: 1 is perfect.
    """

    tiles: int
    waves: int
    tail: float
    efficiency: float


def quantisation(M: int, N: int, tile: tuple[int, int], sms: int) -> Quantisation:
    """How an (M, N) result in tiles of `tile` fills `sms` multiprocessors that take one tile at a time."""
    rows, columns = math.ceil(M / tile[0]), math.ceil(N / tile[1])
    tiles = rows * columns
    waves = math.ceil(tiles / sms)
    tail = (tiles - (waves - 1) * sms) / sms
    return Quantisation(tiles, waves, tail, M * N / (waves * sms * tile[0] * tile[1]))


def best_tile(M: int, N: int, sms: int) -> tuple[tuple[int, int], Quantisation]:
    """The usual tile with which an (M, N) result takes the least time, and how it fills the GPU.

    Smaller tiles fill it better but read their operands more often: per element of the result a tile of m x n reads
    1 / m + 1 / n values for each step, which is counted against it as far as it exceeds the largest tile's.
    """
    reads = [1 / m + 1 / n for m, n in USUAL_TILES]
    options = [(tile, quantisation(M, N, tile, sms)) for tile in USUAL_TILES]
    costs = [(reads[i] / reads[0]) ** 0.25 / options[i][1].efficiency for i in range(len(options))]
    return options[costs.index(min(costs))]


class Padding(NamedTuple):
    """A dimension to pad: from, to, and the share of work that this adds."""

    size: int
    padded: int
    added: float


def padding(size: int, multiple: int = ALIGNMENT) -> Padding | None:
    """What padding `size` to a multiple costs; None where it is one already."""
    padded = math.ceil(size / multiple) * multiple
    return None if padded == size else Padding(size, padded, padded / size - 1)


def experiment(sms: int, tile: tuple[int, int] = (128, 256)) -> list[tuple[int, int]]:
    """(M, N) of results that just fill 1, 2 and 4 waves of `sms` tiles, and each of them a column of tiles wider."""
    rows = max(r for r in range(1, math.isqrt(sms) + 1) if sms % r == 0)
    columns = sms // rows
    return [(rows * tile[0], n * tile[1]) for k in (1, 2, 4) for n in (k * columns, k * columns + 1)]
