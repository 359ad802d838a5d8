"""The rendezvous of all workers before TensorFlow starts, which names the missing workers in its error.

    worker 1   connect ── challenge ── rank, proof ──┐               ┌── proof, "" ── all start TensorFlow
    worker 2   connect ── challenge ── rank, proof ──┤ chief listens ┤
                                                     └ form_seconds ─┴── proof, missing ── all raise the same error

TensorFlow 2.21 cannot do this: its chief waits for missing workers without a time limit and holds the GIL, so that
Ctrl-C and SIGTERM have no effect; its workers fail about 20 seconds late. The chief listens on the port that TensorFlow
uses afterwards, so no other port needs to be open.

Both sides prove that they know the job secret (`job_secret`) with an HMAC over both random challenges: without it, a
program can neither impersonate a worker nor the chief. On a hostile network, other connections cost the chief at most a
bounded number of open sockets.

    connect    entry point, called by every worker
    messages   the protocol and its proofs
    chief      one poll over all connections
    worker     connects until the chief answers
"""

from tfpar.cluster.rendezvous.connect import connect_workers

__all__ = ["connect_workers"]
