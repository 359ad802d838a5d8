"""MultiWorker: several processes train one model, and resume from a checkpoint after a failure or Ctrl-C.

Start it with `python -m tfpar.launch --num_workers 2 -- examples/multi_worker.py`; `--epochs 20` and `--hidden 1024`
after the script's name make it larger, `--checkpoints FOLDER` says where to save. Run the same command again, also with
another number of workers, to resume.
The chief prints the number of workers, the last loss and accuracy, and the largest relative difference of its weights
from one device: at most 1e-5, the rounding of float32.
"""

import argparse

import tfpar

import keras  # isort: skip  in this order TensorFlow starts without messages
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--hidden", type=int, default=32, help="units of the hidden layer")
parser.add_argument("--batch_size", type=int, default=64, help="of all workers together")
parser.add_argument("--checkpoints", help="the folder to write checkpoints into, and to resume from")
flags = parser.parse_args()

strategy = tfpar.MultiWorker()  # before anything that starts TensorFlow: forms the cluster


def build_model() -> keras.Model:
    layers = [keras.layers.Dense(flags.hidden, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


images, labels = load_digits(return_X_y=True)  # 1,797 real images of 8x8 pixels
images = (images / 16).astype("float32")
settings = {"batch_size": flags.batch_size, "epochs": flags.epochs, "verbose": 0}

trainer = tfpar.Trainer(build_model, strategy, seed=0)
checkpoints = tfpar.Checkpoints(flags.checkpoints) if flags.checkpoints else None
# With Ctrl-C or SIGTERM all workers save and stop at the same step.
history = trainer.fit(images, labels, **settings, checkpoints=checkpoints).history

if strategy.is_chief and history:
    keras.utils.set_random_seed(0)
    model = build_model()
    tfpar.fit(model, images, labels, **settings)
    print(f"{strategy.num_workers} workers: loss {history['loss'][-1]:.4f}, accuracy {history['accuracy'][-1]:.4f}")
    pairs = zip(trainer.model.get_weights(), model.get_weights(), strict=True)
    difference = max(np.abs(one - other).max() / np.abs(other).max() for one, other in pairs)
    print(f"largest relative difference of a weight: {difference:.1e}")
