"""Ready-to-run trainer classes: a model, its data and its defaults. They import tfpar, never the reverse.

A link in `tfpar/` makes this folder importable as `tfpar.trainers`.
"""
