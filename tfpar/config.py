"""The run as typed data: TOML in, frozen and checked models out; needs no TensorFlow.

One run is one `Run`. `load` reads it from a TOML file and `section.key=value` overrides, `dump` writes it back.
Each section checks its own fields; every rule between fields stands in `cross_field_problems`. What cannot be honoured
is refused here, before TensorFlow starts, with the path of the key, the value received and what is allowed.

TOML has no null, so the word "none" unsets a key that may be unset: `data.validation_split = "none"`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from tfpar import _toml

Value = TypeVar("Value")
OrNone = Annotated[Value | None, BeforeValidator(lambda value: None if value == "none" else value)]
Text = Annotated[str, Field(min_length=1)]
ImportPath = Annotated[str, Field(pattern=r"^\w+(\.\w+)+$", examples=["trainers.regression.Regression"])]
Device = Annotated[str, Field(pattern=r"^(CPU|GPU):[0-9]+$", examples=["GPU:0"])]
Count = Annotated[int, Field(ge=1)]
Patience = Annotated[int, Field(ge=0)]
Limit = Annotated[float, Field(gt=0)]
Momentum = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """What all sections share: frozen, unknown keys refused, no conversion between types, finite numbers.

    Mappings inside (`data.features`, `optimizer.settings`) are plain dicts: read them, never change them.
    """


class Model(Section):
    """Which model the trainer class builds, and its regularization.

    >>> Model(name="MobileNetV2", dropout=0.2).name
    'MobileNetV2'
    """

    name: Text = Field("cnn", description="Read by the trainer class: cnn, linear, or a keras.applications name.")
    l1: float = Field(0.0, ge=0, description="Factor of the L1 penalty on kernels.")
    l2: float = Field(0.0, ge=0, description="Factor of the L2 penalty on kernels.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of units dropped before the last layer.")


class Feature(Section):
    """One declared feature of a TFRecord example.

    >>> Feature(dtype="jpeg", shape=(224, 224, 3)).shape
    (224, 224, 3)
    """

    dtype: Literal["float32", "float64", "int32", "int64", "string", "jpeg", "png"] = Field(
        description="Type of the stored values; jpeg and png are encoded images, decoded to `shape`."
    )
    shape: tuple[Count, ...] = Field(
        (), strict=False, description="Shape of one example, [] for a scalar; images: [height, width, channels]."
    )


class Data(Section):
    """Where the examples come from and what happens to them before they reach the model.

    >>> Data(name="mnist", augmentation=("shift",)).source
    'tfds'
    """

    source: Literal["tfds", "tfrecord", "generated"] = Field(
        "tfds", description="A TensorFlow Datasets name, a folder of TFRecord files, or generated rows."
    )
    name: Text = Field("digits", description="TensorFlow Datasets name; digits is embedded and needs no download.")
    directory: OrNone[Text] = Field(None, description="tfds: its data_dir; tfrecord: the folder of the files.")
    train_split: Text = Field("train", description="tfds: a split such as train[:80%]; tfrecord: sub-folder or prefix.")
    validation_split: OrNone[Text] = Field("test", description="Like train_split; none trains without validation.")
    features: dict[str, Feature] = Field({}, description="tfrecord: the features of one example, by their key.")
    input_key: Text = Field("image", description="Feature that the model receives.")
    label_key: Text = Field("label", description="Feature that the model predicts.")
    num_classes: OrNone[Annotated[int, Field(ge=2)]] = Field(None, description="tfrecord classification: its classes.")
    num_examples: int = Field(10_000_000, ge=1, description="generated: rows of the training split.")
    num_features: int = Field(10, ge=1, description="generated: columns of one row.")
    noise: float = Field(0.1, ge=0, description="generated: standard deviation of the noise on the labels.")
    shuffle_buffer: int = Field(10_000, ge=0, description="Examples held to draw from at random; 0 keeps the order.")
    augmentation: tuple[Literal["flip", "shift", "brightness"], ...] = Field(
        (), strict=False, description="Random changes to training images, in this order."
    )
    normalization: Literal["none", "unit", "standard"] = Field(
        "unit", description="unit: images to [0, 1]; standard: mean 0 and deviation 1, measured on the training split."
    )
    cache: bool = Field(False, description="Keep the examples in memory after the first epoch.")


class Training(Section):
    """The loop: how long, how large a step, in which precision, and how the gradient is treated.

    >>> Training(epochs=3, global_batch_size=128).precision
    'float32'
    """

    epochs: int = Field(10, ge=1, description="Passes over the training split.")
    global_batch_size: int = Field(64, ge=1, description="Examples in one step, over all replicas together.")
    steps_per_call: Count | Literal["auto"] = Field(
        "auto", description="Steps in one call of the compiled function; auto: about a tenth of a second's worth."
    )
    precision: Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"] = Field(
        "float32", description="Keras dtype policy."
    )
    jit_compile: bool = Field(False, description="Compile the step with XLA; slower on CPU.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Steps whose gradients are averaged into one update.")
    clipnorm: OrNone[Limit] = Field(None, description="Largest norm of each gradient.")
    global_clipnorm: OrNone[Limit] = Field(None, description="Largest norm of all gradients.")
    clipvalue: OrNone[Limit] = Field(None, description="Largest size of a gradient's element.")
    ema_momentum: OrNone[Momentum] = Field(None, description="Moving average of the weights with this momentum.")
    ema_overwrite_frequency: OrNone[Count] = Field(None, description="Updates before it replaces the weights.")
    validation_freq: int = Field(1, ge=1, description="Epochs between two validations.")
    checkpoint_seconds: float = Field(
        60.0, ge=0, description="Least time between two checkpoints; one more at the end."
    )
    keep_checkpoints: int = Field(3, ge=1, description="Newest checkpoints that stay on disk.")


class Optimizer(Section):
    """Any Keras optimizer by name and settings, with warm-up and linear scaling of its learning rate.

    Linear scaling and warm-up follow Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677), section 2.

    >>> Optimizer(name="sgd", learning_rate=0.1, settings={"momentum": 0.9}).settings
    {'momentum': 0.9}
    """

    name: Text = Field("adam", description="Any name that keras.optimizers.get accepts.")
    learning_rate: float = Field(1e-3, gt=0, description="Learning rate, before scaling by base_batch_size.")
    settings: dict[str, bool | int | float | str] = Field({}, description="Arguments for the Keras optimizer class.")
    warmup_steps: int = Field(0, ge=0, description="Updates over which the learning rate rises to its value.")
    base_batch_size: OrNone[Count] = Field(None, description="Scales learning_rate by global_batch_size over this.")


class Strategy(Section):
    """Where one step runs, and how gradients are reduced.

    >>> Strategy(kind="mirrored", num_logical_cpus=2).all_reduce
    'auto'
    """

    kind: Literal["auto", "single_device", "mirrored"] = Field(
        "auto", description="auto: mirrored over all GPUs when there are two or more, else single_device."
    )
    num_logical_cpus: int = Field(1, ge=1, description="mirrored without GPUs: devices that this CPU is split into.")
    devices: OrNone[Annotated[tuple[Device, ...], Field(min_length=1, strict=False)]] = Field(
        None, description='Only these devices, such as ["GPU:0", "GPU:1"].'
    )
    all_reduce: Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"] = Field(
        "auto", description="How replicas add their gradients."
    )
    pack_bytes: OrNone[Count] = Field(None, description="Gradient bytes reduced in one message.")


class Callbacks(Section):
    """What watches the run.

    >>> Callbacks(early_stopping_patience=3).monitor
    'val_loss'
    """

    early_stopping_patience: OrNone[Patience] = Field(None, description="Epochs without improvement before a stop.")
    reduce_learning_rate_patience: OrNone[Patience] = Field(
        None, description="Reduce the learning rate after this many epochs without improvement."
    )
    monitor: Text = Field("val_loss", description="The log that decides about improvement.")
    tensorboard: bool = Field(True, description="Write TensorBoard logs into the run directory.")
    check_replicas_every_steps: OrNone[Count] = Field(
        None, description="Steps between two checks that all replicas hold equal weights."
    )


class Run(Section):
    """One whole run; `Run()` is the default run.

    Raises:
        pydantic.ValidationError: a `ValueError`; a field or a rule between fields is broken.

    >>> Run(training=Training(epochs=3)).data.name
    'digits'
    """

    trainer: ImportPath = Field("trainers.image_classification.ImageClassification", description="Class to run.")
    seed: int = Field(0, ge=0, lt=2**32, description="Fixes weights, data order and augmentation.")
    model: Model = Field(Model(), description="Which model.")
    data: Data = Field(Data(), description="Which examples.")
    training: Training = Field(Training(), description="How the loop runs.")
    optimizer: Optimizer = Field(Optimizer(), description="How gradients become updates.")
    strategy: Strategy = Field(Strategy(), description="On which devices.")
    callbacks: Callbacks = Field(Callbacks(), description="What watches.")

    @model_validator(mode="after")
    def _check_across_fields(self) -> "Run":
        problems = cross_field_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Run:
    """Reads a run from a TOML file and overrides, and checks all of it.

    Args:
        path: the TOML file; None starts from the default run.
        overrides: `section.key=value` each, the value as in TOML; a bare word is a string. The last one wins.

    Returns:
        The checked run; a key that is not given has its default.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or an override cannot be read, or keys or values are refused; one line for each problem.

    >>> load(None, ["training.epochs=3", "model.name=linear"]).training.epochs
    3
    """
    tables = _toml.read(path) if path is not None else {}
    sections = [name for name, field in Run.model_fields.items() if isinstance(field.default, Section)]
    for override in overrides:
        _toml.override(tables, override, sections)
    try:
        return Run.model_validate(tables)
    except ValidationError as error:
        raise ValueError("\n".join(_toml.sentences(error, tables, schema()))) from None


def dump(run: Run) -> str:
    """Writes every key of a run, also those at their default, as TOML that `load` reads back to the same run.

    Args:
        run: the run.

    Returns:
        TOML text, ending in a newline; keys that are unset stand as "none".

    >>> "epochs = 3" in dump(Run(training=Training(epochs=3)))
    True
    """
    return _toml.write(run.model_dump())


def schema() -> dict[str, Any]:
    """The JSON schema of a run's TOML file, for editors that complete and check while one types.

    >>> schema()["$defs"]["Training"]["properties"]["epochs"]["minimum"]
    1
    """
    return Run.model_json_schema(schema_generator=_toml.Schema)


def cross_field_problems(run: Run) -> list[str]:
    """Every rule between fields that `run` breaks; no such rule stands anywhere else.

    Args:
        run: sections that are each valid alone.

    Returns:
        One sentence a problem: the keys with their values, the rule, the way out.

    >>> cross_field_problems(Run())
    []
    """
    return [*_training_problems(run), *_strategy_problems(run.strategy), *_data_problems(run.data)]


def _training_problems(run: Run) -> Iterator[str]:
    training, callbacks, strategy = run.training, run.callbacks, run.strategy
    num_replicas = len(strategy.devices or ()) or strategy.num_logical_cpus
    if training.global_batch_size < num_replicas:
        size = f"training.global_batch_size = {training.global_batch_size}"
        yield f"{size} does not reach every replica: set it to at least {num_replicas}, or use fewer devices."
    clips = [f"training.{key}" for key in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(training, key)]
    if len(clips) > 1:
        yield f"Only one way of clipping can apply, received {' and '.join(clips)}: keep one of them."
    if training.ema_overwrite_frequency and not training.ema_momentum:
        frequency = f"training.ema_overwrite_frequency = {training.ema_overwrite_frequency}"
        yield f"{frequency} needs a moving average: set training.ema_momentum, such as 0.99, or leave both out."
    watched = callbacks.early_stopping_patience is not None or callbacks.reduce_learning_rate_patience is not None
    if watched and callbacks.monitor.startswith("val_") and run.data.validation_split is None:
        monitor = f'callbacks.monitor = "{callbacks.monitor}"'
        yield f'{monitor} is not measured with data.validation_split = "none": set a split, or monitor "loss".'
    # Two places for one value would let one silently win.
    homes = {"learning_rate": "optimizer.learning_rate", "use_ema": "training.ema_momentum"}
    homes |= {key: f"training.{key}" for key in Training.model_fields}
    for key in sorted(homes.keys() & run.optimizer.settings.keys()):
        yield f"optimizer.settings.{key} = {_toml.show(run.optimizer.settings[key])} has its own key: set {homes[key]}."


def _strategy_problems(strategy: Strategy) -> Iterator[str]:
    devices, num_logical_cpus, kind = strategy.devices or (), strategy.num_logical_cpus, strategy.kind
    named = f"strategy.devices = {_toml.show(devices)}"
    cpus = [device for device in devices if device.startswith("CPU")]
    if num_logical_cpus > 1 and kind != "mirrored":
        logical = f"strategy.num_logical_cpus = {num_logical_cpus}"
        yield f'{logical} needs strategy.kind = "mirrored", received "{kind}": set the kind, or leave it at 1.'
    if kind == "single_device" and len(devices) > 1:
        yield f'{named} is more than the one device of strategy.kind = "single_device": name one, or set "mirrored".'
    if len(set(devices)) < len(devices):
        yield f"{named} names a device twice: name each once."
    if any(int(cpu.removeprefix("CPU:")) >= num_logical_cpus for cpu in cpus):
        yield f"{named} is beyond strategy.num_logical_cpus = {num_logical_cpus}, counted from 0: raise that number."
    if len(cpus) < len(devices) and (cpus or num_logical_cpus > 1):
        yield f"{named} with strategy.num_logical_cpus = {num_logical_cpus} mixes CPUs and GPUs: use one kind."
    on_cpus = num_logical_cpus > 1 or bool(cpus)
    if on_cpus and strategy.all_reduce in ("nccl", "hierarchical_copy"):
        reduce = f'strategy.all_reduce = "{strategy.all_reduce}"'
        yield f'{reduce} needs GPUs, but the replicas are CPU devices: set "auto" or "reduction_to_one_device".'
    if kind == "single_device" and strategy.all_reduce != "auto":
        yield f'strategy.all_reduce = "{strategy.all_reduce}" has no use on a single device: leave it out.'
    if strategy.pack_bytes and kind == "single_device":
        yield f"strategy.pack_bytes = {strategy.pack_bytes} has no use on a single device: leave it out."


def _data_problems(data: Data) -> Iterator[str]:
    if data.source == "tfrecord":
        if data.directory is None:
            yield 'data.source = "tfrecord" needs data.directory: set it to the folder that holds the files.'
        for role in ("input_key", "label_key"):
            key = getattr(data, role)
            if key not in data.features:
                yield f'data.{role} = "{key}" is not declared: add [data.features.{key}], or change data.{role}.'
    for key, feature in data.features.items():
        if feature.dtype in ("jpeg", "png") and (len(feature.shape) != 3 or feature.shape[2] not in (1, 3)):
            yield (
                f"data.features.{key}.shape = {_toml.show(feature.shape)} must be [height, width, channels] with 1 or "
                f'3 channels, as its dtype is "{feature.dtype}".'
            )
    # A value that no one reads would be silently without effect.
    readers: dict[str, str] = dict.fromkeys(("features", "num_classes"), "tfrecord")
    readers |= dict.fromkeys(("num_examples", "num_features", "noise"), "generated")
    readers |= dict.fromkeys(("directory", "augmentation"), "tfds or tfrecord")
    for key, sources in readers.items():
        if data.source not in sources.split(" or ") and getattr(data, key) != Data.model_fields[key].default:
            yield (
                f"data.{key} = {_toml.show(data.model_dump()[key])} is read only from data.source {sources}, received "
                f'"{data.source}": leave it out, or change the source.'
            )
