"""One look at a model before the first step: does a part of a batch give the whole?"""
