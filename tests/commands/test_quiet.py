"""Scripts show their own output and errors, without TensorFlow's start-up messages and reports."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import ROOT
from tfpar.messages import tensorflow_log

STARTUP = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795358897.883074   21098 port.cc:153] oneDNN custom operations are on. You may see",
    "I0000 00:00:1795358897.883383   21098 cudart_stub.cc:31] Could not find cuda drivers on your machine",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate "
    "compiler flags.",
    "I0000 00:00:1795358590.072781   10503 coordination_service.cc:221] Initializing CoordinationService",
    "I0000 00:00:1795358590.169840   10931 coordination_service.h:529] /job:worker/replica:0/task:0 has connected",
    "E0000 00:00:1700000000.000001     123 cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting to register",
]
KEPT = [
    "E0000 00:00:1795358864.370111   19311 gpu_device.cc:12] Out of memory",
    "F0000 00:00:1795358864.370111   19311 cpu_feature_guard.cc:99] The TensorFlow library was compiled to use AVX",
    "E0000 00:00:1795358864.370111   19311 coordination_service.cc:99] Task is unhealthy",
    "WARNING:root:port.cc:153] mine",
    "Traceback (most recent call last):",
]


@pytest.mark.parametrize("line", STARTUP)
def test_a_start_up_message_is_known(line: str) -> None:
    assert tensorflow_log.is_startup_message(line)


@pytest.mark.parametrize("line", KEPT)
def test_errors_and_other_lines_stay(line: str) -> None:
    assert not tensorflow_log.is_startup_message(line)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_driver_that_fails_is_an_error_where_there_is_a_gpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorflow_log, "_has_gpu", lambda: has_gpu)
    line = "E0000 00:00:1795358864.370111   19311 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error"
    assert tensorflow_log.is_startup_message(line) is not has_gpu


def test_steps_of_replicas_that_run_eagerly_are_reported_once(logical_cpus: list[str]) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tensorflow")
    logger.addHandler(handler)
    for _ in range(3):
        logger.warning("Using MirroredStrategy eagerly has significant overhead currently. We will be working on it")
    logger.warning("another")
    logger.removeHandler(handler)
    assert len(said) == 2
    assert said[1] == "another"


def test_buffered_lines_are_printed_also_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        os.write(2, f"{STARTUP[0]}\nfrom native code\n{STARTUP[1]}\n".encode())
        raise ImportError("no module")

    with pytest.raises(ImportError, match="no module"), tensorflow_log.without_startup_messages():
        write()
    assert capfd.readouterr().err == "from native code\n"


TRAINS = """
import numpy as np


def build():
    hidden = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def batches():
    yield from ((inputs[row : row + 8], inputs[row : row + 8].sum(1)) for row in range(0, 40, 8))


inputs = np.random.default_rng(0).normal(size=(45, 8)).astype("float32")
tfpar.use_logical_cpus(2)
for strategy in (tfpar.SingleDevice(), tfpar.Mirrored(), tfpar.Pipeline(2, 2)):
    trainer = tfpar.Trainer(build, strategy, seed=0)
    trainer.fit(inputs, inputs.sum(1), batch_size=16, epochs=2, verbose=0, validation_split=0.2)
    for rows in num_rows:
        trainer.evaluate(inputs[:rows], inputs[:rows].sum(1), verbose=0)
        trainer.predict(inputs[:rows], verbose=0)
    trainer.fit(batches(), verbose=0)
    trainer.save("model.keras")
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = build()
tfpar.fit(model, inputs, inputs.sum(1), verbose=0)
"""
PLOTS = """
import sys

plotting = {"matplotlib.pyplot", "sklearn"}
print("after training:", sorted({"matplotlib", *plotting} & sys.modules.keys()))
from keras.wrappers import SKLearnClassifier
from keras.wrappers import *
print(SKLearnClassifier.__name__)
print(keras.wrappers.SKLearnRegressor.__name__)
print(keras.visualization.plot_image_gallery.__name__)
print("after use:", sorted(plotting & sys.modules.keys()))
try:
    keras.visualization.nothing
except AttributeError as error:
    print(str(error)[-22:])
