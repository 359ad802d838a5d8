"""Attacks on this project: hostile input, damaged files, strangers on the network.

Each module is one attack. CI runs a short, fixed sample of it as a test; `python -m tests.attacks <module>` runs it
for long.
"""
