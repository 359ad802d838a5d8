"""The sections of a run: their fields with types, limits and defaults."""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, JsonValue

Value = TypeVar("Value")
OrNone = Annotated[Value | None, BeforeValidator(lambda value: None if value == "none" else value)]
Text = Annotated[str, Field(min_length=1)]
ImportPath = Annotated[
    str,
    Field(
        pattern=r"^\w+(\.\w+)+$",
        max_length=1000,
        examples=["tfpar.trainers.regression.Regression"],
        json_schema_extra={"format": "import-path"},
    ),
]
Count = Annotated[int, Field(ge=1)]
Patience = Annotated[int, Field(ge=0)]
Limit = Annotated[float, Field(gt=0)]
Momentum = Annotated[float, Field(gt=0, lt=1)]


A_WEEK_SECONDS = 7 * 24 * 3600  # the longest wait: TensorFlow takes 32-bit milliseconds

# Marks a field that does not change the weights, so that a run may resume with another value.
# `training.epochs` has it because a longer run begins with the steps of a shorter one.
CHANGES_NO_WEIGHT: dict[str, JsonValue] = {"changes_weights": False}


class Section(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """Base class of all sections: frozen, strict types, finite numbers, no unknown keys.

    Mappings inside (`data.features`, `optimizer.settings`) are plain dicts: do not modify them.
    """


class Model(Section):
    """Which model the trainer class builds, and its regularization.

    >>> Model(name="MobileNetV2", dropout=0.2).name
    'MobileNetV2'
    """

    name: Text = Field(
        "cnn", description="Read by the trainer class: cnn, mlp, linear, transformer, or a keras.applications name."
    )
    l1: float = Field(0.0, ge=0, description="Factor of the L1 penalty on kernels.")
    l2: float = Field(0.0, ge=0, description="Factor of the L2 penalty on kernels.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Fraction of units dropped before the last layer; transformer: in every block."
    )
    num_blocks: int = Field(
        4, ge=1, description="transformer: blocks of attention and a perceptron; mlp: hidden layers."
    )
    width: int = Field(
        128, ge=1, description="transformer: features of a position, a multiple of num_heads; mlp: units of a layer."
    )
    num_heads: int = Field(4, ge=1, description="transformer: attention heads of each block.")


class Training(Section):
    """The training loop: its length, the batch size, the precision, and the treatment of gradients.

    >>> Training(epochs=3, global_batch_size=128).precision
    'float32'
    """

    epochs: int = Field(10, ge=1, description="Passes over the training split.", json_schema_extra=CHANGES_NO_WEIGHT)
    global_batch_size: int = Field(64, ge=1, lt=2**31, description="Examples in one step, over all replicas together.")
    steps_per_call: Count | Literal["auto"] = Field(
        "auto",
        description="Steps in one call of the compiled function; auto: as many as take about a tenth of a second.",
        json_schema_extra=CHANGES_NO_WEIGHT,
    )
    precision: Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"] = Field(
        "float32", description="Keras dtype policy."
    )
    jit_compile: bool | Literal["auto"] = Field(
        "auto", description="Compile the step with XLA, slower on CPUs; auto: on GPUs where XLA can, as in Keras."
    )
    fused: bool = Field(True, description="Use TensorFlow's fused kernels in place of Keras' chains of operations.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Steps whose gradients are averaged into one update.")
    clipnorm: OrNone[Limit] = Field(None, description="Largest norm of each gradient.")
    global_clipnorm: OrNone[Limit] = Field(None, description="Largest norm of all gradients.")
    clipvalue: OrNone[Limit] = Field(None, description="Largest size of a gradient's element.")
    ema_momentum: OrNone[Momentum] = Field(None, description="Moving average of the weights with this momentum.")
    ema_overwrite_frequency: OrNone[Count] = Field(None, description="Updates before it replaces the weights.")
    validation_freq: int = Field(1, ge=1, description="Epochs between two validations.")
    nonfinite_loss: Literal["stop", "continue"] = Field(
        "stop",
        description="After a loss that is not finite: stop with the step named, or continue as Keras does.",
        json_schema_extra=CHANGES_NO_WEIGHT,
    )
    checkpoint_seconds: float = Field(
        60.0,
        ge=0,
        description="Least time between two checkpoints; one more at the end.",
        json_schema_extra=CHANGES_NO_WEIGHT,
    )
    keep_checkpoints: int = Field(
        3, ge=1, description="Newest checkpoints that stay on disk.", json_schema_extra=CHANGES_NO_WEIGHT
    )


class Optimizer(Section):
    """A Keras optimizer by name and settings, with warm-up and linear scaling of its learning rate.

    Linear scaling and warm-up follow Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677), section 2.

    >>> Optimizer(name="sgd", learning_rate=0.1, settings={"momentum": 0.9}).settings
    {'momentum': 0.9}
    """

    name: Text = Field("adam", description="Any name that keras.optimizers.get accepts.")
    learning_rate: float = Field(1e-3, gt=0, description="Learning rate, before scaling by base_batch_size.")
    settings: dict[str, bool | int | float | str] = Field({}, description="Arguments for the Keras optimizer class.")
    warmup_steps: int = Field(0, ge=0, description="Updates over which the learning rate rises to its value.")
    base_batch_size: OrNone[Count] = Field(None, description="Scales learning_rate by global_batch_size over this.")


class Callbacks(Section):
    """The callbacks of a run: early stopping, learning rate, best model, TensorBoard, report.

    >>> Callbacks(early_stopping_patience=3).monitor
    'val_loss'
    """

    early_stopping_patience: OrNone[Patience] = Field(None, description="Epochs without improvement before a stop.")
    reduce_learning_rate_patience: OrNone[Patience] = Field(
        None, description="Reduce the learning rate after this many epochs without improvement."
    )
    monitor: Text = Field("val_loss", description="The log that decides about improvement.")
    monitor_mode: Literal["auto", "min", "max"] = Field(
        "auto",
        description='Whether a lower or a higher value of it is better; "auto" suits the loss and metrics of Keras.',
    )
    save_best: OrNone[Text] = Field(
        None,
        description='The log, such as "val_accuracy", whose best epoch\'s model stays in best.keras.',
        json_schema_extra=CHANGES_NO_WEIGHT,
    )
    tensorboard: bool = Field(
        True, description="Write TensorBoard logs into the run directory.", json_schema_extra=CHANGES_NO_WEIGHT
    )
    report: bool = Field(
        True,
        description="Write report.html into the run directory at the end.",
        json_schema_extra=CHANGES_NO_WEIGHT,
    )
    check_replicas_every_steps: OrNone[Count] = Field(
        None,
        description="Steps between two checks that all replicas hold equal weights.",
        json_schema_extra=CHANGES_NO_WEIGHT,
    )

    def watched_logs(self) -> dict[str, str]:
        """Return the logs that decide about improvement, by the setting that names each.

        >>> Callbacks(save_best="val_accuracy").watched_logs()
        {'save_best': 'val_accuracy'}
        """
        has_patience = self.early_stopping_patience is not None or self.reduce_learning_rate_patience is not None
        watched = {"monitor": self.monitor} if has_patience else {}
        return watched if self.save_best is None else {**watched, "save_best": self.save_best}

    def mode_of(self, log: str) -> str:
        """Return the mode of a log: `monitor_mode` for `monitor`, "auto" for any other.

        >>> Callbacks(monitor_mode="min").mode_of("val_accuracy")
        'auto'
        """
        return self.monitor_mode if log == self.monitor else "auto"
