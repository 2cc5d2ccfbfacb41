"""Check descriptions of Kubernetes objects strictly, without a cluster: unknown fields are wrong.

Kubernetes' own kinds have published schemas (kubernetes-validate). Those of JobSet and Kubeflow
Trainer are classes (kubeflow-trainer-api), which drop unknown fields in silence, so what they give
back is compared.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

VERSION = "1.33"
_CLASSES = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}


def why_not() -> str:
    """Return why descriptions cannot be checked here; "" if they can."""
    names = ("kubernetes_validate", "kubeflow_trainer_api")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"missing: {', '.join(missing)} (hvdlite[test-clusters] has them)" if missing else ""


def check(described: dict[str, Any]) -> None:
    """Check one object.

    Raises:
        Exception: it is wrong, or has an unknown field.
    """
    kind = described["kind"]
    if kind in _CLASSES:
        _check_class(_CLASSES[kind], described)
    else:
        _check_core(described)
    for name, template in enumerate(_job_templates(described)):
        _check_core(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"j{name}"}} | template
        )


def _check_core(described: dict[str, Any]) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(described, VERSION, strict=True)


def _check_class(name: str, described: dict[str, Any]) -> None:
    models = importlib.import_module("kubeflow_trainer_api.models")
    given_back = getattr(models, name).from_dict(described).to_dict()
    assert given_back == described, f"{name} knows {given_back}"


def _job_templates(described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the templates of Jobs in an object of another kind."""
    spec = described["spec"]
    if described["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    for job in spec.get("replicatedJobs", ()):
        yield {"spec": job["template"]["spec"]}
