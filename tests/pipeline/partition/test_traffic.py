"""The bytes between the machines of a grid, and the order of its devices with fewer."""

from __future__ import annotations

import keras
import pytest
from keras import layers

from tfpar.pipeline.graph.tracing import trace
from tfpar.pipeline.partition.stages import split_graph
from tfpar.pipeline.partition.traffic import Traffic, sort_by_traffic, traffic

LENT = [[f"/job:worker/replica:0/task:{rank}/device:CPU:{index}" for index in (0, 1)] for rank in (0, 1)]
STAGES_TOGETHER = [[LENT[0][0], LENT[0][1]], [LENT[1][0], LENT[1][1]]]
REPLICAS_TOGETHER = [[LENT[0][0], LENT[1][0]], [LENT[0][1], LENT[1][1]]]


def skipping() -> keras.Model:
    """Three layers of 4 units, the input of the second also read by the third."""
    image = keras.Input((4,))
    first = layers.Dense(4, use_bias=False)(image)
    second = layers.Dense(4, use_bias=False)(first)
    return keras.Model(image, layers.Dense(4, use_bias=False)(layers.Add()([first, second])))


def test_activations_cross_once_to_each_device_and_their_gradients_back() -> None:
    model = skipping()
    graph = trace(model)
    three = [f"/job:worker/task:{rank}/device:GPU:0" for rank in (0, 1, 2)]
    # 16 bytes an example: the first stage to both others, the second to the third, each there and back.
    assert traffic(model, graph, split_graph(graph, [1, 1, 2]), [three], 10) == Traffic(10 * 3 * 2 * 16, 0)
    # All on the machine of worker 1, which receives the inputs of the model from worker 0.
    other = [f"/job:worker/task:1/device:GPU:{index}" for index in (0, 1, 2)]
    assert traffic(model, graph, split_graph(graph, [1, 1, 2]), [other], 10) == Traffic(10 * 16, 0)


def test_each_replica_on_another_machine_sends_gradients_and_receives_weights() -> None:
    model = skipping()
    graph = trace(model)
    stages = split_graph(graph, [1, 3])
    # The second half of the inputs; 3 weights of 64 bytes, there and back.
    assert traffic(model, graph, stages, STAGES_TOGETHER, 10) == Traffic(5 * 16, 2 * 3 * 64)
    assert traffic(model, graph, stages, REPLICAS_TOGETHER, 10) == Traffic(10 * 2 * 16, 0)


@pytest.mark.parametrize(("num_examples", "first"), [(10, REPLICAS_TOGETHER), (100, STAGES_TOGETHER)])
def test_the_order_depends_on_the_batch(num_examples: int, first: list[list[str]]) -> None:
    model = skipping()
    graph = trace(model)
    grids = [STAGES_TOGETHER, REPLICAS_TOGETHER]
    found = sort_by_traffic(model, graph, split_graph(graph, [1, 3]), grids, num_examples)
    assert found[0].devices == first
    assert found[0].traffic.total_bytes < found[1].traffic.total_bytes
