"""What Kubernetes does with the pods of a manifest, for tests without a cluster."""

from __future__ import annotations

import re
from typing import Any


def environment(container: dict[str, Any], job_name: str, index: int) -> dict[str, str]:
    """Return the variables of a container: set in order, with $(NAME) of those before expanded.

    Args:
        container: The container, as YAML reads it.
        job_name: The name of its JobSet.
        index: The completion index of its pod.
    """
    fields = {
        "metadata.labels['jobset.sigs.k8s.io/jobset-name']": job_name,
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
    }
    variables: dict[str, str] = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        value = fields[source["fieldRef"]["fieldPath"]] if "fieldRef" in source else entry.get("value", "")
        variables[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], name[0]), value)
    return variables


def failure(job: dict[str, Any], code: int, is_disrupted: bool) -> tuple[str, str]:
    """Return the reason and the message with which Kubernetes fails a Job after one of its pods has failed.

    Args:
        job: The specification of the Job, as YAML reads it.
        code: The exit code of the pod's container.
        is_disrupted: Whether the pod was evicted or preempted.
    """
    name = job["template"]["spec"]["containers"][0]["name"]
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        matching = f"matching {rule['action']} rule at index {index}"
        codes = rule.get("onExitCodes", {"containerName": name, "values": []})
        if code in codes["values"] and codes["containerName"] == name:
            return "PodFailurePolicy", f"Container {name} for pod default/a failed with exit code {code} {matching}"
        if is_disrupted and {"type": "DisruptionTarget", "status": "True"} in rule.get("onPodConditions", []):
            return "PodFailurePolicy", f"Pod default/a has condition DisruptionTarget {matching}"
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def action(jobset_spec: dict[str, Any], code: int, is_disrupted: bool = False) -> str:
    """Return what JobSet does after a pod of its only Job has failed.

    Args:
        jobset_spec: The specification of the JobSet, as YAML reads it.
        code: The exit code of the pod's container.
        is_disrupted: Whether the pod was evicted or preempted.
    """
    [job] = jobset_spec["replicatedJobs"]
    reason, message = failure(job["template"]["spec"], code, is_disrupted)
    for rule in jobset_spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return str(rule["action"])
    return "RestartJobSet"
