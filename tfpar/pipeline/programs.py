"""All stages of a model compiled, each for what those before it send and those behind it send back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tfpar.pipeline.graph import Value
from tfpar.pipeline.split import Stage
from tfpar.pipeline.stage import Flow, StageProgram


class Programs(NamedTuple):
    """The compiled stages of a model.

    Args:
        stages: One program each.
        outputs: The model's flat outputs.
        flows: What is known of each value that travels.
    """

    stages: list[StageProgram]
    outputs: tuple[Value, ...]
    flows: dict[Value, Flow]


def compile_stages(
    stages: Sequence[Stage], inputs: dict[Value, Flow], outputs: Sequence[Value], devices: Sequence[str], **options: Any
) -> Programs:
    """Compile the stages of a model, each for what those before it send.

    Args:
        stages: The stages in order.
        inputs: What is known of the model's inputs.
        outputs: The model's flat outputs.
        devices: One a stage.
        **options: As for `StageProgram`.
    """
    flows = dict(inputs)
    programs = []
    for stage, device in zip(stages, devices, strict=True):
        program = StageProgram(stage, [flows[value] for value in stage.inputs], device, **options)
        flows.update(zip(stage.outputs, program.sends, strict=True))
        programs.append(program)
    return Programs(programs, tuple(outputs), flows)


def without_dead_ends(programs: Programs, live: Iterable[Value], **options: Any) -> Programs:
    """Compile again the stages that make what no loss depends on: weights behind that have no gradient, not zero.

    Keras leaves a weight without a gradient alone, and decays one whose gradient is zero.

    Args:
        programs: The compiled stages.
        live: The outputs of the model that the loss sends a gradient for.
        **options: As for `StageProgram`.
    """
    alive, stages = set(live), list(programs.stages)
    for index, program in reversed(list(enumerate(programs.stages))):
        sends = zip(program.stage.outputs, program.sends, strict=True)
        dead = frozenset(value for value, flow in sends if flow.needs_gradient and value not in alive)
        if dead:
            taken = [programs.flows[value] for value in program.stage.inputs]
            stages[index] = StageProgram(program.stage, taken, program.device, dead=dead, **options)
        back = zip(program.stage.inputs, stages[index].sends_back, strict=True)
        alive |= {value for value, goes_back in back if goes_back}
    return programs._replace(stages=stages)
