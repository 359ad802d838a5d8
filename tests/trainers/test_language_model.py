"""The language model: causal attention, a tied embedding, training, generation, and loading without tfpar."""

import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import command
from tests.support.command import ROOT
from tfpar import config
from tfpar.trainers import recipe
from tfpar.trainers.language_model import LanguageModel, build_model

pytestmark = pytest.mark.usefixtures("logical_cpus", "own_precision")

CONFIG = ROOT / "configs" / "language_model.toml"
TINY = [
    *("model.num_blocks=2", "model.width=16", "model.num_heads=2", "data.context_bytes=12"),
    *("data.train_split=train", "data.validation_split=test", "training.global_batch_size=16"),
]


@pytest.fixture
def own_precision() -> Any:
    """What a test does to Keras' precision ends with it."""
    yield
    recipe.set_precision("float32")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The override that reads forty small files of one line again and again: easy to predict, and not at once."""
    folder = tmp_path_factory.mktemp("sources")
    for i in range(40):
        (folder / f"module_{i}.py").write_text(f"x = {i}\n" + "for i in range(9): print(i)\n" * 5)
    return f"data.directory={folder}"


def model(*overrides: str) -> keras.Model:
    run = config.load(CONFIG, [*TINY, *overrides])
    recipe.set_precision(run.training.precision)
    return build_model(run, run.data.context_bytes)


def numbers(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, [num_rows, 12]).astype("int32")


# What is built


def test_a_position_sees_itself_and_those_before_it_only() -> None:
    network = model("model.dropout=0.1")
    inputs = numbers(2)
    changed = inputs.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    before, after = np.asarray(network(inputs)), np.asarray(network(changed))
    assert before.shape == (2, 12, 256)
    np.testing.assert_array_equal(after[:, :5], before[:, :5])
    assert (np.abs(after[:, 5:] - before[:, 5:]).max(axis=-1) > 0).all(), "every later position is reached"


def test_the_order_of_the_bytes_counts() -> None:
    inputs = numbers(1)
    swapped = inputs.copy()
    swapped[0, [2, 3]] = inputs[0, [3, 2]]
    network = model("model.num_blocks=1")
    difference = np.asarray(network(inputs))[0, -1] - np.asarray(network(swapped))[0, -1]
    assert np.abs(difference).max() > 1e-6, "without positions, the last byte would see a set"


def test_one_matrix_embeds_the_bytes_and_gives_their_logits() -> None:
    network = model()
    of_bytes = [variable for variable in network.trainable_variables if 256 in variable.shape]
    assert [tuple(variable.shape) for variable in of_bytes] == [(256, 16)]
    assert np.abs(network(numbers(1))).max() > 0
    of_bytes[0].assign(np.zeros([256, 16]))
    np.testing.assert_array_equal(network(numbers(1)), 0)


def test_dropout_and_penalties_reach_every_block() -> None:
    network = model("model.dropout=0.2", "model.l2=0.25", "training.precision=float64")
    assert [layer.rate for layer in network.layers if isinstance(layer, keras.layers.Dropout)] == [0.2] * 4
    kernels = [variable.numpy() for variable in network.trainable_variables if variable.name == "kernel"]
    assert len(kernels) == 12, "query, key, value and output of the attention, two of the perceptron"
    assert float(sum(network.losses)) == pytest.approx(0.25 * sum(np.square(kernel).sum() for kernel in kernels))


def test_mixed_precision_computes_blocks_in_half_and_logits_in_float32() -> None:
    network = model("training.precision=mixed_bfloat16")
    assert network(numbers(1)).dtype == network.output.dtype == "float32"
    assert {layer.compute_dtype for layer in network.layers if "block" in layer.name} == {"bfloat16"}
    assert {variable.dtype for variable in network.trainable_variables} == {"float32"}


# What it does


def test_the_metric_is_the_loss_in_bits() -> None:
    inputs, labels = numbers(4), numbers(4)[:, ::-1]
    results = model().evaluate(inputs, labels, verbose=0, return_dict=True)
    assert results["bits_per_byte"] == pytest.approx(results["loss"] / math.log(2), rel=1e-5)
    assert results["bits_per_byte"] == pytest.approx(8, rel=0.05), "at first all 256 bytes are about equally likely"


@pytest.fixture(scope="module")
def untrained(sources: str) -> LanguageModel:
    return LanguageModel(config.load(CONFIG, [*TINY, sources]), tfpar.SingleDevice())


def test_it_continues_a_prompt_of_any_length_repeatably(untrained: LanguageModel) -> None:
    for prompt in (b"d", b"a prompt that is longer than the context"):
        written = untrained.generate(prompt, 20)
        assert written.startswith(prompt)
        assert len(written) == len(prompt) + 20
        assert written == untrained.generate(prompt, 20)
    assert len(set(untrained.generate(b"d", 20, temperature=100.0))) > 10, "all bytes are about equally likely"


def test_near_temperature_zero_it_takes_the_likeliest_byte_each_time(untrained: LanguageModel) -> None:
    written = untrained.generate(b"def", 5, temperature=1e-6)
    for end in range(3, 8):
        window = np.frombuffer(written[:end].ljust(12, b"\0"), np.uint8)[np.newaxis]
        assert written[end] == np.asarray(untrained.model(window))[0, end - 1].argmax()


def test_a_prompt_of_nothing_and_a_temperature_of_zero_are_refused(untrained: LanguageModel) -> None:
    with pytest.raises(ValueError, match="at least one byte, received none"):
        untrained.generate(b"", 5)
    with pytest.raises(ValueError, match=r"temperature must be above 0, received 0\.0"):
        untrained.generate(b"x", 5, temperature=0.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.name=MobileNetV2"],
            'needs model.name = "transformer", received "MobileNetV2": set it, or use another',
        ),
        (
            ["data.source=generated", "data.context_bytes=128", "data.train_split=train", "data.validation_split=none"],
            'needs data.source = "python_source", received "generated"',
        ),
        (["model.width=130"], "model.width = 130 must be a multiple of model.num_heads = 4: set it to 132, or change"),
    ],
)
def test_another_model_or_other_data_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LanguageModel(config.load(CONFIG, overrides), tfpar.SingleDevice())


def test_the_command_trains_below_the_unigram_entropy_prints_a_sample_and_saves_plain_keras(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: str
) -> None:
    call = command.InProcess(capfd, monkeypatch, tmp_path)
    overrides = [*TINY, sources, "training.epochs=3", "optimizer.learning_rate=0.03", "optimizer.warmup_steps=0"]
    outcome = call("--config", str(CONFIG), "--directory", "run", *command.settings(*overrides))
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    said = re.search(r"([\d.]+) bits per byte on the validation text; its unigram entropy is ([\d.]+)\.", outcome.out)
    assert said is not None, outcome.out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert float(said[1]) == pytest.approx(results["val_bits_per_byte"], abs=1e-3)
    assert float(said[1]) < float(said[2]) - 1, "clearly below"
    assert outcome.out.index("continues 'def '") < outcome.out.index("\n\ndef "), "the sample"
    saved = tmp_path / "run" / "model.keras"
    with zipfile.ZipFile(saved) as archive:
        written = archive.read("config.json").decode()
    assert not re.search("tfpar|trainers|bits_per_byte", written), "plain Keras would have to know it"
    loaded = keras.models.load_model(saved)
    assert loaded(numbers(1)).shape == (1, 12, 256)
    assert isinstance(loaded.optimizer, keras.optimizers.Adam), "it can be trained on"
