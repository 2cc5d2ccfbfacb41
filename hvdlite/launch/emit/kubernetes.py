"""A Job of Kubernetes itself, and a JobSet, which also starts the job again.

The ranks of a job cannot come back one by one, because the others cannot go on without them. So the
first pod that fails ends the Job, and all other pods with it. A JobSet then starts all pods again;
a plain Job does not.
"""

from __future__ import annotations

from hvdlite.launch.emit.kubernetes_pods import PORT, Part, check, pod, ranks, text_of
from hvdlite.launch.emit.request import EmitRequest
from hvdlite.stop_marks import EXIT_STOPPED

_MOST_RESTARTS = 3
NOTE_ON_RESTARTS = f"""\
All pods start again after a failure, at most {_MOST_RESTARTS} times; and without a limit after
a disruption, or when the ranks ask for it by status {EXIT_STOPPED} (hvd.EXIT_STOPPED)."""
# A node that is drained, or a pod that gives way to another one.
_DISRUPTED: Part = {
    "action": "FailJob",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}


def job(request: EmitRequest) -> str:
    """Describe a Job, with the Service by which its pods find each other."""
    check("job", request)
    name = request.name
    several = request.nodes > 1
    one = ranks(request, f"{name}-0.{name}:{PORT}", restarts=False)
    described = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            **_indexed(request),
            **ending_together(pod(request, one, name if several else None)),
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    note = "A pod that fails ends the Job, and nothing starts it again; a JobSet does."
    return text_of("job", request, [note], [service, described] if several else [described])


def jobset(request: EmitRequest) -> str:
    """Describe a JobSet, whose controller makes the Service."""
    check("jobset", request)
    name = request.name
    one = ranks(request, f"{name}-ranks-0-0.{name}:{PORT}", restarts=True)
    job_of_ranks = {**_indexed(request), **ending_together(pod(request, one), "train")}
    described = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": restarts(),
            "replicatedJobs": [
                {"name": "ranks", "replicas": 1, "template": {"spec": job_of_ranks}}
            ],
        },
    }
    return text_of("jobset", request, [NOTE_ON_RESTARTS], [described])


def restarts() -> Part:
    """Describe when a JobSet starts all of its pods again."""
    return {
        "maxRestarts": _MOST_RESTARTS,
        "rules": [
            {
                "name": "disruption",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }


def ending_together(one: Part, stops: str | None = None) -> Part:
    """Describe the part of a Job by which the first failing pod ends the Job."""
    # Status 75 of the container `stops` means that the ranks want to be started again.
    codes = {"containerName": stops, "operator": "In", "values": [EXIT_STOPPED]}
    stopped = [] if stops is None else [{"action": "FailJob", "onExitCodes": codes}]
    return {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [*stopped, _DISRUPTED]},
        "template": {"spec": one},
    }


def _indexed(request: EmitRequest) -> Part:
    count = request.nodes
    return {"completionMode": "Indexed", "completions": count, "parallelism": count}
