"""The backend of Keras, which must be TensorFlow's.

Keras 3.15 chooses it in `keras/src/backend/config.py`, which it imports before the backend: also where the import of
Keras fails because JAX or PyTorch is not installed.
"""

from __future__ import annotations

import sys


def require_tensorflow() -> None:
    """Refuse another backend of Keras than TensorFlow, where Keras has been imported or could not be.

    Raises:
        ImportError: If the environment or Keras' settings file chooses another one.
    """
    settings = sys.modules.get("keras.src.backend.config")
    found = "tensorflow" if settings is None else settings.backend()
    if found != "tensorflow":
        raise ImportError(
            f'The backend of Keras must be "tensorflow", received {found!r}: set KERAS_BACKEND=tensorflow before Keras '
            "is imported, or unset it and correct the file ~/.keras/keras.json."
        )