print("draw_bounding_boxes" in dir(keras.visualization))
"""
COUNTS = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase) if "keras" in sys.modules else None)
import tfpar, tensorflow as tf, keras
print("collections:", len(collections), gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects()))
"""
EARLIER = """
import gc, weakref
from tfpar._compat import keras_lazy_imports


class Cyclic:
    def __init__(self):
        self.itself = self


for name, keras_lazy_imports.FEW_OBJECTS in (("few", 10**9), ("many", 0)):
    gc.unfreeze()
    earlier = Cyclic()
    with keras_lazy_imports.out_of_collections():
        pass
    found, earlier = weakref.ref(earlier), None
    gc.collect()
    print(f"{name}: {found() is None}")
"""
LOGS = """
import logging, os, warnings
from absl import logging as absl_logging

logging.warning("from logging")
absl_logging.warning("from absl")
tf.get_logger().warning("from TensorFlow's logger")
tf.get_logger().setLevel("INFO")
tf.get_logger().info("at the user's level")
warnings.warn("from warnings")
os.write(2, b"from native code\\n")
tf.print("from a graph")
"""


def run(program: str, folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    completed = subprocess.run(
        [sys.executable, *options, "-c", program],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    # TensorFlow warns of functions that it traces for the fifth time.
    program = COUNTS + "num_rows = (45, 33, 7, 1, 40)\n" + TRAINS + PLOTS
    return run(program, tmp_path_factory.mktemp("trained"))


@pytest.mark.slow_start
def test_a_script_that_trains_under_every_strategy_writes_nothing(trained: subprocess.CompletedProcess[str]) -> None:
    assert trained.stderr == ""


@pytest.mark.slow_start
def test_modules_for_plots_and_wrappers_are_loaded_when_they_are_used(
    trained: subprocess.CompletedProcess[str],
) -> None:
    """Keras imports Matplotlib and scikit-learn at its start, which takes a quarter of it."""
    assert trained.stdout.splitlines()[1:] == [
        "after training: []",
        "SKLearnClassifier",
        "SKLearnRegressor",
        "plot_image_gallery",
        "after use: ['matplotlib.pyplot', 'sklearn']",
        "no attribute 'nothing'",
        "True",
    ]


@pytest.mark.slow_start
def test_tensorflow_is_imported_without_collections_of_garbage(trained: subprocess.CompletedProcess[str]) -> None:
    """They find none: 815 of them took a sixth of the import."""
    _, number, is_enabled, num_frozen, num_others = trained.stdout.splitlines()[0].split()
    assert int(number) < 20, "some follow the import"
    assert is_enabled == "True", "as before"
    assert int(num_frozen) > 100_000 > int(num_others), "later collections need not look through what was imported"


def test_garbage_of_objects_from_before_an_import_is_collected_unless_they_are_few(tmp_path: Path) -> None:
    assert run(EARLIER, tmp_path).stdout == "few: False\nmany: True\n"


@pytest.mark.extended
@pytest.mark.slow_start
def test_a_notebook_shows_no_reports_of_tf_distribute(tmp_path: Path) -> None:
    # Python that is interactive, as in a notebook, shows what TensorFlow logs at INFO.
    completed = run("import tfpar, keras, tensorflow as tf\nnum_rows = (45, 1)\n" + TRAINS, tmp_path, "-i")
    assert "INFO" not in completed.stdout + completed.stderr
    assert completed.stderr.replace(">>> ", "").strip() == ""


@pytest.mark.slow_start
def test_output_of_the_users_code_stays(tmp_path: Path) -> None:
    written = run("import tfpar, keras, tensorflow as tf\n" + LOGS, tmp_path).stderr
    for line in ("logging", "absl", "TensorFlow's logger", "warnings", "native code", "a graph"):
        assert f"from {line}" in written
    assert "at the user's level" in written


@pytest.mark.slow_start
def test_the_level_0_shows_everything(tmp_path: Path) -> None:
    written = run("import tfpar, tensorflow", tmp_path, TF_CPP_MIN_LOG_LEVEL="0").stderr
    assert "port.cc" in written


@pytest.mark.extended
@pytest.mark.slow_start
def test_after_tensorflow_the_rest_of_its_start_is_quiet(tmp_path: Path) -> None:
    program = "import sys, tensorflow as tf, keras\nprint('imported', file=sys.stderr, flush=True)\n"
    program += "import tfpar\nnum_rows = (45,)\n"
    written = run(program + TRAINS, tmp_path, TF_CPP_MIN_LOG_LEVEL="1").stderr
    assert written.partition("imported\n")[2] == ""


@pytest.mark.parametrize(
    "command",
    [["-m", "tfpar.train", "--directory", "run"], ["-c", "import tfpar, keras"]],
    ids=["the train command", "a script"],
)
def test_another_backend_of_keras_is_refused_with_the_way_out(command: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    assert "received 'jax': set KERAS_BACKEND=tensorflow" in result.stderr.splitlines()[-1]
