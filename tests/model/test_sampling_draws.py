import numpy as np
import pytest

from equipoise_model.sampling_draws import philox, uniforms


def words(*values):
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_reproduces_its_authors_known_answers(counter, key, expected):
    assert tuple(int(word[0]) for word in philox(words(*counter), key=words(*key))) == expected


def test_numbers_depend_on_seed_position_and_stream_alone():
    seeds, positions = [5, 2**64 - 1, 0, 5], [0, 7, 2**40, 1]
    together = uniforms(seeds, positions)
    alone = [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    assert uniforms(seeds, positions, stream=1).tolist() != alone


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_uniform(along):
    count = 100_000
    numbers, zeros = list(range(count)), [3] * count
    drawn = uniforms(zeros, numbers) if along == "positions" else uniforms(numbers, zeros)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # 100 bins: chi-squared with 99 degrees of freedom is below 160 but once in 10,000 times.
    bins = np.histogram(drawn, bins=100, range=(0, 1))[0]
    assert ((bins - count / 100) ** 2 / (count / 100)).sum() < 160
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.015
