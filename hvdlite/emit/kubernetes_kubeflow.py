"""Jobs for the operators of Kubeflow: a TrainJob with its runtime, and an MPIJob."""

from __future__ import annotations

from hvdlite.emit.kubernetes import NOTE_ON_RESTARTS, ending_together, restarts
from hvdlite.emit.kubernetes_pods import (
    Part,
    check,
    container,
    literal,
    meeting_variables,
    own_variables,
    pod,
    text_of,
)
from hvdlite.emit.request import EmitRequest

_HOSTFILE = "/etc/mpi/hostfile"  # The MPI operator writes it.
_SSH = "/home/mpiuser/.ssh"
_NOTE_ON_SSHD = """\
The image also needs sshd, and a user 1000 called mpiuser, whose .sshd_config lets sshd run as this
user, and whose .ssh/config has its port, as in the images of the MPI operator."""
_SSHD = ["/usr/sbin/sshd", "-De", "-f", "/home/mpiuser/.sshd_config"]


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


def mpijob(request: EmitRequest) -> str:
    """Describe an MPIJob, v2beta1, whose launcher runs hvdlite-run and reaches workers by ssh."""
    check("mpijob", request)
    command = [
        *("hvdlite-run", "-np", str(request.ranks), "--grace", f"{request.grace:g}"),
        *("--hostfile", _HOSTFILE, "--", *map(literal, request.command)),
    ]
    launcher = container("launcher", request, command, own_variables(request))
    worker = container("worker", request, _SSHD)
    described = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": request.name},
        "spec": {
            "slotsPerWorker": request.ranks_per_node,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "sshAuthMountPath": _SSH,
            "mpiImplementation": "OpenMPI",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, request, launcher),
                "Worker": _replicas(request.nodes, request, worker),
            },
        },
    }
    return text_of("mpijob", request, [_NOTE_ON_SSHD], [described])


def _replicas(count: int, request: EmitRequest, one: Part) -> Part:
    return {
        "replicas": count,
        "restartPolicy": "Never",
        "template": {"spec": pod(request, one)},
    }
