"""Workers of a job: cluster formation, remote devices, and detection of lost workers."""
