"""KerasHub: fine-tune a vision transformer on several devices, first its new head, then all of it.

Start it with `python examples/keras_hub_fine_tune.py` after `pip install keras-hub`. It begins with random weights and
a tiny model, so that nothing is downloaded; `--preset vit_base_patch16_224_imagenet` takes a trained one from Kaggle.
It prints the number of parameters that each phase trains, and the loss before and after it, which falls.
"""

import argparse

import tfpar

import keras  # isort: skip  in this order TensorFlow starts without messages
import keras_hub
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--preset", help="of keras_hub.models.ViTImageClassifier; default: a tiny one, not trained")
parser.add_argument("--epochs", type=int, default=2, help="of each phase")
parser.add_argument("--num_images", type=int, default=256, help="at most 1,797")
parser.add_argument("--num_devices", type=int, default=2, help="logical CPUs, used where there are no GPUs")
flags = parser.parse_args()

tfpar.use_logical_cpus(flags.num_devices)
SIZE = 224 if flags.preset else 16


def compile_model(model: keras.Model, learning_rate: float) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])


def build_model() -> keras.Model:
    if flags.preset:
        backbone = keras_hub.models.ViTBackbone.from_preset(flags.preset, image_shape=(SIZE, SIZE, 3))
    else:
        backbone = keras_hub.models.ViTBackbone(
            (SIZE, SIZE, 3), (4, 4), num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64
        )
    backbone.trainable = False
    # Without its preprocessor the model takes batches as they are, on every device.
    model = keras_hub.models.ViTImageClassifier(backbone, num_classes=10, preprocessor=None)
    compile_model(model, 1e-2)
    return model


images, labels = load_digits(return_X_y=True)  # real images of 8x8 pixels
images, labels = images[: flags.num_images].reshape(-1, 8, 8, 1) / 8 - 1, labels[: flags.num_images]
images = keras.ops.image.resize(np.repeat(images, 3, axis=-1).astype("float32"), (SIZE, SIZE)).numpy()

trainer = tfpar.Trainer(build_model, tfpar.Mirrored(), seed=0)
for phase, learning_rate in (("head", None), ("all layers", 1e-3)):
    if learning_rate is not None:
        trainer.model.backbone.trainable = True
        compile_model(trainer.model, learning_rate)  # as in Keras, `trainable` counts from here on
    num_trained = sum(weight.shape.num_elements() for weight in trainer.model.trainable_weights)
    before = trainer.evaluate(images, labels, verbose=0, return_dict=True)["loss"]
    trainer.fit(images, labels, batch_size=64, epochs=flags.epochs, verbose=0)
    after = trainer.evaluate(images, labels, verbose=0, return_dict=True)["loss"]
    print(f"{phase}: {num_trained:,} parameters, loss {before:.4f} before, {after:.4f} after")
