"""Ready-to-run Trainer classes: a model, its data, its defaults. They import tfpar, never the reverse."""
