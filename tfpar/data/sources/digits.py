"""A TFDS builder for scikit-learn's bundled digits, real images that need no download."""

from collections.abc import Iterator
from typing import Any, ClassVar

import tensorflow_datasets as tfds

TEST_EVERY = 6


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,797 handwritten digits, 8x8 grey, in ten classes: 1,497 to train and 300 to test, in four shards each.

    Every sixth image (0, 6, 12, ...) in scikit-learn's order is for testing, which gives 25 to 33 test images of each
    digit. The original values 0..16 are scaled to 0..255.

    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
    https://doi.org/10.24432/C50P49; scikit-learn bundles its test part (`sklearn.datasets.load_digits`).

    >>> Digits.name
    'digits'
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "Every sixth image to test."}

    def _info(self) -> tfds.core.DatasetInfo:
        # Not `dataset_info_from_configs`: it needs files next to an installed TFDS package.
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits, 8x8 grey images, bundled with scikit-learn.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://doi.org/10.24432/C50P49",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn.datasets import load_digits  # needed once per machine, and slow to import

        digits = load_digits()
        images = (digits.images * (255 / 16)).round().astype("uint8")[..., None]
        for index, (image, label) in enumerate(zip(images, digits.target, strict=True)):
            if (index % TEST_EVERY == 0) == test:
                yield index, {"image": image, "label": int(label)}
