"""A run as typed data.

`load` reads a `Run` from a TOML file and `section.key=value` overrides, and `dump` writes it back. Each section checks
its own fields; `cross_field_problems` checks the rules between fields. An invalid run is refused before TensorFlow
starts, with the key, the received value and the allowed values.

TOML has no null, so the word "none" unsets a key that may be unset: `data.validation_split = "none"`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, create_model, model_validator

from tfpar.config import data_section, json_schema, strategy_section, toml, validation_errors
from tfpar.config.data_section import Data
from tfpar.config.sections import (
    Callbacks,
    ImportPath,
    Model,
    Optimizer,
    Section,
    Training,
)
from tfpar.config.strategy_section import Auto, Hybrid, Strategy

Options = TypeVar("Options", bound=BaseModel)
NOT_SET = "not set"


class Run(Section):
    """The complete configuration of a run; `Run()` is the default run.

    Raises:
        pydantic.ValidationError: A `ValueError`, if a field is invalid or breaks a rule between fields.

    >>> Run(training=Training(epochs=3)).data.name
    'digits'
    """

    trainer: ImportPath = Field("tfpar.trainers.image_classification.ImageClassification", description="Class to run.")
    seed: int = Field(
        0, ge=0, lt=2**32, description="Seed of the initial weights, the data order and the augmentation."
    )
    model: Model = Field(Model(), description="Which model.")
    data: Data = Field(Data(), description="Which examples.")
    training: Training = Field(Training(), description="How the loop runs.")
    optimizer: Optimizer = Field(Optimizer(), description="How gradients become updates.")
    strategy: Strategy = Field(Auto(), description="On which devices.")
    callbacks: Callbacks = Field(Callbacks(), description="What watches.")
    options: dict[str, Any] = Field({}, description="Settings of the trainer class; see `options_as`.")

    @model_validator(mode="after")
    def _check_across_fields(self) -> "Run":
        problems = cross_field_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def options_as(self, model: type[Options]) -> Options:
        """Return the section `[options]` as a pydantic model of a trainer class, checked like all other sections.

        Keys that the model does not declare are refused, unless its configuration sets `extra`. The word "none" unsets
        a field that may be None.

        Args:
            model: The pydantic model, by convention the attribute `Options` of the trainer class.

        Raises:
            ValueError: If keys or values are invalid; one line for each problem.

        >>> class Perceptron(BaseModel):
        ...     hidden: int = 32
        >>> load(None, ["options.hidden=64"]).options_as(Perceptron)
        Perceptron(hidden=64)
        """
        unset = {key for key, field in model.model_fields.items() if type(None) in get_args(field.annotation)}
        values = {key: None if key in unset and value == "none" else value for key, value in self.options.items()}
        section = create_model("Section", options=(model, ...))
        try:
            checked: Any = section.model_validate(
                {"options": values}, extra=None if "extra" in model.model_config else "forbid"
            )
        except ValidationError as error:
            section_schema = section.model_json_schema(schema_generator=json_schema.Schema)
            raise ValueError(
                "\n".join(validation_errors.sentences(error, {"options": values}, section_schema))
            ) from None
        options: Options = checked.options
        return options


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Run:
    """Read a run from a TOML file and overrides, and check it.

    Args:
        path: The TOML file; None starts from the default run.
        overrides: Assignments `section.key=value` with TOML values; a bare word is a string. The last one wins.

    Returns:
        The checked run. Keys that are not set have their defaults.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file or an override cannot be read, or keys or values are invalid; one line for each problem.

    >>> load(None, ["training.epochs=3", "model.name=linear"]).training.epochs
    3
    """
    tables = toml.read(path) if path is not None else {}
    sections = [name for name, field in Run.model_fields.items() if isinstance(field.default, Section)]
    for override in overrides:
        toml.override(tables, override, sections)
    try:
        return Run.model_validate(tables)
    except ValidationError as error:
        raise ValueError("\n".join(validation_errors.sentences(error, tables, schema()))) from None


def dump(run: Run) -> str:
    """Write a run as TOML with all keys, defaults included; `load` reads the same run back.

    Returns:
        TOML text, ending in a newline; unset keys have the word "none".

    >>> "epochs = 3" in dump(Run(training=Training(epochs=3)))
    True
    """
    return toml.write(run.model_dump())


def changes_weights(key: str) -> bool:
    """Return whether changing a key can change the trained weights; other keys may change when a run resumes.

    Args:
        key: Key with its section, such as "training.epochs".

    >>> changes_weights("training.keep_checkpoints"), changes_weights("optimizer.learning_rate")
    (False, True)
    """
    return bool(json_schema.settings(schema()).get(key, {}).get("changes_weights", True))


def changes(old: Run, new: Run) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two runs differ, with both values; "not set" if a table lacks the key.

    >>> changes(Run(), load(None, ["training.epochs=20"]))
    [('training.epochs', 10, 20)]
    """
    before, after = dict(_flat(_tables(old, new))), dict(_flat(_tables(new, old)))
    pairs = [(key, before.get(key, NOT_SET), after.get(key, NOT_SET)) for key in {**before, **after}]
    # NaN equals itself by its repr only.
    return [(key, value, other) for key, value, other in pairs if value != other and repr(value) != repr(other)]


