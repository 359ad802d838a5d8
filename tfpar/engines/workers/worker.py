"""One of the workers of a job: how it connects to the others, and the digests that compare what they read."""

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
    """The base of engines in several processes; alone, a process sends no message."""

    _hosts: Group  # one device of each worker

    def _connect(self, addresses: tuple[str, ...], rank: int, device: tf.DeviceSpec, facts: dict[str, str]) -> None:
        """Set up the messages between the workers, and refuse those that differ.

        Args:
            addresses: The addresses of all workers, by rank.
            rank: The rank of this one.
            device: Any device of this worker, with its job and task.
            facts: Properties that must be equal, in addition to the versions.
        """
        host = device.replace(device_type="CPU", device_index=0).to_string()
        num_workers = len(addresses)
        self._hosts = Group([host], num_workers, order=order_of_members([host], num_workers, rank))
        self.job = connected(addresses, rank, self._hosts)
        self.job.require_equal({**preflight.versions(), **facts})
        if num_workers > 1:
            # Each worker takes its part of the global batch, so shuffles without a seed must have one order everywhere.
            seed = self.job.agree(secrets.randbits(31))
            if random_state.global_seed() is None:
                tf.random.set_seed(seed)

    def _agreed_all_reduce(self, all_reduce: AllReduce, devices: list[str]) -> Literal["ring", "nccl"]:
        """Choose the all-reduce with all workers, and refuse those that choose another one than the chief.

        Args:
            all_reduce: The argument of the strategy.
            devices: The devices of the replicas of this worker.
        """
        chosen = all_reduce_choice.agreed(all_reduce, devices, self._hosts, self.job.num_workers)
        self.job.require_equal({"all_reduce": chosen})
        return chosen

    def _between_workers(self, distributed: Distributed) -> Distributed:
        """Compare the elements of all workers, and end with the first worker that runs out.

        Args:
            distributed: A dataset whose elements end in the digest of the global batch.
        """
        if self.job.num_workers == 1:
            return distributed

        def have_all(upcoming: tf.experimental.Optional) -> tf.Tensor:
            return self._hosts.all_reduce(tf.cast(upcoming.has_value(), tf.int64)) == self.job.num_workers

        has_more = have_all if distributed.unknown_end else distributed.has_more
        return dataclasses.replace(distributed, has_more=has_more, digest=lambda element: element[-1])


def config_of_job(strategy: str) -> tf_config.JobConfig | None:
    """Return the job of TF_CONFIG or Slurm for a strategy in several processes; None for one process.

    Args:
        strategy: The name of the strategy.

    Raises:
        ValueError: If this process is an evaluator.
    """
    job = tf_config.from_environment(os.environ)
    refuse_evaluator(job, strategy)
    if job is None:
        warn_of_other_launcher(os.environ)
    return job


def addresses_of(job: tf_config.JobConfig | None) -> tuple[str, ...]:
    """Return the addresses of all workers; that of this process alone without a job."""
    return ("localhost:0",) if job is None else job.addresses


def connected(addresses: tuple[str, ...], rank: int, hosts: Group) -> Job:
    """Return the job of this process, whose messages are all-reduces between the hosts.

    Args:
        addresses: The addresses of all workers, by rank.
        rank: The rank of this one.
        hosts: One device of each worker.
    """
    if len(addresses) == 1:
        return Job(addresses)
    failures = Failures(rank, addresses[rank])

    def sentence(error: Exception, user_message: UserMessage) -> str:
        is_of_tensorflow = isinstance(error, tf.errors.OpError)
        return failures.sentence(error, user_message) if is_of_tensorflow else message_of(error)

    def all_reduce(values: np.ndarray) -> np.ndarray:
        return np.asarray(hosts.all_reduce(tf.constant(values)).numpy())

    return Job(addresses, rank, all_reduce, sentence, failures.reported)
