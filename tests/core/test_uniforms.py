import numpy as np

from trimaran.core.uniforms import derive_seed, uniform


def test_draws_are_uniform_and_uncorrelated() -> None:
    draws = np.array([[uniform(derive_seed(7, s), p) for p in range(200)] for s in range(200)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    expected = draws.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 85.4  # chi², 49 dof, p = 0.001
    for a, b in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


def test_streams_differ_and_repeat() -> None:
    seeds = {derive_seed(seed, index) for seed in range(-50, 50) for index in range(50)}
    assert len(seeds) == 5000
    assert uniform(derive_seed(3, 1), 4) == uniform(derive_seed(3, 1), 4)
