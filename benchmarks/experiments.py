"""The speed experiments as data: who trains what, under which thread settings, and the ratios to reach."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness import Experiment, Target
from benchmarks.measurement import Measurement
from benchmarks.worker import measure

_HOST_BOUND = Measurement("host_bound", "tfpar", batch_size=32, num_steps=10_000, num_warm_up_steps=640)

HOST_BOUND = Experiment(
    name="host_bound",
    summary="Two Dense layers, batch 32, 10,000 steps: how much of a step is Python?",
    figure="steps_per_second",
    measure=measure,
    settings={
        "tfpar": _HOST_BOUND,
        "Keras fit": replace(_HOST_BOUND, trainer="keras"),
        "Keras fit, steps_per_execution=32": replace(_HOST_BOUND, trainer="keras", steps_per_execution=32),
    },
    findings=(
        Target(("tfpar",), ("Keras fit",), 6.0),
        Target(("tfpar",), ("Keras fit, steps_per_execution=32",), 1.0),
    ),
)

_CNN = Measurement("cnn", "tfpar", batch_size=64, num_steps=100, num_warm_up_steps=20)
# One core with two inter-op threads is what a job gets that is pinned after TensorFlow has counted the cores.
_CNN_SETTINGS = {
    "1 core, 1 intra, 1 inter": replace(_CNN, cores=1, intra_op_threads=1, inter_op_threads=1),
    "1 core, 1 intra, 2 inter": replace(_CNN, cores=1, intra_op_threads=1, inter_op_threads=2),
    "2 cores, default threads": replace(_CNN, cores=2),
}

CNN = Experiment(
    name="cnn",
    summary="Convolutions of 32 and 64 filters, batch 64, one device: does the loop cost anything?",
    figure="examples_per_second",
    measure=measure,
    settings={
        name: contender
        for setting, measurement in _CNN_SETTINGS.items()
        for name, contender in (
            (f"tfpar, {setting}", measurement),
            (f"Keras fit, {setting}", replace(measurement, trainer="keras")),
        )
    },
    findings=(
        *(Target((f"tfpar, {setting}",), (f"Keras fit, {setting}",), 1.0) for setting in _CNN_SETTINGS),
        Target(
            tuple(f"tfpar, {setting}" for setting in _CNN_SETTINGS),
            tuple(f"Keras fit, {setting}" for setting in _CNN_SETTINGS),
            1.0,
        ),
    ),
)

_ONE_CORE = _CNN_SETTINGS["1 core, 1 intra, 1 inter"]
# One intra-op thread, so that each of the two logical CPUs behaves like one core.
_TWO_CORES = replace(_CNN, batch_size=128, num_replicas=2, cores=2, intra_op_threads=1, inter_op_threads=2)

MIRRORED = Experiment(
    name="mirrored",
    summary="The same CNN over two logical CPUs of one core each, batch 128, against one core, batch 64",
    figure="examples_per_second",
    measure=measure,
    settings={
        "tfpar.SingleDevice, 1 core": _ONE_CORE,
        "tfpar.Mirrored, 2 logical CPUs": _TWO_CORES,
        "Keras fit, MirroredStrategy, 2 logical CPUs": replace(_TWO_CORES, trainer="keras"),
    },
    findings=(
        Target(("tfpar.Mirrored, 2 logical CPUs",), ("tfpar.SingleDevice, 1 core",), 1.6),
        Target(("tfpar.Mirrored, 2 logical CPUs",), ("Keras fit, MirroredStrategy, 2 logical CPUs",), 1.0),
    ),
)

# Two workers of one core and one thread each; the model and the batch of a worker are those of one core.
_TWO_WORKERS = replace(_ONE_CORE, batch_size=128, num_workers=2, cores=None)

MULTI_WORKER = Experiment(
    name="multi_worker",
    summary="The same CNN in two workers of one core each, batch 64 a worker, compared with DDP and legacy tf_keras",
    figure="examples_per_second",
    measure=measure,
    settings={
        "tfpar.MultiWorker, 2 workers": _TWO_WORKERS,
        "tfpar, 1 worker": _ONE_CORE,
        "PyTorch DDP, 2 workers": replace(_TWO_WORKERS, trainer="torch"),
        "PyTorch, 1 worker": replace(_ONE_CORE, trainer="torch"),
        "tf_keras fit, MultiWorkerMirroredStrategy, 2 workers": replace(_TWO_WORKERS, trainer="tf_keras"),
    },
    findings=(
        Target(("tfpar.MultiWorker, 2 workers",), ("PyTorch DDP, 2 workers",), 1.3),
        Target(("tfpar.MultiWorker, 2 workers",), ("tf_keras fit, MultiWorkerMirroredStrategy, 2 workers",), 2.5),
        # Scaling efficiency is half of the ratio: 0.88 of two workers.
        Target(("tfpar.MultiWorker, 2 workers",), ("tfpar, 1 worker",), 1.76),
        # DDP's own scaling, for comparison.
        Target(("PyTorch DDP, 2 workers",), ("PyTorch, 1 worker",)),
    ),
)

_DENSE_ONE = Measurement(
    "dense", "tfpar", 16, num_steps=40, num_warm_up_steps=8, cores=1, intra_op_threads=1, inter_op_threads=1
)
_DENSE_TWO = replace(_DENSE_ONE, batch_size=32, num_workers=2, cores=None)

COMMUNICATION_BOUND = Experiment(
    name="communication_bound",
    summary="5 x Dense(2048), 21 million weights, batch 16 a worker; one worker shows the step without communication",
    figure="examples_per_second",
    measure=measure,
    settings={
        "tfpar, float32": _DENSE_TWO,
        "tfpar, bfloat16": replace(_DENSE_TWO, compression="bfloat16"),
        "tfpar, 1 worker": _DENSE_ONE,
        "PyTorch DDP, float32": replace(_DENSE_TWO, trainer="torch"),
        "PyTorch, 1 worker": replace(_DENSE_ONE, trainer="torch"),
    },
    findings=(
        Target(("tfpar, float32",), ("PyTorch DDP, float32",), 1.0),
        Target(("tfpar, bfloat16",), ("PyTorch DDP, float32",), 1.3),
        Target(("tfpar, float32",), ("tfpar, 1 worker",)),
        Target(("PyTorch DDP, float32",), ("PyTorch, 1 worker",)),
    ),
)

_SLOW_CNN, _SLOW_DENSE = replace(_TWO_WORKERS, rate="1gbit"), replace(_DENSE_TWO, rate="1gbit")

SLOW_NETWORK = Experiment(
    name="slow_network",
    summary="The CNN and 5 x Dense(2048) in two workers on hosts with links of 1 Gbit/s, compared with DDP; needs root",
    figure="examples_per_second",
    measure=measure,
    settings={
        "tfpar, CNN": _SLOW_CNN,
        "PyTorch DDP, CNN": replace(_SLOW_CNN, trainer="torch"),
        "tfpar, CNN on the loopback": _TWO_WORKERS,
        "tfpar, Dense": _SLOW_DENSE,
        "PyTorch DDP, Dense": replace(_SLOW_DENSE, trainer="torch"),
    },
    findings=(
        Target(("tfpar, CNN",), ("PyTorch DDP, CNN",), 1.3),
        Target(("tfpar, CNN",), ("tfpar, CNN on the loopback",)),
        Target(("tfpar, Dense",), ("PyTorch DDP, Dense",), 6.0),
    ),
)

# 16 sentences of 128 words in all: scores of 2,048 x 32,000.
_MASKED = replace(_DENSE_TWO, workload="masked_mean", batch_size=16, num_steps=6, num_warm_up_steps=2, rate="1gbit")

MASKED_LOSS = Experiment(
    name="masked_loss",
    summary="A mean over a mask, 2,048 x 32,000 scores, two workers with links of 1 Gbit/s: what does the gather cost?",
    figure="steps_per_second",
    measure=measure,
    settings={
        "one scalar": _MASKED,
        "sample weights": replace(_MASKED, workload="weighted_mean"),
        "one scalar on the loopback": replace(_MASKED, rate=None),
    },
    findings=(
        Target(("one scalar",), ("sample weights",)),
        Target(("one scalar on the loopback",), ("one scalar",)),
    ),
)

# Long enough for several checkpoints, of 84 MB each.
_SAVING = replace(_DENSE_ONE, num_steps=150)

CHECKPOINT_COST = Experiment(
    name="checkpoint_cost",
    summary="5 x Dense(2048) on one core, a checkpoint of 84 MB every second: what does a step pay?",
    figure="steps_per_second",
    measure=measure,
    settings={
        "no checkpoints": _SAVING,
        "asynchronous": replace(_SAVING, checkpoints="asynchronous"),
        "synchronous": replace(_SAVING, checkpoints="synchronous"),
    },
    findings=(
        Target(("asynchronous",), ("no checkpoints",)),
        Target(("synchronous",), ("no checkpoints",)),
    ),
)

EXPERIMENTS = (
    HOST_BOUND,
    CNN,
    MIRRORED,
    MULTI_WORKER,
    COMMUNICATION_BOUND,
    SLOW_NETWORK,
    MASKED_LOSS,
    CHECKPOINT_COST,
)