def _tables(run: Run, other: Run) -> dict[str, Any]:
    """Return a run as tables; if the kinds of strategy differ, without the defaults of the strategy."""
    tables = run.model_dump()
    kind = run.strategy.kind
    if kind != other.strategy.kind:
        tables["strategy"] = {"kind": kind} | run.strategy.model_dump(exclude_defaults=True)
    return tables


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        pair
        for key, value in tree.items()
        for pair in (_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)])
    ]


def schema() -> dict[str, Any]:
    """Return the JSON schema of a run's TOML file, for completion and checks in editors.

    >>> schema()["$defs"]["Training"]["properties"]["epochs"]["minimum"]
    1
    """
    return Run.model_json_schema(schema_generator=json_schema.Schema)


def closest_key(name: str) -> str | None:
    """Return the key that `name` most likely means, with its section; None if none is similar.

    >>> closest_key("lr")
    'optimizer.learning_rate'
    """
    return json_schema.closest_key(name, schema())


def cross_field_problems(run: Run) -> list[str]:
    """Return a sentence for each broken rule between fields: the keys with their values, the rule, the way out.

    Args:
        run: A run whose sections are each valid.

    >>> cross_field_problems(Run())
    []
    """
    return [
        *_training_problems(run),
        *strategy_section.problems(run.strategy),
        *data_section.problems(run.data),
    ]


def _training_problems(run: Run) -> Iterator[str]:
    training, callbacks, strategy = run.training, run.callbacks, run.strategy
    layout = strategy_section.layout_of(strategy)
    num_microbatches = layout.num_replicas * layout.num_microbatches
    size = f"training.global_batch_size = {training.global_batch_size}"
    if layout.num_microbatches > 1 and training.global_batch_size < num_microbatches:
        number = f"strategy.num_microbatches = {layout.num_microbatches}"
        if isinstance(strategy, Hybrid):
            number = (
                f"strategy.num_replicas * strategy.num_microbatches = {layout.num_replicas} * {layout.num_microbatches}"
            )
        yield f"{size} is less than {number}: use fewer micro-batches."
    elif training.global_batch_size < layout.num_replicas:
        yield (
            f"{size} is less than the number of replicas: set it to at least {layout.num_replicas}, or use fewer "
            "devices."
        )
    clips = [f"training.{key}" for key in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(training, key)]
    if len(clips) > 1:
        yield f"Only one way of clipping can apply, received {' and '.join(clips)}: keep one of them."
    if training.ema_overwrite_frequency and not training.ema_momentum:
        frequency = f"training.ema_overwrite_frequency = {training.ema_overwrite_frequency}"
        yield f"{frequency} needs a moving average: set training.ema_momentum, such as 0.99, or leave both out."
    for key, log in callbacks.watched_logs().items():
        if log.startswith("val_") and run.data.validation_split is None:
            yield (
                f'callbacks.{key} = {toml.show(log)} is not measured with data.validation_split = "none": set a split, '
                'or monitor "loss".'
            )
    # With two places for one value, one would silently win.
    own_keys = {"learning_rate": "optimizer.learning_rate", "use_ema": "training.ema_momentum"}
    own_keys |= {key: f"training.{key}" for key in Training.model_fields}
    for key in sorted(own_keys.keys() & run.optimizer.settings.keys()):
        value = toml.show(run.optimizer.settings[key])
        yield f"optimizer.settings.{key} = {value} has its own key: set {own_keys[key]}."
