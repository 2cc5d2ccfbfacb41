"""A Job of Kubernetes itself, and a JobSet, which also starts the job again.

The ranks of a job cannot come back one by one, because the others cannot go on without them. So the
first pod that fails ends the Job, and all other pods with it. A JobSet then starts all pods again;
a plain Job does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import yaml

from hvdlite.errors import ArgumentError
from hvdlite.launch.emit import EmitRequest
from hvdlite.rendezvous.environment import EXIT_STOPPED

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


Part: TypeAlias = dict[str, Any]

PORT = 23456  # where rank 0, or node 0, serves; a pod has all ports for itself
USER = 1000  # the number of the user as whom the program runs, who must not be root
_SPARE_SECONDS = 15  # for the end of a pod beyond the grace of its ranks
_LONGEST_NAME = 40  # the names of pods, which have a longest name themselves, begin with it
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def check(kind: str, request: EmitRequest) -> None:
    """Check what all kinds need."""
    # Raises ArgumentError if there is no image, or Kubernetes does not take the name, or nodes
    # would have different numbers of ranks.
    if request.image is None:
        raise ArgumentError(
            f"--emit {kind}: name the container image with hvdlite and your program, by --image"
        )
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", request.name):
        raise ArgumentError(
            f"--name {request.name}: give small letters, digits and hyphens, and a letter first; "
            "it becomes a name in the cluster's DNS"
        )
    if len(request.name) > _LONGEST_NAME:
        raise ArgumentError(
            f"--name {request.name}: give at most {_LONGEST_NAME} characters; the names of pods, "
            "which are limited, begin with it"
        )
    if request.ranks % request.ranks_per_node:
        raise ArgumentError(
            f"-np {request.ranks}, --ntasks-per-node {request.ranks_per_node}: all pods of a "
            f"{kind} have the same number of ranks; give a multiple"
        )


def text_of(kind: str, request: EmitRequest, notes: Sequence[str], parts: Sequence[Part]) -> str:
    """Write the parts as YAML, below a comment that says how to use them."""
    first = f"A training job with {request.ranks} ranks, from `hvdlite-run --emit {kind}`."
    secret = _notes_on_secret(request.name) if _asks_for_token(parts) else []
    comment = "".join(f"# {line}\n" for line in "\n".join([first, *secret, *notes]).splitlines())
    return comment + "---\n".join(
        yaml.dump(part, Dumper=_Plain, sort_keys=False, width=1000) for part in parts
    )


class _Plain(yaml.SafeDumper):
    """Writes a part that occurs twice as often as it occurs: a reader need not know anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that no part refers to another one."""
        return True


def _asks_for_token(part: Any) -> bool:
    if isinstance(part, dict):
        return part.get("name") == "HVDLITE_TOKEN" or any(map(_asks_for_token, part.values()))
    return isinstance(part, list | tuple) and any(map(_asks_for_token, part))


def _notes_on_secret(name: str) -> list[str]:
    """Say how to make the secret, which does not belong in a file."""
    made = f"generic {name}-token --from-literal=token=$(openssl rand -hex 32)"
    return ["Make the secret of the job first, once:", f"  kubectl create secret {made}"]


def constant(name: str, value: object) -> Part:
    """Describe a variable with a value that is known now."""
    return {"name": name, "value": literal(str(value))}


def literal(text: str) -> str:
    """Protect a text from Kubernetes: it replaces $(NAME) by the variable NAME, and $$ by $."""
    return text.replace("$", "$$")


def field(name: str, path: str) -> Part:
    """Describe a variable whose value the pod's own description has."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def token(request: EmitRequest) -> Part:
    """Describe the variable with the job's secret."""
    chosen = {"name": f"{request.name}-token", "key": "token"}
    return {"name": "HVDLITE_TOKEN", "valueFrom": {"secretKeyRef": chosen}}


def own_variables(request: EmitRequest) -> list[Part]:
    """Describe the variables that flags of hvdlite-run set for the ranks."""
    own = [constant(name, value) for name, value in request.variables.items()]
    return [*own, constant("PYTHONUNBUFFERED", 1)]


