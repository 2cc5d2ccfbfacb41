"""`hvdlite-run --emit KIND`: descriptions of a job for cluster software.

Kubernetes: a Job, or a JobSet and a TrainJob of Kubeflow, which start it again. The ranks of a job
cannot come back one by one, because the others cannot go on without them. So the first pod that
fails ends the Job, and all other pods with it. A JobSet then starts all pods again; a plain Job
does not.

Slurm: a batch script. srun starts the ranks, which save and come back after the time limit: Slurm
signals the ranks some time before it. They save, and end with status 75 (`hvd.EXIT_STOPPED`); the
script then queues the job again.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from hvdlite.errors import ArgumentError
from hvdlite.rendezvous.environment import EXIT_STOPPED

Part: TypeAlias = dict[str, Any]

_PORT = 23456  # where rank 0, or node 0, serves; a pod has all ports for itself
_USER = 1000  # the number of the user as whom the program runs, who must not be root
_SPARE_SECONDS = 15  # for the end of a pod beyond the grace of its ranks
_LONGEST_NAME = 40  # the names of pods, which have a longest name themselves, begin with it
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_MOST_RESTARTS = 3
_NOTE_ON_RESTARTS = f"""\
All pods start again after a failure, at most {_MOST_RESTARTS} times; and without a limit after
a disruption, or when the ranks ask for it by status {EXIT_STOPPED} (hvd.EXIT_STOPPED)."""
# When a JobSet starts all of its pods again.
_RESTART_POLICY: Part = {
    "maxRestarts": _MOST_RESTARTS,
    "rules": [
        {
            "name": "disruption",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ],
}
# A node that is drained, or a pod that gives way to another one.
_DISRUPTED: Part = {
    "action": "FailJob",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}
_WARNING_SECONDS = 120  # before the time limit; Slurm may signal up to a minute earlier


@dataclass(frozen=True)
class EmitRequest:
    """A job that cluster software is to run."""

    command: Sequence[str]  # the program of every rank, and its arguments
    ranks: int
    ranks_per_node: int  # the most ranks that a node gets; every node but the last has so many
    name: str = "train"
    image: str | None = None  # the container image with hvdlite and the program
    grace: float = 30.0  # seconds that the ranks have to save something when they are told to stop
    variables: Mapping[str, str] = field(default_factory=dict)  # of every rank, from flags

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ArgumentError(f"-np {self.ranks}: at least one rank is needed")
        if self.ranks_per_node < 1:
            raise ArgumentError(
                f"--ntasks-per-node {self.ranks_per_node}: at least one rank per node is needed"
            )
        if not self.command:
            raise ArgumentError("--emit: say what the ranks run, after all flags")

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def emit(kind: str, request: EmitRequest) -> str:
    """Describe a job; raise ArgumentError if this kind of software cannot run it as it is."""
    kinds = {one.__name__: one for one in (slurm, job, jobset, trainjob)}
    return kinds[kind](request)


def job(request: EmitRequest) -> str:
    """Describe a Job, with the Service by which its pods find each other."""
    _check("job", request)
    name = request.name
    several = request.nodes > 1
    one = _ranks(request, f"{name}-0.{name}:{_PORT}", restarts=False)
    pod = _ending_together(_pod(request, one, name if several else None))
    described = _object("batch/v1", "Job", name, {**_indexed(request), **pod})
    meeting = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": _PORT}],
    }
    service = _object("v1", "Service", name, meeting)
    note = "A pod that fails ends the Job, and nothing starts it again; a JobSet does."
    return _text_of("job", request, [note], [service, described] if several else [described])


def jobset(request: EmitRequest) -> str:
    """Describe a JobSet, whose controller makes the Service."""
    _check("jobset", request)
    name = request.name
    one = _ranks(request, f"{name}-ranks-0-0.{name}:{_PORT}", restarts=True)
    job_of_ranks = {**_indexed(request), **_ending_together(_pod(request, one), "train")}
    spec: Part = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": _RESTART_POLICY,
        "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job_of_ranks}}],
    }
    described = _object("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec)
    return _text_of("jobset", request, [_NOTE_ON_RESTARTS], [described])


def trainjob(request: EmitRequest) -> str:
    """Describe a TrainJob of Kubeflow Trainer v2, with a TrainingRuntime of its own."""
    # The runtime's policy for PyTorch sets the variables PET_*, which hvdlite-run reads.
    _check("trainjob", request)
    name = request.name
    program = [_literal(word) for word in request.command]
    command = ["hvdlite-run", "--nodes", "auto", "--grace", f"{request.grace:g}", "--", *program]
    env = [*_meeting_variables(request, restarts=True), *_own_variables(request)]
    job = _ending_together(_pod(request, _container("node", request, command)), "node")
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {
        "name": "node",
        "replicas": 1,
        "template": {"metadata": {"labels": label}, "spec": job},
    }
    group, kind = "trainer.kubeflow.org", "TrainingRuntime"
    jobs = {"failurePolicy": _RESTART_POLICY, "replicatedJobs": [node]}
    policy = {"numNodes": request.nodes, "torch": {}}
    spec: Part = {"mlPolicy": policy, "template": {"spec": jobs}}
    runtime = _object(f"{group}/v1alpha1", kind, f"{name}-runtime", spec)
    spec = {
        "runtimeRef": {"apiGroup": group, "kind": kind, "name": f"{name}-runtime"},
        "trainer": {
            "image": request.image,
            "command": command,
            "env": env,
            "numNodes": request.nodes,
            "numProcPerNode": request.ranks_per_node,
        },
    }
    described = _object(f"{group}/v1alpha1", "TrainJob", name, spec)
    return _text_of("trainjob", request, [_NOTE_ON_RESTARTS], [runtime, described])


def _object(version: str, kind: str, name: str, spec: Part) -> Part:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _ending_together(one: Part, stops: str | None = None) -> Part:
    """Describe a Job that the first failing pod ends."""
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


def _check(kind: str, request: EmitRequest) -> None:
    """Raise ArgumentError if something is missing that all kinds need."""
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


def _text_of(kind: str, request: EmitRequest, notes: Sequence[str], parts: Sequence[Part]) -> str:
    """Write the parts as YAML, below a comment that says how to use them."""
    lines = [f"A training job with {request.ranks} ranks, from `hvdlite-run --emit {kind}`."]
    if request.nodes > 1:  # A secret does not belong in a file.
        made = f"generic {request.name}-token --from-literal=token=$(openssl rand -hex 32)"
        lines += ["Make the secret of the job first, once:", f"  kubectl create secret {made}"]
    comment = "".join(f"# {line}\n" for line in "\n".join([*lines, *notes]).splitlines())
    return comment + "---\n".join(
        yaml.dump(part, Dumper=_Plain, sort_keys=False, width=1000) for part in parts
    )


class _Plain(yaml.SafeDumper):
    """Writes a part that occurs twice as often as it occurs: a reader need not know anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _constant(name: str, value: object) -> Part:
    return {"name": name, "value": _literal(str(value))}


