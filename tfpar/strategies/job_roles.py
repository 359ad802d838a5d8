"""What a process of a job may do by its role."""

from __future__ import annotations

from tfpar.cluster import tf_config


def refuse_evaluator(job: tf_config.Job | None, name: str) -> None:
    """Refuse to train in the evaluator of a job, which no other process waits for.

    Args:
        job: The job; None for none.
        name: The name of the strategy.

    Raises:
        ValueError: If this process is an evaluator.
    """
    if job is not None and job.role == "evaluator":
        raise ValueError(
            f"{name} trains with the chief and the workers, and TF_CONFIG makes this process an evaluator. Train "
            "nothing here: python -m tfpar.train evaluates the chief's checkpoints in such a process."
        )
