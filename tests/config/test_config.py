"""The configuration: valid and invalid files and overrides, the sentences for mistakes, and no TensorFlow."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import ROOT
from tfpar import config
from tfpar.config import (
    Callbacks,
    Data,
    Feature,
    Mirrored,
    Model,
    Optimizer,
    Pipeline,
    Run,
    TensorParallel,
    Training,
    bundled_configurations,
    toml,
)
from tfpar.messages import received as received_values

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
RICH_RUN = Run(
    trainer="my.own.Trainer",
    seed=7,
    model=Model(name="MobileNetV2", l2=1e-4),
    data=Data(
        source="tfrecord",
        directory='C:\\data "quoted"\nß',
        validation_split=None,
        features={"image": Feature(dtype="jpeg", shape=(8, 8, 3)), "label": Feature(dtype="int64")},
        augmentation=("flip", "shift"),
        num_classes=3,
    ),
    training=Training(steps_per_call=5, ema_momentum=0.9, ema_overwrite_frequency=10, checkpoint_seconds=0),
    optimizer=Optimizer(name="sgd", settings={"momentum": 0.9, "nesterov": True, "count": 3, "name": "x", "one": 1.0}),
    strategy=Mirrored(devices=("GPU:0", "GPU:1"), all_reduce="nccl", pack_bytes=4 << 20),
    callbacks=Callbacks(monitor="loss", early_stopping_patience=0, tensorboard=False),
)

TABLE = ["data.source=table", "data.directory=/data"]
PYTHON = ["data.source=python", "data.function=my_data.load"]
PIPELINE = ["strategy.kind=pipeline", "strategy.num_stages=2", "strategy.num_microbatches=8"]

HYBRID = ["strategy.kind=hybrid", "strategy.num_replicas=2", *PIPELINE[1:]]


def refusal(*overrides: str, path: str | Path | None = None) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the caller asserts the message
        config.load(path, overrides)
    return str(raised.value)


# What loads


def test_without_file_and_overrides_the_default_run_loads() -> None:
    assert config.load(None) == Run()


def test_digits_toml_spells_out_every_key_of_the_default_run() -> None:
    path = CONFIGS[0].parent / "digits.toml"
    assert config.load(path) == Run()
    assert toml.read(path) == tomllib.loads(config.dump(Run()))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_its_header_says_command_hardware_time_and_result(path: Path) -> None:
    config.load(path)
    header = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    for word in ("Hardware", "Time", "Result"):
        assert any(line.startswith(f"# {word}: ") for line in header), f"{path.name} has no line '# {word}: '"
    assert any(f"--config configs/{path.name}" in line for line in header), f"{path.name} has another file's command"


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        RICH_RUN,
        Run(strategy=Pipeline(num_stages=2, num_microbatches=8, balance=(3, 2))),
        Run(strategy=TensorParallel(num_shards=2, layout={'.*"\\d".*kernel': (None, "model"), "bias": ("model",)})),
        Run(strategy=Pipeline(num_stages=2, num_microbatches=8, num_shards=2, layout={"up/kernel": (None, "model")})),
    ],
    ids=["default", "rich", "pipeline", "rules", "rules for stages"],
)
def test_a_dumped_run_loads_as_the_same_run(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(config.dump(run), encoding="utf-8")
    loaded = config.load(path)
    assert loaded == run
    assert [type(value) for value in loaded.optimizer.settings.values()] == [
        type(value) for value in run.optimizer.settings.values()
    ], "1, 1.0 and true are equal in Python, so their types are compared too"


def test_a_strategy_shows_the_settings_of_its_kind_alone() -> None:
    tables = tomllib.loads(config.dump(config.load(None, PIPELINE)))
    assert tables["strategy"] == {
        **{"kind": "pipeline", "num_stages": 2, "num_microbatches": 8, "schedule": "1f1b", "balance": "time"},
        **{"devices": "none", "num_logical_cpus": 1, "recompute": False, "num_shards": 1, "memory_limit_bytes": "none"},
        **{"layout": "none", "allow_batch_dependent_layers": False, "across_workers": False, "form_seconds": 300.0},
        "silence_seconds": 30.0,
    }


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n[training]\nepochs = 2\nglobal_batch_size = 8\n")
    run = config.load(path, ["training.epochs=3", "training.epochs=4", "seed=5"])
    assert (run.seed, run.training.epochs, run.training.global_batch_size) == (5, 4, 8)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimizer.learning_rate=1e-2", "optimizer", "learning_rate", 0.01),
        ("optimizer.learning_rate=1", "optimizer", "learning_rate", 1.0),
        ("model.name=linear", "model", "name", "linear"),
        ('model.name="linear"', "model", "name", "linear"),
        (" data.train_split = train[:80%] ", "data", "train_split", "train[:80%]"),
        ("data.directory=/data/a=b", "data", "directory", "/data/a=b"),
        ("data.validation_split=none", "data", "validation_split", None),
        ("data.augmentation=['flip']", "data", "augmentation", ("flip",)),
        ("optimizer.settings.momentum=0.9", "optimizer", "settings", {"momentum": 0.9}),
        ("training.steps_per_call=3", "training", "steps_per_call", 3),
        ("callbacks.tensorboard=false", "callbacks", "tensorboard", False),
    ],
)
def test_an_override_is_read_as_a_toml_value_or_a_bare_word(
    override: str, section: str, key: str, value: object
) -> None:
    received = getattr(getattr(config.load(None, [override]), section), key)
    assert received == value
    assert type(received) is type(value)


def test_a_run_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Run().training.epochs = 3  # type: ignore[misc]


def test_schema_describes_every_key_and_knows_none_as_a_word() -> None:
    schema = config.schema()
    keys = [
        (name, key, node) for name, section in schema["$defs"].items() for key, node in section["properties"].items()
    ]
    assert [(name, key) for name, key, node in keys if not node.get("description")] == []
    assert '"null"' not in json.dumps(schema["$defs"]), "TOML has no null, the word is none"


# What is refused: one key


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer=a.py:B",
            'trainer = "a.py:B" must be the path of a module and a name in it, with dots between them, such as '
            '"tfpar.trainers.regression.Regression" (default "tfpar.trainers.image_classification.ImageClassification'
            '").',
        ),
        ("training.epochs=ten", 'training.epochs = "ten" must be an integer of at least 1 (default 10).'),
        ("training.epochs=2.5", "training.epochs = 2.5 must be an integer of at least 1 (default 10)."),
        ("training.epochs=true", "training.epochs = true must be an integer of at least 1 (default 10)."),
        ('training.epochs="10"', 'training.epochs = "10" must be an integer of at least 1 (default 10).'),
        ("callbacks.tensorboard=1", "callbacks.tensorboard = 1 must be true or false (default true)."),
        ("model.name=3", 'model.name = 3 must be a string of length at least 1 (default "cnn").'),
        (
            "training.steps_per_call=0",
            'training.steps_per_call = 0 must be an integer of at least 1 or "auto" (default "auto").',
        ),
        (
            "data.num_classes=1",
            'data.num_classes = 1 must be an integer of at least 2 or "none" (default "none").',
        ),
        (
            "data.normalization=unti",
            'data.normalization = "unti" must be one of "none", "unit", "standard" (default "unit"): did you mean '
            '"unit"?',
        ),
        (
            "data.features.image.dtype=jpg",
            'data.features.image.dtype = "jpg" must be one of "float32", "float64", "int32", "int64", "string", '
            '"jpeg", "png": did you mean "jpeg"?',
        ),
        (
            "data.features.image.shape=[2]",
            'data.features.image.dtype is missing: set it to one of "float32", "float64", "int32", "int64", '
            '"string", "jpeg", "png".',
        ),
        (
            'data.augmentation=["flop"]',
            'data.augmentation = ["flop"] must be a list, each one of "flip", "shift", "brightness" (default []).',
        ),
        (
            'strategy.devices=["gpu:0"]',
            'strategy.devices = ["gpu:0"] must be a list of length at least 1, each a string such as "GPU:0" or '
            '"none" (default "none").',
        ),
        (
            "optimizer.settings.betas=[0.9]",
            "optimizer.settings.betas = [0.9] must be true or false or an integer or a finite number or a string.",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_path_value_and_allowed_values(override: str, message: str) -> None:
    assert refusal(override) == message


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "seed=4294967296",
        "trainer=Regression",
        "model.l1=-0.1",
        "model.dropout=1",
        "model.num_blocks=0",
        "model.width=0",
        "model.num_heads=0",
        "data.context_bytes=0",
        'model.name=""',
        "data.num_examples=0",
        "data.num_features=0",
        "data.noise=-1",
        "data.shuffle_buffer=-1",
        "training.epochs=0",
        "training.global_batch_size=0",
        "training.gradient_accumulation_steps=0",
        "training.clipnorm=0",
        "training.global_clipnorm=-1",
        "training.clipvalue=inf",
        "training.ema_momentum=0",
        "training.ema_momentum=1",
        "training.validation_freq=0",
        "training.checkpoint_seconds=-1",
        "training.checkpoint_seconds=inf",
        "training.keep_checkpoints=0",
        "optimizer.learning_rate=0",
        "optimizer.learning_rate=nan",
        "optimizer.learning_rate=1e400",
        "optimizer.settings.momentum=nan",
        "optimizer.warmup_steps=-1",
        "optimizer.base_batch_size=0",
        "strategy.devices=[]",
        "strategy.silence_seconds=0.5",
        "callbacks.early_stopping_patience=-1",
        "callbacks.reduce_learning_rate_patience=-1",
        "callbacks.check_replicas_every_steps=0",
    ],
)
def test_a_number_or_text_out_of_range_is_refused_by_its_path(override: str) -> None:
    message = refusal(override)
    assert message.startswith(f"{override.partition('=')[0]} = ")
    assert " must be " in message
    assert "\n" not in message


def test_an_unknown_key_names_the_closest_one_and_those_that_are_allowed_as_far_as_they_fit() -> None:
    message = refusal("training.global_batch_sise=64")
    start = (
        "training.global_batch_sise = 64 is not a known setting: "
        "did you mean training.global_batch_size? Allowed here: "
    )
    assert message.startswith(start)
    *shown, end = message.removeprefix(start).split(", ")
    assert shown == list(Training.model_fields)[: len(shown)]
    assert len(shown) > 8
    assert end == "..."
    assert len(message) <= received_values.MAX_SENTENCE


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("lr=0.1", "optimizer.learning_rate"),
        ("training.lr=0.1", "optimizer.learning_rate"),
        ("optimizer.lr=0.1", "optimizer.learning_rate"),
        ("epochs=3", "training.epochs"),
        ("batch_size=8", "training.global_batch_size"),
        ("data.precision=float64", "training.precision"),
        ("optimizer.momentum=0.9", "optimizer.settings.momentum"),
        ("optimiser.name=sgd", "optimizer"),
        ("strategy.kind=mirored", '"mirrored"'),
        ("strategy.kind=MultiWorker", '"multi_worker"'),
        ("data.source=tfrecords", '"tfrecord"'),
    ],
)
def test_a_key_or_value_that_is_abbreviated_misplaced_or_mistyped_is_answered_with_the_right_one(
    override: str, meant: str
) -> None:
    assert f"did you mean {meant}?" in refusal(override)


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("trainig.epochs=3", 'trainig = {"epochs": 3} is not a known setting: did you mean training? Allowed here: '),
        ("zzz=3", "zzz = 3 is not a known setting: rename or remove it. Allowed here: "),
    ],
)
def test_an_unknown_section_is_refused_with_the_known_ones(override: str, start: str) -> None:
    message = refusal(override)
    assert message.startswith(start)
    assert "trainer, seed, model, data, training, optimizer, strategy, callbacks, options" in message


def test_several_problems_are_listed_one_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "training = 3\n[model]\nnmae = 'cnn'\n[optimizer]\nlearning_rate = -1\n[data.features]\nimage = 1\n"
    )
    lines = refusal(path=path).splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "model.nmae",
        "data.features.image",
        "training",
        "optimizer.learning_rate",
    ]
    assert lines[2] == "training = 3 must be a table."


# What is refused: rules between fields


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (
            ["training.global_batch_size=1", "strategy.kind=mirrored", "strategy.num_logical_cpus=2"],
            "training.global_batch_size = 1 is less than the number of replicas: set it to at least 2",
        ),
        (
            ["training.global_batch_size=2", 'strategy.devices=["GPU:0", "GPU:1", "GPU:2"]'],
            "training.global_batch_size = 2 is less than the number of replicas: set it to at least 3",
        ),
        (
            ["training.clipnorm=1.0", "training.clipvalue=0.5"],
            "Only one way of clipping can apply, received training.clipnorm and training.clipvalue",
        ),
        (["training.ema_overwrite_frequency=5"], "training.ema_overwrite_frequency = 5 needs a moving average"),
        (
            ["strategy.num_replicas=2"],
            'strategy.num_replicas = 2 is a setting of strategy.kind = "hybrid" or "tensor_parallel", received "auto": '
            "leave it out, or set one of these kinds.",
        ),
        (
            ["strategy.kind=mirrored", "strategy.num_logical_cpus=2", 'strategy.devices=["GPU:0"]'],
            'strategy.num_logical_cpus = 2 splits the CPU, and strategy.devices = ["GPU:0"] names GPUs: leave one',
        ),
        (
            [
                "strategy.kind=pipeline",
                "strategy.num_stages=2",
                "strategy.num_microbatches=2",
                "strategy.across_workers=true",
                'strategy.devices=["GPU:0", "GPU:1"]',
            ],
            'strategy.devices = ["GPU:0", "GPU:1"] does not fit strategy.across_workers = true: with true, name each',
        ),
        (
            ["strategy.kind=single_device", 'strategy.devices=["GPU:0", "GPU:1"]'],
            'strategy.devices = ["GPU:0", "GPU:1"] is a setting of strategy.kind = "auto", "mirrored", "multi_wo',
        ),
        (
            ["strategy.kind=single_device", "strategy.all_reduce=nccl"],
            'strategy.all_reduce = "nccl" is a setting of strategy.kind = "mirrored", "multi_worker" or "hybrid"',
        ),
        (
            ["strategy.kind=mirrored", "strategy.all_reduce=ring"],
            'strategy.all_reduce = "ring" must be one of "auto", "nccl", "hierarchical_copy", "reduction_to_one_devi',
        ),
        (
            ["strategy.kind=pipeline", "strategy.num_stages=2"],
            'strategy.num_microbatches is missing, which strategy.kind = "pipeline" needs: set it to an integer of at',
        ),
        (
            ["strategy.num_stages=2"],
            'strategy.num_stages = 2 is a setting of strategy.kind = "pipeline" or "hybrid", received "auto": leave it '
            "out, or set one of these kinds.",
        ),
        (
            ["strategy.kind=tensor_parallel", "strategy.num_shards=2", "strategy.recompute=true"],
            'strategy.recompute = true is a setting of strategy.kind = "single_device", "mirrored", "multi_worker", '
            '"pipeline" or "hybrid", received "tensor_parallel": ',
        ),
        ([*PIPELINE, "strategy.all_reduce=nccl"], 'strategy.all_reduce = "nccl" is a setting of strategy.kind = "mi'),
        ([*PIPELINE, "strategy.sync=average"], 'strategy.sync = "average" is a setting of strategy.kind = "multi_w'),
        (
            [*PIPELINE, "strategy.num_stage=2"],
            "strategy.num_stage = 2 is not a known setting: did you mean strategy.num_stages? Allowed here: kind, num",
        ),
        (
            ["strategy.kind=mirrored", "strategy.pack_bytes=0"],
            'strategy.pack_bytes = 0 must be an integer of at least 1 or "none" (default "none").',
        ),
        (
            ["strategy.kind=mirrored", "strategy.num_logical_cpus=0"],
            "strategy.num_logical_cpus = 0 must be an integer of at least 1 and of at most 4096 (default 1).",
        ),
        (
            ["strategy.kind=3"],
            'strategy.kind = 3 must be one of "auto", "single_device", "mirrored", "multi_worker", "pipeline", '
            '"hybrid", "tensor_parallel" (default "auto").',
        ),
        (
            [*HYBRID, "training.global_batch_size=15"],
            "training.global_batch_size = 15 is less than strategy.num_replicas * strategy.num_microbatches = 2 * 8: "
            "use fewer micro-batches.",
        ),
        (
            [*PIPELINE, "strategy.num_replicas=2"],
            'strategy.num_replicas = 2 is a setting of strategy.kind = "hybrid" or "tensor_parallel", received ',
        ),
        (
            [*PIPELINE, "training.global_batch_size=7"],
            "training.global_batch_size = 7 is less than strategy.num_microbatches = 8: use fewer micro-batches.",
        ),
        (
            [*PIPELINE, "strategy.balance=tim"],
            'strategy.balance = "tim" must be one of "time", "flops", "parameters", "memory"',
        ),
        (
            ["data.source=tfrecord", "data.features.image.dtype=float32", "data.features.label.dtype=int64"],
            'data.source = "tfrecord" needs data.directory',
        ),
        (
            ["data.source=tfrecord", "data.directory=/data", "data.features.image.dtype=float32"],
            'data.label_key = "label" is not declared: add [data.features.label]',
        ),
        (
            ["data.source=tfrecord", "data.directory=/data", "data.features.label.dtype=int64"],
            'data.input_key = "image" is not declared: add [data.features.image]',
        ),
        (
            [
                "data.source=tfrecord",
                "data.directory=/data",
                "data.features.image={dtype = 'png', shape = [8, 8]}",
                "data.features.label.dtype=int64",
            ],
            "data.features.image.shape = [8, 8] must be [height, width, channels] with 1 or 3 channels",
        ),
        (["data.num_examples=1000"], "data.num_examples = 1000 is read only from data.source generated"),
        (
            ["data.source=generated", "data.directory=/data"],
            'data.directory = "/data" is read only from data.source tf',
        ),
        (
            ["data.source=python_source"],
            'data.normalization = "unit" is for measured values, but data.source = "python_source" gives bytes: set',
        ),
        (["data.context_bytes=64"], "data.context_bytes = 64 is read only from data.source python_source, received"),
        (["data.num_classes=3"], "data.num_classes = 3 is read only from data.source tfrecord"),
        (
            ["data.source=table"],
            'data.source = "table" needs data.directory: set it to the folder that holds the files.',
        ),
        (["data.source=python"], 'data.source = "python" needs data.function: set it to an import path such as'),
        (
            [*PYTHON, "data.validation_split=all"],
            'data.validation_split = "all" names stored data, but data.source = "python" has none of that name',
        ),
        ([*PYTHON, "data.shard_by=file"], 'data.shard_by = "file" needs stored files, but data.source = "python"'),
        ([*TABLE, "data.columns=['x', 'y', 'x']"], 'data.columns = ["x", "y", "x"] has a name twice'),
        (
            [*TABLE, "data.columns=['label']"],
            'data.label_key = "label" is in data.columns too, and would predict itself',
        ),
        ([*TABLE, "data.class_names=['x']"], 'data.class_names = ["x"] must name at least 2 classes'),
        (
            [*TABLE, "data.class_names=['x', 'y']", "data.num_classes=2"],
            "data.num_classes = 2 is for labels that are numbers, and data.class_names names 2 classes",
        ),
        (
            [*TABLE, "data.validation_share=0.2", "data.validation_split=none"],
            'data.validation_share = 0.2 replaces data.validation_split, received data.validation_split = "none" too: ',
        ),
        ([*TABLE, "data.function=a.b"], 'data.function = "a.b" is read only from data.source python, received "table"'),
        (
            [
                "data.source=image_folder",
                "data.directory=/x",
                "data.crop_to_aspect_ratio=true",
                "data.pad_to_aspect_ratio=true",
            ],
            "data.crop_to_aspect_ratio and data.pad_to_aspect_ratio exclude each other: set one of them.",
        ),
        (["data.image_size=[8, 8]"], "data.image_size = [8, 8] is read only from data.source image_folder"),
        (
            [*TABLE, "data.delimiter=é"],
            'data.delimiter = "é" must be one ASCII character, no quotation mark and no end',
        ),
        ([*TABLE, "data.delimiter='\"'"], 'data.delimiter = "\\"" must be one ASCII character'),
        (["data.delimiter=;"], 'data.delimiter = ";" is read only from data.source table, received "tfds"'),
        (
            ["data.source=generated", "data.normalization=standard"],
            'data.normalization = "standard" is for stored data, but data.source = "generated"',
        ),
        (["data.source=generated", "data.cache=true"], "data.cache = true is read only from data.source tfds or"),
        (
            ["data.source=generated", "data.train_split=all"],
            'data.train_split = "all" is read only from data.source tfds or',
        ),
        (
            ["data.validation_split=none", "callbacks.early_stopping_patience=0"],
            'callbacks.monitor = "val_loss" is not measured',
        ),
        (
            ["optimizer.settings.learning_rate=0.1"],
            "optimizer.settings.learning_rate = 0.1 has its own key: set optimizer.learning_rate.",
        ),
        (
            ["optimizer.settings.clipnorm=1.0"],
            "optimizer.settings.clipnorm = 1.0 has its own key: set training.clipnorm.",
        ),
    ],
)
def test_a_broken_rule_between_fields_is_refused_in_one_sentence(overrides: list[str], start: str) -> None:
    message = refusal(*overrides)
    assert message.startswith(start)
    assert "\n" not in message, "only this rule is broken"


def test_rules_between_fields_hold_for_runs_made_in_python_too() -> None:
    with pytest.raises(ValueError, match=r"training\.clipnorm and training\.global_clipnorm"):
        Run(training=Training(clipnorm=1.0, global_clipnorm=1.0))


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.global_batch_size=2", "strategy.kind=mirrored", "strategy.num_logical_cpus=2"],
        ["strategy.kind=mirrored", "strategy.num_logical_cpus=2", 'strategy.devices=["CPU:0", "CPU:1"]'],
        ["strategy.kind=mirrored", "strategy.num_logical_cpus=2", "strategy.all_reduce=reduction_to_one_device"],
        ["strategy.kind=single_device", "strategy.device=GPU:1"],
        PIPELINE,
        [*PIPELINE, "strategy.balance=[3, 2]", "strategy.schedule=zero_bubble"],
        [*PIPELINE, 'strategy.balance=["block_1"]', "strategy.recompute=true"],
        [*PIPELINE, "training.global_batch_size=8"],
        ["data.validation_split=none", "callbacks.early_stopping_patience=0", "callbacks.monitor=loss"],
        ["training.clipnorm=1", "training.ema_momentum=0.9", "training.ema_overwrite_frequency=1"],
    ],
)
def test_values_at_the_edge_of_a_rule_between_fields_are_allowed(overrides: list[str]) -> None:
    config.load(None, overrides)


# What is refused: files and overrides that cannot be read


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epochs", 'An override must read section.key=value, received "training.epochs": write training.ep'),
        ("=3", 'An override must read section.key=value, received "=3": write training.epochs=3.'),
        ("training.=3", 'An override must read section.key=value, received "training.=3": write training.epochs=3.'),
        ('training."epochs=3', "An override must read section.key=value"),
        (r'training."\q"=3', "An override must read section.key=value"),
        ("training.epochs=", 'The override "training.epochs=" has no value: write training.epochs=value'),
        ("training=3", 'The override "training=3" names the whole section training: set its keys'),
        ("model.name='a", "The override \"model.name='a\" opens a TOML value that is not valid: check 'a."),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(override: str, message: str) -> None:
    assert refusal(override).startswith(message)


@pytest.mark.parametrize(
    ("override", "options"),
    [
        ('options."a.b"=3', {"a.b": 3}),
        ("options.'a=b'.c = 'x=y'", {"a=b": {"c": "x=y"}}),
        (r'options . "tab\t\"".c=[1]', {'tab\t"': {"c": [1]}}),
        ("options.a-b=c=d", {"a-b": "c=d"}),
    ],
)
def test_a_key_of_an_override_is_read_as_in_toml(override: str, options: dict[str, object]) -> None:
    assert config.load(None, [override]).options == options


def test_the_regular_expression_of_a_layout_is_a_key_in_quotes() -> None:
    sharded = ["strategy.kind=tensor_parallel", "strategy.num_shards=2"]
    strategy = config.load(None, [*sharded, 'strategy.layout."dense.*(?=kernel)"=["none", "model"]']).strategy
    assert isinstance(strategy, config.TensorParallel)
    assert strategy.layout == {"dense.*(?=kernel)": (None, "model")}


def test_an_override_of_a_whole_section_replaces_its_table(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[strategy]\nkind = "pipeline"\nnum_stages = 2\nnum_microbatches = 8\n')
    run = config.load(path, ['strategy={kind = "mirrored", num_logical_cpus = 2}'])
    assert run.strategy == config.Mirrored(num_logical_cpus=2)


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n")
    expected = 'The override "seed.x=3" goes below seed, which is a value: set seed itself.'
    assert refusal("seed.x=3", path=path) == expected


def test_a_missing_file_is_refused_and_the_closest_name_suggested(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text("")
    with pytest.raises(FileNotFoundError) as raised:
        config.load(tmp_path / "digist.toml")
    assert str(raised.value) == (
        f'The configuration file "{tmp_path / "digist.toml"}" must exist, found nothing there: did you mean '
        f'"{tmp_path / "digits.toml"}"?'
    )


def test_a_configuration_that_comes_with_tfpar_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bundled_configurations.names() == [path.stem for path in CONFIGS]
    for path in CONFIGS:
        assert config.load(bundled_configurations.find(path.stem)) == config.load(path)
    (tmp_path / "digits").write_text("seed = 7\n")
    assert config.load(bundled_configurations.find("digits")).seed == 7, "a file of that name here comes first"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("digit", r"^There is no configuration 'digit'\. Did you mean digits\? A configuration .* digits_mirrored"),
        ("zzz", r"^There is no configuration 'zzz'\. A configuration is a TOML file or one of "),
        ("digit.toml", r"\"digit\.toml\" must exist, found nothing there: write digits for "),
        ("configs/mnist.toml", r"\"configs/mnist\.toml\" must exist, found nothing there: write mnist for "),
    ],
)
def test_a_configuration_that_is_not_there_is_answered_with_those_that_are(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=said):
        bundled_configurations.find(given)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must exist, found a folder: check the path"):
        config.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"seed = 1\n[training]\nepochs 3\n", "at line 3"),
        (b"seed = 1\nname = [1,\n\n", "at line 3, the end of the file"),
        (b"seed = 1\nname = '\xff'\n", "line 2, is not UTF-8 text: save the file as UTF-8."),
        (b"seed = 1\nseed = 2\n", "at line 2"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_line(content: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    message = refusal(path=path)
    assert message.startswith(f'"{path}"')
    assert part in message
    assert "\n" not in message


# TensorFlow stays away, and what the documentation shows is true


def test_importing_config_imports_no_tensorflow() -> None:
    code = "import sys, tfpar.config; sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras', 'numpy')))"
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": str(root)}
    completed = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=False)
    assert completed.returncode == 0, "tfpar.config must come without TensorFlow, Keras and NumPy"
