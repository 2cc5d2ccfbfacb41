"""A job for Kubeflow Trainer: a TrainJob with its runtime."""

from __future__ import annotations

from hvdlite.launch.emit.kubernetes import NOTE_ON_RESTARTS, ending_together, restarts
from hvdlite.launch.emit.kubernetes_pods import (
    check,
    container,
    literal,
    meeting_variables,
    own_variables,
    pod,
    text_of,
)
from hvdlite.launch.emit.request import EmitRequest


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
