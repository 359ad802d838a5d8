"""The figures of GPUs as tables for `docs/benchmarks.md`, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gpus.contenders import Turn
from benchmarks.gpus.setting import PEERS, GpuSetting
from benchmarks.gpus.turn import FAILED
from benchmarks.harness import Output

_SPEED = "| Model, batch | Precision | Trainer | examples/s | of Keras | ms a step | first step | memory | loss |"
_PARITY = "| Strategy | largest relative difference from one device | tolerance |"


def as_markdown(turns: Sequence[Turn], outputs: Mapping[GpuSetting, Output]) -> str:
    """Return the tables of speed and of parity, and the names of the settings that were not measured.

    Args:
        turns: All settings.
        outputs: The figures of those that were measured.
    """
    settings = [setting for turn in turns for setting in turn]
    measured = [setting for setting in settings if setting in outputs]
    by_model = sorted(
        (setting for setting in measured if setting.quantity == "speed"),
        key=lambda setting: (setting.workload, setting.precision),
    )
    speed = [_speed(setting, outputs) for setting in by_model]
    parity = [_parity(setting, outputs[setting]) for setting in measured if setting.quantity == "parity"]
    parts = [_table(_SPEED, speed), _table(_PARITY, parity)]
    if missing := [setting.label for setting in settings if setting not in outputs]:
        parts.append(f"Not measured yet, and measured by the same command with --resume: {'; '.join(missing)}.")
    if not any(setting.trainer in PEERS for setting in settings):
        parts.append("PyTorch is not installed.")
    return "\n\n".join(part for part in parts if part)


def _table(header: str, rows: Sequence[str]) -> str:
    rule = "|" + "---|" * (header.count("|") - 1)
    return "\n".join([header, rule, *rows]) if rows else ""


def _speed(setting: GpuSetting, outputs: Mapping[GpuSetting, Output]) -> str:
    output, precision = outputs[setting], setting.precision.replace("float32", "float32 (TF32)")
    row = f"| {setting.workload}, {setting.batch_size} | {precision} | {setting.name} |"
    if FAILED in output:
        return f"{row} {output[FAILED]} | | | | | |"
    # PyTorch begins with other weights, and a CPU does not count its memory.
    peak = f"{output['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in output else ""
    loss = f"{output['loss']:.5g}" if "loss" in output else ""
    speed, ratio = output["examples_per_second"], _of_keras(setting, outputs)
    seconds = f"{1e3 * output['step_seconds']:.1f} | {output['first_step_seconds']:.1f} s"
    return f"{row} {speed:,.0f} | {ratio} | {seconds} | {peak} | {loss} |"


def _of_keras(setting: GpuSetting, outputs: Mapping[GpuSetting, Output]) -> str:
    """Return the speed relative to that of Keras' `fit` as it is by default, which compiles with XLA on one GPU."""
    same = (setting.workload, setting.precision, setting.batch_size)
    for other, output in outputs.items():
        is_default = other.trainer == "keras" and other.jit_compile == "auto"
        if is_default and (other.workload, other.precision, other.batch_size) == same and FAILED not in output:
            return f"{outputs[setting]['examples_per_second'] / output['examples_per_second']:.2f}"
    return ""


def _parity(setting: GpuSetting, output: Output) -> str:
    if FAILED in output:
        return f"| {setting.name} | {output[FAILED]} | |"
    return f"| {setting.name} | {output['largest_difference']:.1e} | {output['tolerance']:.0e} |"
