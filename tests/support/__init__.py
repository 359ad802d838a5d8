"""What the tests share."""

import tfpar  # noqa: F401  before Keras, which imports Matplotlib and scikit-learn with itself otherwise
