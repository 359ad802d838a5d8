"""The picture of a schedule and the table of its stages: content, layout and legibility."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tfpar.pipeline.analysis import timeline_plot
from tfpar.pipeline.analysis.stage_table import StageRow, describe_step, stages_table
from tfpar.pipeline.schedule import Schedule, make
from tfpar.pipeline.schedule.simulator import Durations, Timeline, simulate

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#E4E4E4"


def timeline(schedule: Schedule, seconds: float = 0.01) -> Timeline:
    """Return a step with forward passes of `seconds`, and backward passes of twice that."""
    stages = schedule.num_stages
    once, twice = (seconds,) * stages, (2 * seconds,) * stages
    return simulate(schedule, Durations(once, twice, once, once, transfer_seconds=(0.0,) * (stages - 1)))


def figure_of(schedule: Schedule, measured: Timeline | None = None) -> Figure:
    return timeline_plot.figure(timeline(schedule), measured, schedule)


def laid_out(figure: Figure) -> Figure:
    """Draw a figure and return it, so that its extents are final."""
    FigureCanvasAgg(figure).draw()
    return figure


def legend_labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts() if text.get_text()]


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_planned_step_is_above_the_measured_one_with_their_times() -> None:
    schedule = make("1f1b", 2, 4)
    figure = laid_out(figure_of(schedule, timeline(schedule, seconds=0.02)))
    planned, run = figure.axes
    assert figure.get_suptitle() == "1f1b: 2 stages on 2 devices, 4 micro-batches"
    assert planned.get_title(loc="left") == "as planned: step 150 ms, bubble 20.0 %"
    assert run.get_title(loc="left") == "as run: step 300 ms, bubble 20.0 %"
    assert planned.get_window_extent().y0 > run.get_window_extent().y1
    assert planned.get_xlim() == run.get_xlim() == (0, 300), "one axis for both, in milliseconds"
    assert run.get_xlabel() == "milliseconds"
    assert [label.get_text() for label in run.get_yticklabels()] == ["device 0", "device 1"]


def test_every_action_is_a_box_with_the_index_of_its_microbatch() -> None:
    # 0: F0 F1 .. .. B0 .. F2 B1 .. F3 B2 .. .. .. B3        a column is 10 ms
    # 1: .. F0 B0 .. F1 B1 .. F2 B2 .. F3 B3 .. .. ..
    figure = figure_of(make("1f1b", 2, 4))
    texts = [(text.get_position()[1], text.get_position()[0], text.get_text()) for text in figure.axes[0].texts]
    numbers = {device: [label for row, _, label in sorted(texts) if row == device] for device in (0, 1)}
    assert numbers == {0: list("01021323"), 1: list("00112233")}
    assert {text.get_color() for text in figure.axes[0].texts} == {"white", "black"}, "on blue, on orange"


@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches", "num_devices"),
    [("interleaved", 4, 8, 2), ("1f1b", 8, 32, None)],
)
def test_labels_are_in_their_boxes_and_the_legend_is_below_the_axes(
    name: str, num_stages: int, num_microbatches: int, num_devices: int | None
) -> None:
    schedule = make(name, num_stages, num_microbatches, num_devices)
    figure = laid_out(figure_of(schedule))
    axes = figure.axes[0]
    widths = {}
    for span in timeline(schedule).spans:
        (left, _), (right, _) = axes.transData.transform([(1e3 * span.begin_seconds, 0), (1e3 * span.end_seconds, 0)])
        widths[span.device, round((left + right) / 2)] = right - left
    assert len(axes.texts) == sum(map(len, schedule.actions)), "all are wide enough here"
    for text in axes.texts:
        extent = text.get_window_extent()
        device = round(text.get_position()[1])
        middle = round(axes.transData.transform(text.get_position())[0])
        assert extent.width < widths[device, middle]
    assert figure.legends[0].get_window_extent().y1 < axes.get_tightbbox().y0
    assert figure.legends[0].get_window_extent().y0 >= 0
    assert len({text.get_fontsize() for text in axes.texts}) == 1


def colours(name: str, num_stages: int, num_devices: int) -> set[str]:
    """Return the colours of all bars of a picture."""
    bars = figure_of(make(name, num_stages, 2 * num_devices, num_devices)).axes[0].collections
    return {to_hex(colour).upper() for bar in bars for colour in np.asarray(bar.get_facecolor())}


def test_kinds_of_actions_and_the_bubble_differ_in_colour() -> None:
    assert colours("1f1b", 2, 2) == {BLUE, ORANGE, GREY}
    assert colours("zero_bubble", 2, 2) == {BLUE, ORANGE, GREEN, GREY}


def test_the_legend_names_the_actions_of_the_schedule() -> None:
    bubble = "bubble (no action runs)"
    assert legend_labels(figure_of(make("gpipe", 2, 2))) == ["forward", "backward", bubble]
    assert legend_labels(figure_of(make("zero_bubble", 2, 2))) == [
        "forward",
        "input gradient",
        "weight gradient",
        bubble,
    ]
    assert legend_labels(figure_of(make("interleaved", 4, 4, 2))) == [
        "forward, stages 0 to 1",
        "forward, stages 2 to 3",
        "backward, stages 0 to 1",
        "backward, stages 2 to 3",
        bubble,
    ]


def test_the_file_has_the_returned_bytes(tmp_path: Path) -> None:
    schedule = make("1f1b", 1, 1)
    path = tmp_path / "schedule.png"
    content = timeline_plot.draw(timeline(schedule), timeline(schedule), schedule, path)
    assert content.startswith(b"\x89PNG\r\n")
    assert path.read_bytes() == content


def test_a_step_of_zero_seconds_can_be_drawn() -> None:
    schedule = make("1f1b", 1, 1)
    nothing = timeline(schedule, seconds=0.0)
    figure = laid_out(timeline_plot.figure(nothing, None, schedule))
    assert figure.axes[0].get_title(loc="left") == "as planned: step 0.000 ms, bubble 0.0 %"


# --- the table --------------------------------------------------------------------------------------------------------


def row(**changes: Any) -> StageRow:
    values: dict[str, Any] = {
        "stage": 0,
        "device": "CPU:0",
        "first_layer": "embedding",
        "last_layer": "block_1/attention",
        "num_layers": 12,
        "num_parameters": 1234567,
        "forward_seconds": 0.0123,
        "backward_seconds": 0.1246,
        "memory_bytes": 123_400_000,
        "cut_bytes": 524_288,
    }
    return StageRow(**(values | changes))


def printed(rows: list[StageRow], planned: Timeline | None, schedule: Schedule) -> list[str]:
    return [line.strip() for line in stages_table(rows, planned, schedule).splitlines() if line.strip()]


def test_the_table_has_all_columns_of_each_stage() -> None:
    schedule = make("1f1b", 2, 4)
    last = row(stage=1, device="CPU:1", first_layer="head", last_layer="head", num_layers=1, cut_bytes=None)
    lines = printed([row(), last], timeline(schedule), schedule)
    title, names, units, first, layers, second, layer, *caption = lines
    assert title == "1f1b: 2 stages on 2 devices, 4 micro-batches"
    assert names.split() == ["forward", "backward", "memory", "to", "next"]
    assert units.split() == ["stage", "device", "layers", "parameters", "ms", "ms", "MB", "MB"]
    assert first.split() == ["0", "CPU:0", "12", "1,234,567", "12.3", "125", "123", "0.524"]
    assert layers == "embedding ... block_1/attention"
    assert second.split() == ["1", "CPU:1", "1", "1,234,567", "12.3", "125", "123"]
    assert layer == "head"
    assert " ".join(caption) == "predicted  step 150 ms, bubble 20.0 %: from the times above, the optimizer included"


def test_the_caption_names_what_is_included_and_what_was_not_measured() -> None:
    schedule = make("1f1b", 1, 1)
    table = stages_table([row()], timeline(schedule), schedule, ("the optimizer", "the sums"), ("the rows",))
    assert " ".join(table.split()).endswith(
        "from the times above, the optimizer and the sums included; the rows not measured"
    )


def test_a_long_title_has_two_lines() -> None:
    schedule = make("1f1b", 2, 8).replicated(2)
    first, second, *_ = stages_table([row()], None, schedule, num_workers=2, num_shards=2).splitlines()
    assert first == "1f1b: 2 replicas of 2 stages of 2 shards on 8 devices, 16 micro-batches, on"
    assert second == "  each of 2 workers"


def test_at_eighty_columns_no_line_is_too_long_and_no_layer_name_is_cut() -> None:
    names = {
        "first_layer": "block_1/attention/query/einsum",
        "last_layer": "block_1/attention/output/projection",
    }
    large = {"num_parameters": 9_876_543_210, "memory_bytes": 98_765 * 10**6, "cut_bytes": 98_765 * 10**6}
    lines = printed([row(**names, **large)], None, make("1f1b", 1, 1))
    assert max(map(len, lines)) <= 80, lines
    assert lines[-2:] == [names["first_layer"], f"... {names['last_layer']}"]
    assert "98,765" in lines[-3], "bytes in MB"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(12.3456, "12,346"), (0.12345, "123"), (0.012345, "12.3"), (0.0012345, "1.23"), (1e-5, "0.010")],
)
def test_milliseconds_have_three_digits(seconds: float, expected: str) -> None:
    assert describe_step(Timeline(1, (), seconds, (0,))) == f"step {expected} ms, bubble 100.0 %"
