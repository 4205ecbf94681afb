from itertools import pairwise

import pytest

from trainer.data.shuffle import shuffled_index


def order(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return [shuffled_index(index, size=size, seed=seed, epoch=epoch) for index in range(size)]


def test_every_size_is_permuted() -> None:
    for size in [*range(1, 130), 255, 256, 257, 1000, 4097]:
        assert sorted(order(size, seed=size)) == list(range(size)), size


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = [order(100, seed=seed, epoch=epoch) for seed in range(5) for epoch in range(5)]
    assert len({tuple(each) for each in orders}) == 25
    assert order(100, seed=1, epoch=2) == order(100, seed=1, epoch=2)


def test_every_position_is_about_equally_likely() -> None:
    size = 12
    epochs = 3000
    counts = [[0] * size for _ in range(size)]
    for epoch in range(epochs):
        for index, position in enumerate(order(size, epoch=epoch)):
            counts[index][position] += 1
    flat = [count for each in counts for count in each]
    # Binomial: mean 250, standard deviation 15.1; 144 of them.
    assert 190 < min(flat) <= max(flat) < 310


def test_neighbors_rarely_stay_neighbors() -> None:
    positions = order(10_000)
    assert sum(abs(a - b) == 1 for a, b in pairwise(positions)) < 20


def test_an_index_out_of_range_raises() -> None:
    with pytest.raises(ValueError, match=r"index = 5 is not in range\(5\)"):
        shuffled_index(5, size=5, seed=0, epoch=0)
