"""Pipeline: the layers of a model on several devices, every batch in micro-batches, with the weights of one device.

Start it with `python examples/pipeline.py`; without GPUs it splits the CPU into `--num_stages` devices.
`--num_microbatches 8`, `--schedule zero_bubble`, `--hidden 1024` and `--picture schedule.png` change or show the step.
It prints the stages with the predicted step, the last losses of the pipeline and of one device, and the largest
relative difference of their weights: at most 1e-5, the rounding of float32.
"""

import argparse

import tfpar

import keras  # isort: skip  in this order TensorFlow starts without messages
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--num_stages", type=int, default=2)
parser.add_argument("--num_microbatches", type=int, default=4)
parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zero_bubble")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--hidden", type=int, default=32, help="units of each of the four hidden layers")
parser.add_argument("--picture", help="the .png file in which to draw the predicted step")
flags = parser.parse_args()

tfpar.use_logical_cpus(flags.num_stages)


def build_model() -> keras.Model:
    hidden = [keras.layers.Dense(flags.hidden, "relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


images, labels = load_digits(return_X_y=True)  # 1,797 real images of 8x8 pixels
images = (images / 16).astype("float32")

strategy = tfpar.Pipeline(flags.num_stages, flags.num_microbatches, schedule=flags.schedule)
trainer = tfpar.Trainer(build_model, strategy, seed=0)
preview = trainer.preview(images, labels, batch_size=64)
print(preview)
if flags.picture:
    preview.save(flags.picture)

one_device = tfpar.Trainer(build_model, tfpar.SingleDevice(), seed=0)
for name, one in (("pipeline", trainer), ("one device", one_device)):
    history = one.fit(images, labels, batch_size=64, epochs=flags.epochs, verbose=0).history
    print(f"{name}: loss {history['loss'][-1]:.4f}, accuracy {history['accuracy'][-1]:.4f}")
pairs = zip(trainer.model.get_weights(), one_device.model.get_weights(), strict=True)
difference = max(np.abs(one - other).max() / np.abs(other).max() for one, other in pairs)
print(f"largest relative difference of a weight: {difference:.1e}")
