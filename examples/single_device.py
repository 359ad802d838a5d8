"""One device: `tfpar.fit` in place of `model.fit`, with the same weights.

Start it with `python examples/single_device.py`; `--epochs 20` trains longer, `--hidden 1024` a larger model.
It prints the last loss and accuracy of Keras and of tfpar, and the largest relative difference of their weights: at
most 1e-5, the rounding of float32.
"""

import argparse

import tfpar

import keras  # isort: skip  in this order TensorFlow starts without messages
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--hidden", type=int, default=32, help="units of the hidden layer")
parser.add_argument("--batch_size", type=int, default=64)
flags = parser.parse_args()


def build_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(flags.hidden, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


images, labels = load_digits(return_X_y=True)  # 1,797 real images of 8x8 pixels
images = (images / 16).astype("float32")
settings = {"batch_size": flags.batch_size, "epochs": flags.epochs, "shuffle": False, "verbose": 0}

of_keras = build_model()
keras_history = of_keras.fit(images, labels, **settings).history
of_tfpar = build_model()
tfpar_history = tfpar.fit(of_tfpar, images, labels, **settings).history

for name, history in (("keras", keras_history), ("tfpar", tfpar_history)):
    print(f"{name}: loss {history['loss'][-1]:.4f}, accuracy {history['accuracy'][-1]:.4f}")
pairs = zip(of_keras.get_weights(), of_tfpar.get_weights(), strict=True)
difference = max(np.abs(one - other).max() / np.abs(one).max() for one, other in pairs)
print(f"largest relative difference of a weight: {difference:.1e}")
