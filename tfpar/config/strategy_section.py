"""The section `[strategy]` of a run: a pydantic model for each kind of strategy.

A setting has the name, type and default of the constructor argument of the strategy, which checks the value.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from tfpar.config import toml
from tfpar.config.sections import A_WEEK_SECONDS, CHANGES_NO_WEIGHT, Count, OrNone, Section, Text
from tfpar.layout import MAX_SHARE, Layout, ScheduleName

# Larger numbers are mistakes, and trying them would take days or all memory.
_DeviceCount = Annotated[int, Field(ge=1, le=4096)]
_MicrobatchCount = Annotated[int, Field(ge=1, le=65536)]
_Device = Annotated[str, Field(pattern=r"^(CPU|GPU):(0|[1-9][0-9]{0,3})$", examples=["GPU:0"])]
_DeviceOfWorker = Annotated[
    str, Field(pattern=r"^((0|[1-9][0-9]{0,3})/)?(CPU|GPU):(0|[1-9][0-9]{0,3})$", examples=["GPU:0", "1/GPU:0"])
]
_LayerCounts = Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
_LayerNames = Annotated[tuple[Text, ...], Field(min_length=1, strict=False)]
_Axes = Annotated[tuple[OrNone[Literal["model"]], ...], Field(min_length=1, max_length=16, strict=False)]

# Settings that several kinds have.
_Layout = Annotated[
    OrNone[dict[Text, _Axes]],
    Field(
        description='Rules for the weights to shard: regular expressions of their paths, each with "model" at the '
        'sharded axis and "none" at the others; none: all large layers.'
    ),
]
_Devices = Annotated[
    OrNone[Annotated[tuple[_Device, ...], Field(min_length=1, strict=False)]],
    Field(description='Only these devices, such as ["GPU:0", "GPU:1"]; none: all GPUs, or else all logical CPUs.'),
]
_DevicesOfWorkers = Annotated[
    OrNone[Annotated[tuple[_DeviceOfWorker, ...], Field(min_length=1, strict=False)]],
    Field(
        description='Only these devices, such as ["GPU:0", "GPU:1"], or with across_workers ["0/GPU:0", "1/GPU:0"]; '
        "none: as many as the stages need."
    ),
]
_NumLogicalCPUs = Annotated[
    _DeviceCount, Field(description="Without GPUs: number of devices into which the CPU of each worker is split.")
]
_PackBytes = Annotated[OrNone[Count], Field(description="Bytes of gradients in one message of an all-reduce.")]
_BatchDependentLayers = Annotated[
    Literal["refuse", "gather"],
    Field(description="Layers that mix the examples of a batch: refuse them, or gather the batch for them."),
]
_OwnSteps = Annotated[
    Literal["exact", "average"],
    Field(
        description="A model's own train_step on replicas: with the results of one device, or averaged as under "
        "tf.distribute."
    ),
]
_Shard = Annotated[
    OrNone[Literal["optimizer"]],
    Field(
        description="Shard the optimizer's state over the replicas, in a job of several workers over the workers; "
        "none: each holds all of it."
    ),
]
_ShardOfReplicas = Annotated[
    OrNone[Literal["optimizer", "weights"]],
    Field(
        description="Shard the optimizer's state over the replicas, or the weights and gradients too; none: each "
        "holds all of it."
    ),
]
_BatchShares = Annotated[
    OrNone[Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_SHARE)], ...], Field(min_length=1, strict=False)]],
    Field(
        description="Relative sizes of the per-replica batches, such as [3, 1] for devices of different speeds; none: "
        "equal sizes."
    ),
]
_Recompute = Annotated[
    bool | _LayerNames,
    Field(
        description="Recompute activations in the backward pass instead of saving them; or only those of the layers "
        'with these names or patterns, such as ["block_*"].'
    ),
]
_FormSeconds = Annotated[
    float, Field(gt=0, le=A_WEEK_SECONDS, description="With several workers: longest wait until all are connected.")
]
_SilenceSeconds = Annotated[
    float,
    Field(ge=1, le=A_WEEK_SECONDS, description="With several workers: longest silence before one counts as lost."),
]

# Every strategy trains the weights of one device, so a run may resume with another one; only these settings differ.
_CHANGE_WEIGHTS = ("compression", "sync", "every", "average_optimizer", "allow_batch_dependent_layers", "own_steps")


def _mark(schema: dict[str, Any]) -> None:
    for name in schema["properties"].keys() - set(_CHANGE_WEIGHTS):
        schema["properties"][name] |= CHANGES_NO_WEIGHT


class _StrategySection(Section):
    model_config = ConfigDict(json_schema_extra=_mark)


class Auto(_StrategySection):
    """The strategy that fits the devices.

    It is multi_worker in a job of several workers, single_device on one device, and on several devices the first row
    of the planner (`python -m tfpar.plan`).

    >>> Auto().kind
    'auto'
    """

    kind: Literal["auto"] = Field("auto", description="How the model is trained.")
    devices: _Devices = None
    num_logical_cpus: _NumLogicalCPUs = 1
    batch_dependent_layers: _BatchDependentLayers = "refuse"
    form_seconds: _FormSeconds = 300.0
    silence_seconds: _SilenceSeconds = 30.0


class SingleDevice(_StrategySection):
    """One device.

    >>> SingleDevice(device="GPU:1").device
    'GPU:1'
    """

    kind: Literal["single_device"] = Field("single_device", description="How the model is trained.")
    device: OrNone[_Device] = Field(None, description='The device, such as "GPU:1"; none: the choice of TensorFlow.')
    recompute: _Recompute = False


class Mirrored(_StrategySection):
    """One replica on each device of this machine.

    >>> Mirrored(num_logical_cpus=2).all_reduce
    'auto'
    """

    kind: Literal["mirrored"] = Field("mirrored", description="How the model is trained.")
    devices: _Devices = None
    num_logical_cpus: _NumLogicalCPUs = 1
    all_reduce: Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"] = Field(
        "auto", description="How gradients are summed; nccl and hierarchical_copy need GPUs."
    )
    pack_bytes: _PackBytes = None
    batch_dependent_layers: _BatchDependentLayers = "refuse"
    shard: _ShardOfReplicas = None
    batch_shares: _BatchShares = None
    own_steps: _OwnSteps = "exact"
    recompute: _Recompute = False


class MultiWorker(_StrategySection):
    """One replica on each device of every worker of a job.

    >>> MultiWorker(sync="average", every=4).average_optimizer
    True
    """

    kind: Literal["multi_worker"] = Field("multi_worker", description="How the model is trained.")
    devices: _Devices = None
    num_logical_cpus: _NumLogicalCPUs = 1
    all_reduce: Literal["auto", "ring", "nccl"] = Field(
        "auto", description="How gradients are summed; nccl needs GPUs."
    )
    pack_bytes: _PackBytes = None
    compression: OrNone[Literal["bfloat16"]] = Field(
        None, description="Gradients are rounded to bfloat16 for the all-reduce, which halves its bytes."
    )
    sync: Literal["step", "average"] = Field(
        "step", description="Sum the gradients of every step, or average the weights of replicas after several steps."
    )
    every: Count = Field(1, description='sync = "average": steps between two averages.')
    average_optimizer: bool = Field(True, description='sync = "average": average the optimizer\'s state too.')
    batch_dependent_layers: _BatchDependentLayers = "refuse"
    shard: _ShardOfReplicas = None
    batch_shares: _BatchShares = None
    own_steps: _OwnSteps = "exact"
    recompute: _Recompute = False
    form_seconds: _FormSeconds = 300.0
    silence_seconds: _SilenceSeconds = 30.0


class Pipeline(_StrategySection):
    """Stages of the model on several devices of this machine.

    >>> Pipeline(num_stages=2, num_microbatches=8).schedule
    '1f1b'
    """

    kind: Literal["pipeline"] = Field("pipeline", description="How the model is trained.")
    num_stages: _DeviceCount = Field(description="Number of stages.")
    num_microbatches: _MicrobatchCount = Field(description="Number of micro-batches of every global batch.")
    schedule: ScheduleName = Field(
        "1f1b", description="Order of the actions; interleaved: several stages on each device."
    )
    balance: Literal["time", "flops", "parameters", "memory"] | _LayerCounts | _LayerNames = Field(
        "time",
        description="The measure to minimize for the slowest stage; or the number of layers of each stage, such as "
        "[3, 2]; or the names of the first layers of the later stages.",
    )
    devices: _DevicesOfWorkers = None
    num_logical_cpus: _NumLogicalCPUs = 1
    recompute: bool = Field(False, description="Recompute activations in the backward pass instead of saving them.")
    num_shards: _DeviceCount = Field(1, description="Number of devices of each stage, which shard its layers.")
    layout: _Layout = None
    memory_limit_bytes: OrNone[Count] = Field(None, description="Memory of a device for weights and saved tensors.")
    allow_batch_dependent_layers: bool = Field(
        False, description="Accept layers that mix the examples of a batch; they mix those of a micro-batch."
    )
    across_workers: bool = Field(
        False, description="In a job of several workers: one pipeline, or grid, on the devices of all workers."
    )
    form_seconds: _FormSeconds = 300.0
    silence_seconds: _SilenceSeconds = 30.0


class Hybrid(Pipeline):
    """Replicas of a pipeline on the devices of this machine, of each worker of a job, or of all workers together.

    >>> Hybrid(num_replicas=2, num_stages=2, num_microbatches=8).num_replicas
    2
    """

    kind: Literal["hybrid"] = Field("hybrid", description="How the model is trained.")  # type: ignore[assignment]
    num_replicas: _DeviceCount = Field(
        1, description="Number of replicas of the pipeline in each process; with across_workers, in all together."
    )
    num_microbatches: _MicrobatchCount = Field(description="Number of micro-batches of the share of each replica.")
    all_reduce: Literal["auto", "ring", "nccl"] = Field(
        "auto", description="How gradients are summed over workers; nccl needs GPUs."
    )

    shard: _Shard = None

    # Arguments of the strategy itself; the others are those of its pipeline.
    OF_GRID: ClassVar[tuple[str, ...]] = (
        "num_replicas", "devices", "all_reduce", "shard", "form_seconds", "silence_seconds",
    )  # fmt: skip


class TensorParallel(_StrategySection):
    """Layers sharded over several devices of this machine, or of each worker of a job.

    >>> TensorParallel(num_shards=2, layout={"dense.*kernel": ("none", "model")}).layout
    {'dense.*kernel': (None, 'model')}
    """

    kind: Literal["tensor_parallel"] = Field("tensor_parallel", description="How the model is trained.")
    num_shards: Annotated[int, Field(ge=2, le=4096)] = Field(description="Number of devices that shard each layer.")
    layout: _Layout = None
    num_replicas: _DeviceCount = Field(
        1, description="Number of replicas in each process, each with a part of every global batch."
    )
    shard: _Shard = None
    devices: _Devices = None
    num_logical_cpus: _NumLogicalCPUs = 1
    form_seconds: _FormSeconds = 300.0
    silence_seconds: _SilenceSeconds = 30.0


def _of_kind(table: Any) -> Any:
    """Add the default kind to a table, and drop settings of other kinds that have their default.

    So a flag may change only the kind of a file that lists all settings of its kind.
    """
    if not isinstance(table, dict):
        return table
    table = {"kind": "auto", **table}
    own = _KINDS.get(table["kind"]) if isinstance(table["kind"], str) else None
    if own is None:
        return table
    return {key: value for key, value in table.items() if key in own.model_fields or not _is_default(key, value)}


def _is_default(key: str, value: Any) -> bool:
    fields = [kind.model_fields[key] for kind in _KINDS.values() if key in kind.model_fields]
    value = None if value == "none" else value
    return any(not field.is_required() and field.default == value for field in fields)


_KINDS: dict[str, Any] = {
    kind.model_fields["kind"].default: kind
    for kind in (Auto, SingleDevice, Mirrored, MultiWorker, Pipeline, Hybrid, TensorParallel)
}
Strategy = Annotated[
    Auto | SingleDevice | Mirrored | MultiWorker | Pipeline | Hybrid | TensorParallel,
    Field(discriminator="kind"),
    BeforeValidator(_of_kind),
]


def layout_of(strategy: Strategy) -> Layout:
    """Return the layout of the settings on one worker, with one replica if they leave the devices open.

    >>> layout_of(Mirrored(num_logical_cpus=2)).num_replicas
    2
    """
    own = {field.name: getattr(strategy, field.name) for field in dataclasses.fields(Layout)
           if field.name in type(strategy).model_fields}  # fmt: skip
    own["recompute"] = bool(own.get("recompute"))
    if isinstance(strategy, Mirrored | MultiWorker):
        own["num_replicas"] = len(strategy.devices or ()) or strategy.num_logical_cpus
    elif isinstance(strategy, Auto):  # the planner may use fewer logical CPUs
        own["num_replicas"] = len(strategy.devices or ()) or 1
    return Layout(**own)


# Settings that do not depend on the layout.
_KEPT = (
    "batch_dependent_layers", "allow_batch_dependent_layers", "pack_bytes", "memory_limit_bytes", "form_seconds",
    "silence_seconds",
)  # fmt: skip


def with_layout(strategy: Strategy, layout: Mapping[str, Any]) -> Strategy:
    """Return the section for another layout, keeping the settings that do not depend on the layout.

    Args:
        strategy: The current section.
        layout: The settings of the layout, with its kind.

    Raises:
        pydantic.ValidationError: A `ValueError`, if a setting of the layout is invalid.

    >>> chosen = with_layout(Auto(batch_dependent_layers="gather"), {"kind": "mirrored", "num_logical_cpus": 2})
    >>> chosen.kind, chosen.batch_dependent_layers
    ('mirrored', 'gather')
    """
    kind = _KINDS[layout["kind"]]
    kept = {name: getattr(strategy, name) for name in _KEPT if name in kind.model_fields and hasattr(strategy, name)}
    section: Strategy = kind.model_validate({**kept, **layout})
    return section


def problems(strategy: Strategy) -> Iterator[str]:
    """Yield a sentence for each setting that conflicts with another.

    >>> list(problems(Mirrored(num_logical_cpus=2)))
    []
    """
    if isinstance(strategy, Pipeline):
        yield from _problems_of_names(strategy)
    if isinstance(strategy, SingleDevice) or strategy.num_logical_cpus == 1:
        return
    if any("GPU" in device for device in strategy.devices or ()):
        yield (
            f"strategy.num_logical_cpus = {strategy.num_logical_cpus} splits the CPU, and strategy.devices = "
            f"{toml.show(strategy.devices)} names GPUs: leave one of them out."
        )


def _problems_of_names(strategy: Pipeline) -> Iterator[str]:
    across, devices = strategy.across_workers, strategy.devices or ()
    if any(("/" in device) != across for device in devices):
        yield (
            f"strategy.devices = {toml.show(devices)} does not fit strategy.across_workers = {toml.show(across)}: with "
            'true, name each device after the rank of its worker, such as "1/GPU:0".'
        )
