"""The rendezvous of the workers of a job before TensorFlow starts, with an error that names the missing workers.

    worker 1   connect ── challenge ── rank, proof ──┐               ┌── proof, "" ── all start TensorFlow
    worker 2   connect ── challenge ── rank, proof ──┤ chief listens ┤
                                                     └ form_seconds ─┴── proof, missing ── all raise the same error

TensorFlow 2.21 cannot do this: its chief waits without a time limit for a missing worker, holding Python's lock, so
that Ctrl-C and SIGTERM have no effect; its workers fail about 20 seconds late. The chief listens on the port that
TensorFlow uses afterwards, so no other port need be open.

Both sides prove that they have the job secret (`job_secret`), by an HMAC over the random challenges of both: without
it a program can neither take a worker's place nor answer for the chief. On a hostile network, connections that send
nothing, or anything else, cost the chief at most a bounded number of open connections.

    connect    called by every worker
    messages   the lines sent, and their proofs
    chief      one poll over all connections
    worker     connects until the chief answers
"""

from tfpar.cluster.rendezvous.connect import connect_workers

__all__ = ["connect_workers"]
