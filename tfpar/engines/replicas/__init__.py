"""The steps of replicas: one program, with collectives inside the step."""