def meeting_variables(request: EmitRequest, restarts: bool) -> list[Part]:
    """Describe the variables that pods need to find each other; none if there is one pod."""
    # `restarts` says whether a JobSet may start the pods again; a label of the pod counts the
    # starts.
    if request.nodes == 1:
        return []
    epoch = [field("HVDLITE_EPOCH", _RESTARTS)] if restarts else []
    return [token(request), *epoch, field("HVDLITE_BIND_ADDRESS", "status.podIP")]


def ranks(request: EmitRequest, rendezvous: str, restarts: bool) -> Part:
    """Describe the container of a pod of an indexed Job, whose number is that of the pod."""
    # With one rank in a pod, the pod runs the program itself. With more, it runs hvdlite-run, which
    # starts them; the one in pod 0 is the launcher of all.
    # `rendezvous` is "host:port" of the first pod.
    command = [literal(word) for word in request.command]
    local = ["-np", str(request.ranks_per_node), "--grace", f"{request.grace:g}", "--"]
    numbers: list[Part] = []
    if request.ranks_per_node > 1 and request.nodes > 1:
        where = ["--nodes", str(request.nodes), "--node-rank", "$(NODE_RANK)", "--meet", rendezvous]
        command = ["hvdlite-run", *where, *local, *command]
        numbers = [field("NODE_RANK", _INDEX)]
    elif request.ranks_per_node > 1:
        command = ["hvdlite-run", *local, *command]
    elif request.nodes > 1:
        numbers = [
            field("HVDLITE_RANK", _INDEX),
            constant("HVDLITE_SIZE", request.ranks),
            constant("HVDLITE_LOCAL_RANK", 0),
            constant("HVDLITE_LOCAL_SIZE", 1),
            constant("HVDLITE_RENDEZVOUS", rendezvous),
        ]
    variables = [*numbers, *meeting_variables(request, restarts), *own_variables(request)]
    return container("train", request, command, variables)


def container(
    name: str, request: EmitRequest, command: Sequence[str], variables: Sequence[Part] = ()
) -> Part:
    """Describe the container of a pod."""
    return {
        "name": name,
        "image": request.image,
        "command": list(command),
        **({"env": list(variables)} if variables else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }


def pod(request: EmitRequest, one: Part, subdomain: str | None = None) -> Part:
    """Describe a pod with one container."""
    # The ranks of a pod share memory by /dev/shm, of which containers have 64 MiB by default. The
    # container's program is not process 1, to which the kernel passes no signal without a handler.
    return {
        **({} if subdomain is None else {"subdomain": subdomain}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(request.grace) + _SPARE_SECONDS,
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [one],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def trainjob(request: EmitRequest) -> str:
    """Describe a TrainJob of Kubeflow Trainer v2, with a TrainingRuntime of its own."""
    # The runtime's policy for PyTorch sets the variables PET_*, which hvdlite-run reads. A user may
    # not set them.
    check("trainjob", request)
    name = request.name
    program = [literal(word) for word in request.command]
    command = ["hvdlite-run", "--nodes", "auto", "--grace", f"{request.grace:g}", "--", *program]
    env = [*meeting_variables(request, restarts=True), *own_variables(request)]
    job = ending_together(pod(request, container("node", request, command)), "node")
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": f"{name}-runtime"},
        "spec": {
            "mlPolicy": {"numNodes": request.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": restarts(),
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "replicas": 1,
                            "template": {"metadata": {"labels": label}, "spec": job},
                        }
                    ],
                }
            },
        },
    }
    described = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": f"{name}-runtime",
            },
            "trainer": {
                "image": request.image,
                "command": command,
                "env": env,
                "numNodes": request.nodes,
                "numProcPerNode": request.ranks_per_node,
            },
        },
    }
    return text_of("trainjob", request, [NOTE_ON_RESTARTS], [runtime, described])
