"""GPUs for the tests of this folder, and the precision in which they compare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

from tests.support import gpu_machine


@pytest.fixture(scope="session")
def gpus(request: pytest.FixtureRequest) -> list[str]:
    """Return the names of at least two devices."""
    return gpu_machine.devices(stand_ins=request.config.getoption("gpu_stand_ins"))


@pytest.fixture(autouse=True)
def full_precision(gpus: list[str]) -> Iterator[None]:
    """Compute float32 without TensorFloat-32, as the bounds of parity ask for."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)
