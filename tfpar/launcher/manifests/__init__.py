"""Templates that start a job on a cluster: a Slurm batch script, and Kubernetes manifests.

    slurm_script   a batch script for sbatch
    jobset         a JobSet, and the pods that a JobSet and a TrainingRuntime have in common
    trainjob       a TrainingRuntime and a TrainJob of Kubeflow Trainer v2
    tfjob          a TFJob of Kubeflow's Training Operator v1, legacy
    pods           the container of a worker, and who may connect to it
    arguments      checks of the arguments of all of them

`python -m tfpar.launch --print slurm|jobset|trainjob|tfjob` prints them for the user to complete. All these systems
stop workers with SIGTERM: all workers save at the same step, and the next start resumes from that checkpoint.
"""

from tfpar.launcher.manifests.jobset import jobset_manifest
from tfpar.launcher.manifests.slurm_script import slurm_script
from tfpar.launcher.manifests.tfjob import tfjob_manifest
from tfpar.launcher.manifests.trainjob import trainjob_manifest

__all__ = ["jobset_manifest", "slurm_script", "tfjob_manifest", "trainjob_manifest"]
