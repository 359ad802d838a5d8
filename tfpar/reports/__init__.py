"""The report of a run, and the comparison of several: a page and pictures from the files of a run directory."""
