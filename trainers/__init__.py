"""Ready-to-run Trainer classes: a model, its data, its defaults. They import tfpar, never the reverse.

The folder is part of the package as `tfpar.trainers`, through a link in `tfpar/`; nothing imports it as `trainers`.
"""
