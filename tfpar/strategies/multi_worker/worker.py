"""One of the workers of a job: messages and votes between them, and their failures."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfpar._compat import random_state
from tfpar.cluster import tf_config
from tfpar.messages.reasons import message_of
from tfpar.strategies.base import Strategy
from tfpar.strategies.distributed import Distributed
from tfpar.strategies.job_roles import refuse_evaluator, warn_of_other_launcher
from tfpar.strategies.multi_worker import all_reduce_choice, preflight
from tfpar.strategies.multi_worker.collectives import AllReduce, Group, order_of_members
from tfpar.strategies.multi_worker.consensus import Consensus
from tfpar.strategies.multi_worker.failures import Failures


class Worker(Strategy):
    """The base of strategies in several processes; alone, a process sends no message.

    Attributes:
        addresses: The addresses of all workers, by rank.
    """

    addresses: Sequence[str]

    def _take_place(self) -> tf_config.Job | None:
        """Take this process's place among the workers from TF_CONFIG or Slurm; return the job, None for one worker.

        Raises:
            ValueError: If this process is an evaluator.
        """
        job = tf_config.from_environment(os.environ)
        refuse_evaluator(job, type(self).__name__)
        if job is None:
            warn_of_other_launcher(os.environ)
        self.addresses = job.addresses if job is not None else ("localhost:0",)
        self.num_workers, self.rank = len(self.addresses), 0 if job is None else job.rank
        return job

    def _connect(self, device: tf.DeviceSpec, facts: dict[str, str]) -> None:
        """Set up the messages between the workers, and refuse those that differ.

        Args:
            device: Any device of this worker, with its job and task.
            facts: Properties that must be equal, in addition to the versions.
        """
        host = device.replace(device_type="CPU", device_index=0).to_string()
        order = order_of_members([host], self.num_workers, self.rank)
        self._hosts = Group([host], self.num_workers, order=order)
        self._failures = Failures(self.rank, self.addresses[self.rank])
        self._consensus = Consensus(self._hosts, self.rank, self.addresses, self._sentence)
        self.require_equal({**preflight.versions(), **facts})
        if self.num_workers > 1:
            # Each worker takes its part of the global batch, so shuffles without a seed must have one order everywhere.
            seed = int(self.broadcast(str(secrets.randbits(31)).encode()))
            if random_state.global_seed() is None:
                tf.random.set_seed(seed)

    def _agreed_all_reduce(self, all_reduce: AllReduce, devices: Sequence[str]) -> Literal["ring", "nccl"]:
        """Choose the all-reduce with all workers, and refuse those that choose another one than the chief.

        Args:
            all_reduce: The argument of the strategy.
            devices: The devices of the replicas of this worker.
        """
        chosen = all_reduce_choice.agreed(all_reduce, devices, self._hosts, self.num_workers)
        self.require_equal({"all_reduce": chosen})
        return chosen

    def digest(self, element: Any) -> Any:
        """Return the digest of the global batch, the last item of an element; None with one worker, and of shards."""
        return element[-1] if self.num_workers > 1 else None

    def has_more(self, upcoming: tf.experimental.Optional, distributed: Distributed) -> tf.Tensor:
        """Return whether every worker has the upcoming element, in whose step each would wait for the others."""
        if not distributed.unknown_end:
            return super().has_more(upcoming, distributed)
        return self._hosts.all_reduce(tf.cast(upcoming.has_value(), tf.int64)) == self.num_workers

    def require_equal(self, facts: dict[str, str]) -> None:
        """Refuse workers that differ in a property, such as a version; all workers must call this.

        Raises:
            ValueError: If a worker's text differs from the chief's; on every worker, with the first different line.
        """
        if self.num_workers == 1:
            return
        chiefs = json.loads(self.broadcast(json.dumps(facts).encode()))
        rank = self._consensus.first(facts != chiefs)
        if rank is None:
            return
        theirs = json.loads(self._consensus.broadcast_from(rank, json.dumps(facts).encode()))
        raise ValueError(
            f"All workers must be equal, and worker {rank} ({self.addresses[rank]}) differs from the chief in "
            f"{'; '.join(preflight.differences(chiefs, theirs))}. Start all of them with the same command, the same "
            "files and the same packages."
        )

    def raising_on_all_workers(self, what: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which workers check their own data; an error of one is raised on all."""
        return contextlib.nullcontext() if self.num_workers == 1 else self._consensus.raising_on_all_workers(what)

    def reported(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a failure of TensorFlow on one worker alone is an error on all, with its reason."""
        return contextlib.nullcontext() if self.num_workers == 1 else self._failures.reported(self.user_message)

    def _sentence(self, error: Exception) -> str:
        is_of_tensorflow = isinstance(error, tf.errors.OpError)
        return self._failures.sentence(error, self.user_message) if is_of_tensorflow else message_of(error)

    def all_reduce_sum(self, values: Sequence[float]) -> np.ndarray:
        """Return the sums of numbers over all workers, which must all call this; outside of a step."""
        return super().all_reduce_sum(values) if self.num_workers == 1 else self._consensus.all_reduce_sum(values)

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the chief's message on every worker; all workers must call this, outside of a step."""
        return super().broadcast(message) if self.num_workers == 1 else self._consensus.broadcast_from(0, message)
