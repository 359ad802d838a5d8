"""Keras' tests that cannot pass under tfpar, each kind with its error and the reason."""

from __future__ import annotations

import fnmatch
import re
from typing import NamedTuple


class Expected(NamedTuple):
    """A kind of test that is not expected to pass.

    Args:
        tests: A pattern of names, such as `trainers/*::test_fit_*`.
        message: A regular expression for the refusal, or for what the test ends with.
        reason: One sentence.
        strategies: Those under which it is expected.
    """

    tests: str
    message: str
    reason: str
    strategies: tuple[str, ...] = ("single_device", "mirrored", "pipeline")


REPLICAS, STAGES = ("mirrored",), ("pipeline",)

EXPECTED = [
    Expected(
        "*",
        r"overrides (train|test|predict)_step, which takes it whole",
        "Stages take a model apart, so that a step of its own cannot run.",
        STAGES,
    ),
    Expected(
        "*::test_warning_for_mismatched_inputs_structure",
        r"AssertionError: \d != 1",
        "The test counts a warning that Keras gives when it traces a model, and a strategy traces it more than once.",
    ),
    Expected(
        "*::test_swap_ema_weights_with_tf_distribute",
        r"AssertionError: 2\d\.\d{4,} != 2\d\.\d{4,}",
        "The test demands the same bits of a model on two replicas and of its copy, which runs on one device here.",
        ("single_device", "pipeline"),
    ),
    Expected(
        "*::test_fit_sparse_*",
        r"AssertionError: False is not true",
        "The test looks for sparse gradients in Keras' assign_sub, and a fused kernel updates the rows in its place.",
    ),
    Expected(
        "*::test_required_none_raises_in_fit",
        r"A batch must hold at least one tensor",
        "The refusal comes before Keras' own, which the test expects.",
    ),
    Expected(
        "*::test_distributed_datasets_from_function_model_integration",
        r"received a DistributedDataset of tf\.distribute",
        "A dataset that tf.distribute has split already has no global batches.",
    ),
    Expected(
        "*::test_nested_inputs",
        r"Tuples differ: \(6, 2\) != \(3, 2\)",
        "The test calls predict_on_batch, which stays Keras' own and predicts each example once per replica.",
        REPLICAS,
    ),
    Expected(
        "*",
        r"a model that overrides compute_loss cannot have regularizers or losses from add_loss",
        "How a compute_loss of a model's own combines added losses is not known, and they arise in other stages.",
        STAGES,
    ),
    Expected(
        "*",
        r"must apply the same operations in training and in inference",
        "Stages hold one list of operations, and `if training` outside of a layer makes two.",
        STAGES,
    ),
    Expected(
        "*",
        r"reads the weight .* outside of a layer",
        "A stage holds the weights of its layers; a weight of the model itself belongs to none.",
        STAGES,
    ),
    Expected(
        "layers/preprocessing/image_preprocessing/*",
        r"must compute each example alone, .* received '(cut_mix|mix_up|equalization|rand_augment|aug_mix)",
        "CutMix, MixUp and, in Keras 3.15, Equalization compute an example from the others of its batch; RandAugment "
        "and AugMix may choose Equalization.",
        (*REPLICAS, *STAGES),
    ),
    Expected(
        "layers/preprocessing/image_preprocessing/aug_mix_test.py::*",
        r"received 'aug_mix.*, which draws from NumPy or Python",
        "In Keras 3.15 AugMix chooses its operations with Python's random numbers, when it is traced.",
        (*REPLICAS, *STAGES),
    ),
    Expected(
        "layers/preprocessing/*/random_posterization_test.py::*",
        r"must compute each example alone, .* received 'random_posterization",
        "The test gives values outside of value_range; negative ones become other uint8 numbers in a smaller batch.",
        (*REPLICAS, *STAGES),
    ),
    Expected(
        "layers/preprocessing/*/random_flip_test.py::*",
        r"must compute each example alone, .* received '(mocked_)?random_flip",
        "The test flips one image without an axis of examples, and so the rows that replicas would share.",
        (*REPLICAS, *STAGES),
    ),
    Expected(
        "layers/preprocessing/mel_spectrogram_test.py::*",
        r"must run on any number of examples, and 'mel_spectrogram",
        "The test gives one signal without an axis of examples.",
        (*REPLICAS, *STAGES),
    ),
    Expected(
        "layers/normalization/spectral_normalization_test.py::*",
        r"only the optimizer can change a trained weight",
        "SpectralNormalization assigns a weight in each call, and each micro-batch would assign it again.",
        STAGES,
    ),
]


def reason(strategy: str, test: str, messages: list[str]) -> str | None:
    """Return why a test may end as it does; None where nothing on the list says so.

    Args:
        strategy: Its name.
        test: Its name.
        messages: The refusals, and what the test ended with.
    """
    for expected in EXPECTED:
        is_meant = strategy in expected.strategies and fnmatch.fnmatchcase(test, expected.tests)
        if is_meant and any(re.search(expected.message, message) for message in messages):
            return expected.reason
    return None
