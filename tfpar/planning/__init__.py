"""Choose a layout before training: list candidates, drop those that cannot fit, measure steps, rank."""
