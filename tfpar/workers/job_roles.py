"""Checks of a process's role in its job."""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.cluster import tf_config
from tfpar.messages import user_warnings
from tfpar.messages.received import quoted

# The variables in which torchrun, Open MPI and other MPIs set the number of processes.
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def refuse_evaluator(job: tf_config.JobConfig | None, name: str) -> None:
    """Refuse to train in an evaluator.

    Args:
        job: The job of this process, if any.
        name: The name of the strategy.

    Raises:
        ValueError: If this process is an evaluator.
    """
    if job is not None and job.role == "evaluator":
        raise ValueError(
            f"{name} trains with the chief and the workers, and TF_CONFIG makes this process an evaluator. Train "
            "nothing here: python -m tfpar.train evaluates the chief's checkpoints in such a process."
        )


def warn_of_other_launcher(environment: Mapping[str, str]) -> None:
    """Warn if another launcher started several processes without TF_CONFIG: each would train its own model.

    Args:
        environment: Environment variables of a process without a job, such as `os.environ`.

    Example:
        >>> warn_of_other_launcher({"WORLD_SIZE": "1"})
    """
    sizes = {name: environment[name] for name in _SIZES if environment.get(name, "1") not in ("", "0", "1")}
    for name, size in list(sizes.items())[:1]:
        user_warnings.warn(
            f"This process trains a model of its own: {name}={quoted(size)} counts several processes, and TF_CONFIG, "
            "which names the workers, is not set. Start the workers with python -m tfpar.launch, or set TF_CONFIG in "
            "each."
        )
