"""The report of a run and the comparison of several: HTML pages made from the files of a run directory."""
