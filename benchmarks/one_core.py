"""Seven models on one core and one thread, beside Keras' `fit` and PyTorch; the same on two replicas and two workers.

Other work on the machine changes the processor time of a step less than its wall time, so the targets are for the
first; both are reported.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness import Experiment, Finding
from benchmarks.measurement import Measurement, Workload
from benchmarks.step_times import FIGURE, measure_step, speed_ups


def _measurement(workload: Workload, batch_size: int, num_steps: int) -> Measurement:
    warm_up = max(3, num_steps // 10)
    return Measurement(
        workload, "tfpar", batch_size, num_steps, warm_up, cores=1, intra_op_threads=1, inter_op_threads=1
    )


MODELS = {
    "ResNet20": _measurement("resnet20", 64, 30),
    "4 x Dense(2048), Adam": _measurement("dense_adam", 16, 60),
    "4 transformer blocks": _measurement("blocks", 8, 20),
    "Embedding(50,000, 64), Adam": _measurement("embedding", 64, 150),
    "MobileNetV2": _measurement("mobilenet", 32, 30),
    "CNN": _measurement("cnn", 64, 100),
    "two Dense layers": _measurement("host_bound", 32, 5_000),
}
# How many times as fast as Keras' `fit`.
_TARGETS = dict(zip(MODELS, (1.2, 1.7, 1.1, 1.0, 1.2, 1.0, 6.5), strict=True))
_OF_PYTORCH = {"ResNet20": 1.1}


def _one_core() -> Experiment:
    settings: dict[str, Measurement] = {}
    findings: list[Finding] = []
    for name, measurement in MODELS.items():
        ours, keras, torch = f"{name}: tfpar", f"{name}: Keras fit", f"{name}: PyTorch"
        settings |= {
            ours: measurement,
            f"{name}: tfpar, fused=False": replace(measurement, fused=False),
            keras: replace(measurement, trainer="keras"),
        }
        findings += speed_ups(keras, ours, _TARGETS[name])
        if name in _OF_PYTORCH:
            settings[torch] = replace(measurement, trainer="torch")
            findings += speed_ups(torch, ours, _OF_PYTORCH[name])
    summary = "Seven models on one core and one thread, compared with Keras' fit and PyTorch"
    return Experiment("one_core", summary, FIGURE, settings, measure_step, tuple(findings))


def _two_devices() -> Experiment:
    settings: dict[str, Measurement] = {}
    for name, one in MODELS.items():
        two = replace(one, batch_size=2 * one.batch_size)
        # One intra-op thread, so that each of the two logical CPUs behaves like one core.
        settings[f"{name}: 2 replicas"] = replace(two, num_replicas=2, cores=2, inter_op_threads=2)
        settings[f"{name}: 2 workers"] = replace(two, num_workers=2, cores=None)
    summary = "The seven models on two logical CPUs, and in two workers of one core; --against COMMIT compares"
    return Experiment("two_devices", summary, FIGURE, settings, measure_step)


ONE_CORE, TWO_DEVICES = _one_core(), _two_devices()
