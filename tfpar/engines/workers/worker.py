"""The base class of engines in several processes: connection, agreement, and comparison of the data."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import Literal

import numpy as np
import tensorflow as tf

from tfpar._compat.random_numbers import random_state
from tfpar.cluster import tf_config
from tfpar.engines.distributed import Distributed
from tfpar.engines.engine import Engine
from tfpar.engines.workers import all_reduce_choice
from tfpar.engines.workers.collectives import AllReduce, Group, order_of_members
from tfpar.job import Job, UserMessage
from tfpar.messages.reasons import message_of
from tfpar.workers import preflight
from tfpar.workers.failures import Failures
from tfpar.workers.job_roles import refuse_evaluator, warn_of_other_launcher


class Worker(Engine):
    """Base class of engines in several processes; a single process sends no messages."""

    _hosts: Group  # a device of each worker

    def _connect(self, addresses: tuple[str, ...], rank: int, device: tf.DeviceSpec, facts: dict[str, str]) -> None:
        """Connect to the other workers, and refuse workers that differ.

        Args:
            addresses: Addresses of all workers, by rank.
            rank: Rank of this worker.
            device: Any device of this worker, with its job and task.
            facts: Properties that must be equal on all workers, in addition to the versions.
        """
        host = device.replace(device_type="CPU", device_index=0).to_string()
        num_workers = len(addresses)
        self._hosts = Group([host], num_workers, order=order_of_members([host], num_workers, rank))
        self.job = connected(addresses, rank, self._hosts)
        self.job.require_equal({**preflight.versions(), **facts})
        if num_workers > 1:
            # Each worker takes its rows of the global batch, so shuffles without a seed must have the same order.
            seed = self.job.agree(secrets.randbits(31))
            if random_state.global_seed() is None:
                tf.random.set_seed(seed)

    def _agreed_all_reduce(self, all_reduce: AllReduce, devices: list[str]) -> Literal["ring", "nccl"]:
        """Choose an all-reduce for all workers, and refuse workers with another choice than the chief's."""
        chosen = all_reduce_choice.agreed(all_reduce, devices, self._hosts, self.job.rank)
        self.job.require_equal({"all_reduce": chosen})
        return chosen

    def _between_workers(self, distributed: Distributed) -> Distributed:
        """Compare the elements of all workers, and stop when the first worker runs out of them.

        Args:
            distributed: A dataset whose elements end with the digest of the global batch.
        """
        if self.job.num_workers == 1:
            return distributed

        def have_all(upcoming: tf.experimental.Optional) -> tf.Tensor:
            return self._hosts.all_reduce(tf.cast(upcoming.has_value(), tf.int64)) == self.job.num_workers

        has_more = have_all if distributed.unknown_end else distributed.has_more
        return dataclasses.replace(distributed, has_more=has_more, digest=lambda element: element[-1])


def config_of_job(strategy: str) -> tf_config.JobConfig | None:
    """Return the job described by TF_CONFIG or Slurm; None for a single process.

    Args:
        strategy: Name of the strategy, for messages.

    Raises:
        ValueError: If this process is an evaluator.
    """
    job = tf_config.from_environment(os.environ)
    refuse_evaluator(job, strategy)
    if job is None:
        warn_of_other_launcher(os.environ)
    return job


def addresses_of(job: tf_config.JobConfig | None) -> tuple[str, ...]:
    """Return the addresses of all workers; without a job, that of this process."""
    return ("localhost:0",) if job is None else job.addresses


def connected(addresses: tuple[str, ...], rank: int, hosts: Group) -> Job:
    """Create the job of this process, which communicates by all-reduces between the hosts.

    Args:
        addresses: Addresses of all workers, by rank.
        rank: Rank of this worker.
        hosts: A device of each worker.
    """
    if len(addresses) == 1:
        return Job(addresses)
    failures = Failures(rank, addresses[rank])

    def sentence(error: Exception, user_message: UserMessage) -> str:
        from_tensorflow = isinstance(error, tf.errors.OpError)
        return failures.sentence(error, user_message) if from_tensorflow else message_of(error)

    def all_reduce(values: np.ndarray) -> np.ndarray:
        return np.asarray(hosts.all_reduce(tf.constant(values)).numpy())

    return Job(addresses, rank, all_reduce, sentence, failures.reported)
