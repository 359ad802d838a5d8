"""Mirrored: one model on several devices of this machine, and a check that it trains as one device does.

Start it with `python examples/mirrored.py`; without GPUs it splits the CPU into `--num_devices` devices. `--epochs 20`
and `--hidden 1024` make it larger. The batches do not divide evenly, and the last one is smaller than the others.
It prints the devices, the table of `tfpar.check_parity`, which ends with "equal to one device", and the accuracy on
images that were held out.
"""

import argparse

import tfpar

import keras  # isort: skip  in this order TensorFlow starts without messages
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--num_devices", type=int, default=2, help="logical CPUs, used where there are no GPUs")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--hidden", type=int, default=32, help="units of the hidden layer")
parser.add_argument("--batch_size", type=int, default=63, help="of all devices together")
parser.add_argument("--save", help="the .keras file to write, which plain Keras loads")
flags = parser.parse_args()

tfpar.use_logical_cpus(flags.num_devices)
import tensorflow as tf  # noqa: E402


def build_model() -> keras.Model:
    layers = [keras.layers.Dense(flags.hidden, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=1.0), loss, metrics=["accuracy"])
    return model


images, labels = load_digits(return_X_y=True)  # 1,797 real images of 8x8 pixels
images = (images / 16).astype("float32")
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).batch(flags.batch_size)

strategy = tfpar.Mirrored()
print(strategy.describe())
report = tfpar.check_parity(build_model, train, strategy)
assert report.equal, report.first_difference

trainer = tfpar.Trainer(build_model, strategy, seed=0)
trainer.fit(train, epochs=flags.epochs, verbose=0)
results = trainer.evaluate(images[1500:], labels[1500:], verbose=0, return_dict=True)
print(f"held out: loss {results['loss']:.4f}, accuracy {results['accuracy']:.4f}")
if flags.save:
    trainer.save(flags.save)
