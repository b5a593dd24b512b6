"""Tiles on multiprocessors, padding and occupancy, by hand."""

import pytest

from fusedmlp.bench.cards import OCCUPANCY
from fusedmlp.bench.waves import best_tile, experiment, padding, quantisation


def test_one_wave_and_one_tile_more():
    # 12 x 11 tiles on 132 multiprocessors fit exactly; 12 x 12 need a second wave with 12 of 132 busy.
    full = quantisation(12 * 128, 11 * 256, (128, 256), sms=132)
    assert (full.tiles, full.waves, full.tail, full.efficiency) == (132, 1, 1.0, 1.0)
    more = quantisation(12 * 128, 12 * 256, (128, 256), sms=132)
    assert (more.tiles, more.waves) == (144, 2)
    assert more.tail == pytest.approx(12 / 132)
    assert more.efficiency == pytest.approx(144 / 264)


def test_padding_inside_tiles_counts():
    # 100 rows in a tile of 128: 100 / 128 of one tile on one multiprocessor.
    assert quantisation(100, 128, (128, 128), sms=1).efficiency == pytest.approx(100 / 128)


def test_small_results_get_small_tiles():
    assert best_tile(16384, 4096, 132)[0] == (128, 256)
    tile, filled = best_tile(1024, 1024, 132)
    assert tile == (128, 128) or tile == (64, 128)
    assert filled.efficiency > quantisation(1024, 1024, (128, 256), 132).efficiency


def test_padding():
    assert padding(768) is None
    assert padding(50257) == (50257, 50304, pytest.approx(47 / 50257))
    assert padding(1, multiple=8).padded == 8


@pytest.mark.parametrize("sms", [132, 108, 148, 4, 7])
def test_experiment_fills_waves_exactly(sms):
    sizes = experiment(sms, (128, 256))
    filled = [quantisation(M, N, (128, 256), sms) for M, N in sizes]
    assert [f.waves for f in filled[::2]] == [1, 2, 4]
    assert all(f.efficiency == 1.0 for f in filled[::2])
    assert all(f.efficiency < 1.0 for f in filled[1::2])


def test_occupancy_by_hand():
    hopper = OCCUPANCY[90]
    # 32 registers x 32 lanes x 4 warps = 4096 of 65536 registers: 16 blocks, which also fill 2048 threads.
    assert hopper.blocks_of(threads=128, registers=32, shared=0) == 16
    # 35 registers are given as 40: 5120 for a block.
    assert hopper.blocks_of(threads=128, registers=35, shared=0) == 12
    # 2 x (100 + 1) KiB fit into 228, 3 do not.
    assert hopper.blocks_of(threads=128, registers=32, shared=100 * 1024) == 2
    assert hopper.blocks_of(threads=32, registers=16, shared=0) == 32
    assert hopper.blocks_of(threads=1024, registers=128, shared=0) == 0
