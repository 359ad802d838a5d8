"""What the tests share."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before tfpar, which chooses another level and takes that back

import tfpar  # noqa: F401  before Keras, which imports Matplotlib and scikit-learn with itself otherwise
