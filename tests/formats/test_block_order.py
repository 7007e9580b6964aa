"""Block orders: a permutation with padding, at the positions the index formulas give."""

import numpy as np
import pytest

from moedecode import InvalidInput
from moedecode.formats import hidden_order, intermediate_order
from moedecode.formats.block_order import intermediate_lanes

HIDDEN = (512, 1024, 3072)
INTERMEDIATE = (
    1,  # one column on two lanes
    9,  # four lanes, where a quarter would be three
    13,  # odd, less than a block
    64,  # L = 16 lanes, no padding
    80,  # a partly filled block: 20 lanes of 24
    192,
    256,
    511,  # odd, one short of a tile
    512,  # exactly one tile
    513,  # one column in the second tile
    521,  # nine columns in the second tile
    640,  # a full tile and a quarter
    2880,  # five tiles and 320 columns
)


def assert_each_natural_index_once(order, size: int) -> None:
    real = order.gather[order.gather >= 0]
    assert sorted(real.tolist()) == list(range(size))
    assert set(order.gather[order.gather < 0].tolist()) <= {-1}
    assert order.size == size and order.positions == len(order.gather) and order.positions % 32 == 0


@pytest.mark.parametrize("hidden", HIDDEN)
def test_trainium_hidden_order(hidden):
    order = hidden_order("trainium", hidden)
    assert_each_natural_index_once(order, hidden)
    position = np.argsort(order.gather)
    for h in range(hidden):  # the hidden formula of the layout, read from natural index to place
        q, t, p = h // (hidden // 4), h % (hidden // 4) // 128, h % 128
        assert position[h] == 512 * t + 4 * p + q


@pytest.mark.parametrize("hidden", HIDDEN)
def test_trainium_hidden_blocks_are_eight_partitions_by_four_quads(hidden):
    blocks = hidden_order("trainium", hidden).gather.reshape(-1, 32)
    for n, block in enumerate(blocks):
        t, b = n // 16, n % 16
        want = {q * (hidden // 4) + 128 * t + 8 * b + j for q in range(4) for j in range(8)}
        assert set(block.tolist()) == want


@pytest.mark.parametrize("intermediate", INTERMEDIATE)
def test_trainium_intermediate_order(intermediate):
    order = intermediate_order("trainium", intermediate)
    assert_each_natural_index_once(order, intermediate)
    lanes = 128 if intermediate >= 512 else 8 * -(-intermediate // 32)
    assert intermediate_lanes(intermediate) == lanes
    assert order.positions == 4 * lanes * -(-intermediate // 512)
    for i in range(intermediate):
        t, r = divmod(i, 512)
        used = 2 * -(-min(512, intermediate - 512 * t) // 8)
        q, p = divmod(r, used)
        assert order.gather[4 * lanes * t + 4 * p + q] == i


@pytest.mark.parametrize("size", [1, 31, 32, 33, 90, 2880])
def test_contiguous_order_is_natural_with_padding_at_the_end(size):
    for order in (hidden_order("contiguous", size), intermediate_order("contiguous", size)):
        assert_each_natural_index_once(order, size)
        assert order.gather[:size].tolist() == list(range(size))
        assert order.positions == -(-size // 32) * 32


@pytest.mark.parametrize("intermediate", INTERMEDIATE)
def test_apply_moves_values_and_zeroes_the_padding(intermediate):
    order = intermediate_order("trainium", intermediate)
    values = np.arange(1, 2 * intermediate + 1, dtype=np.float32).reshape(2, intermediate)
    moved = order.apply(values)
    assert moved.shape == (2, order.positions) and moved.dtype == np.float32
    assert (moved[:, order.gather < 0] == 0).all()
    back = np.empty_like(values)
    back[:, order.gather[order.gather >= 0]] = moved[:, order.gather >= 0]
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("hidden", [256, 2880, 500])
def test_trainium_hidden_needs_a_multiple_of_512(hidden):
    with pytest.raises(InvalidInput, match=f"hidden={hidden}: must be a multiple of 512"):
        hidden_order("trainium", hidden)


def test_unknown_order_is_named():
    with pytest.raises(InvalidInput, match=r"block_order='diagonal'.*contiguous, trainium"):
        hidden_order("diagonal", 512)
    with pytest.raises(InvalidInput, match=r"block_order='diagonal'.*contiguous, trainium"):
        intermediate_order("diagonal", 512)
