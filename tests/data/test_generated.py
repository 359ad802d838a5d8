"""Generated rows depend on their number alone, follow their truth, and are never the validation rows."""

import numpy as np
import pytest
from conftest import epoch

from tfpar import config
from tfpar.data import load
from tfpar.data.sources.synthetic import regression, truth


def rows(num_examples: int, **keywords: object) -> tuple[np.ndarray, np.ndarray]:
    settings = {"num_features": 10, "noise": 0.1, "global_batch_size": 32, "seed": 1, **keywords}
    batches = epoch(regression(num_examples, **settings))
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def test_a_row_is_the_same_whatever_the_batch_size_and_the_range() -> None:
    x, y = rows(1000)
    for found_x, found_y in [rows(1000, global_batch_size=77), rows(1000, global_batch_size=5000)]:
        np.testing.assert_array_equal(found_x, x)
        np.testing.assert_allclose(found_y, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows(10, first_row=500)[0], x[500:510])


def test_shuffled_epochs_hold_the_same_rows_in_another_order() -> None:
    x, _ = rows(1000, global_batch_size=4)
    shuffled, _ = rows(1000, global_batch_size=4, shuffle=True)
    assert not np.array_equal(shuffled, x)
    np.testing.assert_array_equal(np.sort(shuffled[:, 0]), np.sort(x[:, 0]))


def test_least_squares_finds_the_true_weights_and_noise() -> None:
    x, y = rows(20_000, noise=0.5)
    solution, residuals, *_ = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)
    weights, bias = truth(10, seed=1)
    np.testing.assert_allclose(solution[:, 0], [*weights, bias], atol=0.02)
    np.testing.assert_allclose(np.sqrt(residuals / len(x)), 0.5, rtol=0.02)
    np.testing.assert_allclose([x.mean(), x.std()], [0, 1], atol=0.01)


def test_without_noise_the_truth_is_exact_and_seeds_differ() -> None:
    x, y = rows(100, noise=0.0)
    weights, bias = truth(10, seed=1)
    np.testing.assert_allclose(y[:, 0], x @ weights + bias, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(rows(100, seed=2)[0], x)


def test_validation_rows_are_no_training_rows() -> None:
    loaded = load(config.Data(source="generated", num_examples=1000, num_features=3), global_batch_size=64, seed=0)
    train = {row.tobytes() for x, _ in epoch(loaded.train) for row in x}
    validation = [row.tobytes() for x, _ in epoch(loaded.validation) for row in x]
    assert len(train) == loaded.num_train_examples == 1000
    assert len(validation) == 100
    assert not train.intersection(validation)
    assert (loaded.num_classes, loaded.input_shape) == (None, (3,))


def test_augmentation_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"remove data\.augmentation"):
        load(config.Data(source="generated", augmentation=("flip",)), global_batch_size=4, seed=1)