def _literal(text: str) -> str:
    """Protect a text from Kubernetes: it replaces $(NAME) by the variable NAME, and $$ by $."""
    return text.replace("$", "$$")


def _field(name: str, path: str) -> Part:
    """Describe a variable whose value the pod's own description has."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _own_variables(request: EmitRequest) -> list[Part]:
    own = [_constant(name, value) for name, value in request.variables.items()]
    return [*own, _constant("PYTHONUNBUFFERED", 1)]


def _meeting_variables(request: EmitRequest, restarts: bool) -> list[Part]:
    """Describe how pods find each other; with `restarts`, a JobSet may start them again."""
    if request.nodes == 1:
        return []
    secret = {"name": f"{request.name}-token", "key": "token"}
    token = {"name": "HVDLITE_TOKEN", "valueFrom": {"secretKeyRef": secret}}
    epoch = [_field("HVDLITE_EPOCH", _RESTARTS)] if restarts else []
    return [token, *epoch, _field("HVDLITE_BIND_ADDRESS", "status.podIP")]


def _ranks(request: EmitRequest, rendezvous: str, restarts: bool) -> Part:
    """Describe the container of a pod of an indexed Job; `rendezvous` is that of the first pod.

    With one rank in a pod, the pod runs the program itself. With more, it runs hvdlite-run, which
    starts them; the one in pod 0 is the launcher of all.
    """
    command = [_literal(word) for word in request.command]
    local = ["-np", str(request.ranks_per_node), "--grace", f"{request.grace:g}", "--"]
    numbers: list[Part] = []
    if request.ranks_per_node > 1 and request.nodes > 1:
        where = ["--nodes", str(request.nodes), "--node-rank", "$(NODE_RANK)", "--meet", rendezvous]
        command = ["hvdlite-run", *where, *local, *command]
        numbers = [_field("NODE_RANK", _INDEX)]
    elif request.ranks_per_node > 1:
        command = ["hvdlite-run", *local, *command]
    elif request.nodes > 1:
        numbers = [
            _field("HVDLITE_RANK", _INDEX),
            _constant("HVDLITE_SIZE", request.ranks),
            _constant("HVDLITE_LOCAL_RANK", 0),
            _constant("HVDLITE_LOCAL_SIZE", 1),
            _constant("HVDLITE_RENDEZVOUS", rendezvous),
        ]
    variables = [*numbers, *_meeting_variables(request, restarts), *_own_variables(request)]
    return _container("train", request, command, variables)


def _container(
    name: str, request: EmitRequest, command: Sequence[str], variables: Sequence[Part] = ()
) -> Part:
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


def _pod(request: EmitRequest, one: Part, subdomain: str | None = None) -> Part:
    # The ranks of a pod share memory by /dev/shm, of which containers have 64 MiB by default. The
    # container's program is not process 1, to which the kernel passes no signal without a handler.
    return {
        **({} if subdomain is None else {"subdomain": subdomain}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(request.grace) + _SPARE_SECONDS,
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [one],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


_SCRIPT = """\
#!/bin/bash
# A training job with {ranks} ranks, from `hvdlite-run --emit slurm`. Submit it with sbatch.
# Options of sbatch, such as --time or --gres, may be added here or given on its command line.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ranks}
#SBATCH --ntasks-per-node={ranks_per_node}
# All ranks get this signal so many seconds before the time limit; hvd.stop_on() waits for it.
#SBATCH --signal=USR1@{warning}
# The job may start again, and then goes on with the same output file.
#SBATCH --requeue
#SBATCH --open-mode=append

# Every start has a secret and a number of its own, so that nothing left over can join it.
export HVDLITE_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export HVDLITE_EPOCH=${{SLURM_RESTART_COUNT:-0}}
{exports}
# The ranks get these signals, too. The script stays, to see how they end.
trap : TERM USR1
# Ranks that fail end the others by themselves. srun must not: one rank may save while others ended.
srun --kill-on-bad-exit=0 --wait=0 {command}
status=$?

# 75 says: stopped by request, run me again. A job that is cancelled does not run any more here.
if [ $status = 75 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


def slurm(request: EmitRequest) -> str:
    """Return the batch script; raise ArgumentError for an image, which Slurm does not need."""
    if request.image is not None:
        raise ArgumentError("--image: the ranks of a Slurm job run without a container image")
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in request.variables.items()
    )
    return _SCRIPT.format(
        name=shlex.quote(request.name),
        nodes=request.nodes,
        ranks=request.ranks,
        ranks_per_node=request.ranks_per_node,
        warning=max(_WARNING_SECONDS, math.ceil(request.grace)),
        exports=exports,
        command=shlex.join(request.command),
    )
