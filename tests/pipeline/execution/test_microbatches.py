"""The numbers of micro-batches are computed in the process of the stage that takes them."""

from __future__ import annotations

import tensorflow as tf

from tfpar.pipeline.execution.microbatches import HOST, Microbatches, host_of

OTHER = "/job:worker/replica:0/task:1/device:GPU:3"


def test_each_process_computes_the_numbers_for_its_own_stages() -> None:
    host = host_of(OTHER)
    assert host == "/job:worker/replica:0/task:1/device:CPU:0"
    with tf.Graph().as_default():
        microbatches = Microbatches(tf.zeros([7, 2]), 3, hosts=[HOST, host])
        one = microbatches.at(lambda place: 1, host)
        numbers = [one.num_counted, one.size, one.num_examples, one.padded_size, one.part, one.example_weight]
        assert {number.device for number in numbers} == {host}
    here = Microbatches(tf.zeros([7, 2]), 3)[1]
    assert [int(number) for number in (here.num_counted, here.size, here.num_examples, here.padded_size)] == [
        2,
        2,
        7,
        3,
    ]
