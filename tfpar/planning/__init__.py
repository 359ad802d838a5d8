"""The choice of a layout before training: measured costs, predicted steps and memory, ranked rows."""
