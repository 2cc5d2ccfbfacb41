"""What `hvdlite-run --emit` prints for Kubernetes is valid, and its pods make one world."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusters import kubernetes_schemas
from harness import base_environment
from hvdlite.errors import ArgumentError
from hvdlite.launch.emit import EmitRequest, emit
from launcher import run_launcher
from multihost.bed import Bed
from patience import HANG

KINDS = ("job", "jobset", "trainjob")
SHAPES = ((1, 1), (4, 4), (4, 2), (3, 1))  # ranks, ranks of a pod
PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
REPORT = Path(__file__).parents[1] / "launch" / "other_launchers" / "report_placement.py"

needs_schemas = pytest.mark.skipif(
    bool(kubernetes_schemas.why_not()), reason=kubernetes_schemas.why_not()
)


def request_of(ranks: int = 4, per_pod: int = 1, **more: Any) -> EmitRequest:
    return EmitRequest(["python", "train.py"], ranks, per_pod, **{"image": "train:1", **more})


def objects(kind: str, request: EmitRequest) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(emit(kind, request)))


def pods(described: Any) -> Iterator[dict[str, Any]]:
    """Give the specifications of all pods in an object."""
    if isinstance(described, dict):
        if "containers" in described:
            yield described
        for value in described.values():
            yield from pods(value)
    if isinstance(described, list):
        for value in described:
            yield from pods(value)


def containers(described: Any) -> Iterator[dict[str, Any]]:
    """Give all that has a command in an object: containers, and the trainer of a TrainJob."""
    if isinstance(described, dict) and "command" in described:
        yield described
    inner = described.values() if isinstance(described, dict) else described
    for value in inner if isinstance(described, dict | list) else ():
        yield from containers(value)


@needs_schemas
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "per_pod"), SHAPES)
def test_emitted_objects_are_valid(kind: str, ranks: int, per_pod: int) -> None:
    for one in objects(kind, request_of(ranks, per_pod, variables={"HVDLITE_LOG_LEVEL": "info"})):
        kubernetes_schemas.check(one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "per_pod"), SHAPES)
def test_every_pod_is_safe_and_ends_in_time(kind: str, ranks: int, per_pod: int) -> None:
    found = [
        pod for one in objects(kind, request_of(ranks, per_pod, grace=50.5)) for pod in pods(one)
    ]
    assert found
    for pod in found:
        assert pod["terminationGracePeriodSeconds"] > 51
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["restartPolicy"] == "Never"
        assert pod["volumes"] == [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
        for one in pod["containers"]:
            assert one["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_is_printed_and_how_to_make_it_is_said(kind: str) -> None:
    text = emit(kind, request_of())
    assert not re.search(r"[0-9a-f]{32}", text)
    told = "kubectl create secret generic train-token --from-literal=token=$(openssl rand -hex 32)"
    assert told in text and "HVDLITE_TOKEN" in text
    assert "HVDLITE_TOKEN" not in emit(kind, request_of(4, 4))  # One pod needs none.


def test_commands_of_pods_with_several_ranks() -> None:
    def command(kind: str, ranks: int, per_pod: int) -> str:
        pod = next(pods(objects(kind, request_of(ranks, per_pod))))
        return " ".join(pod["containers"][0]["command"])

    own = "-np 2 --grace 30 -- python train.py"
    assert command("job", 1, 1) == "python train.py"
    assert command("job", 2, 2) == f"hvdlite-run {own}"
    meet = "hvdlite-run --nodes 2 --node-rank $(NODE_RANK) --meet"
    assert command("job", 4, 2) == f"{meet} train-0.train:23456 {own}"
    assert command("jobset", 4, 2) == f"{meet} train-ranks-0-0.train:23456 {own}"
    auto = "hvdlite-run --nodes auto --grace 30 -- python train.py"
    assert command("trainjob", 4, 2) == auto
    assert objects("trainjob", request_of(4, 2))[1]["spec"]["trainer"]["command"] == auto.split()


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand a text as Kubernetes documents it: $(NAME) is a variable that is there, $$ is $."""
    known = {f"$({name})": value for name, value in variables.items()}
    return re.sub(r"\$\$|\$\([^)]*\)", lambda one: {"$$": "$", **known}.get(one[0], one[0]), text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "per_pod"), SHAPES)
def test_words_and_values_arrive_as_they_were_given(kind: str, ranks: int, per_pod: int) -> None:
    words = ["$(date)", "a$b", "a$$b", "$$(NODE_RANK)", "$(A)", "$", "$$", "$(", "$$$(A", "a: #\n"]
    values = {f"V{index}": word for index, word in enumerate(words)} | {"A": "a"}
    request = EmitRequest(["sh", *words], ranks, per_pod, image="a", variables=values)
    for one in containers(objects(kind, request)):
        variables = {"NODE_RANK": "1"}
        for variable in one.get("env", ()):
            if "value" in variable:
                variables[variable["name"]] = expanded(variable["value"], variables)
        if "env" in one:
            assert variables.items() >= request.variables.items()
        command = [expanded(word, variables) for word in one["command"]]
        assert command[-len(request.command) :] == request.command
        assert "--node-rank" not in command or command[command.index("--node-rank") + 1] == "1"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"image": None}, "--emit job: name the container image"),
        ({"name": "Train_1"}, "--name Train_1: give small letters, digits and hyphens"),
        ({"name": "a" * 41}, "give at most 40 characters"),
        ({"ranks": 5, "per_pod": 2}, "-np 5, --ntasks-per-node 2: all pods of a job have the same"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        emit("job", request_of(**more))


def variables_of(env: list[dict[str, Any]], index: int, address: str, token: str) -> dict[str, str]:
    """Give the variables of a pod the values that Kubernetes would give them."""
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "1",
        "status.podIP": address,
    }
    variables = {}
    for one in env:
        source = one.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "train-token", "key": "token"}
            variables[one["name"]] = token
        else:
            path = source.get("fieldRef", {}).get("fieldPath")
            variables[one["name"]] = one["value"] if path is None else fields[path]
    return variables


def run_pods(
    bed: Bed,
    names: Path,
    host: str,
    command: list[str],
    env: list[dict[str, Any]],
    *more: dict[str, str],
) -> list[str]:
    """Run the container of each pod as a process on a host of its own; return what they print.

    The name of the first pod is known late.

    Args:
        bed: the hosts.
        names: a file that becomes /etc/hosts everywhere.
        host: the name of the first pod.
        command: the command of the container.
        env: its variables.
        more: by pod, variables that another controller sets.
    """
    token = secrets.token_hex(32)
    names.write_text("127.0.0.1 localhost\n")
    own = base_environment()
    own["PYTHONPATH"] = f"{REPORT.parents[2]}:{own.get('PYTHONPATH', '')}"
    running = []
    try:
        for index, address in enumerate(bed.addresses):
            assert bed.run(index, "mount", "--bind", str(names), "/etc/hosts").returncode == 0
            variables = {
                **variables_of(env, index, address, token),
                **dict(*more[index : index + 1]),
            }
            words = [re.sub(r"\$\((\w+)\)", r"{\1}", word).format(**variables) for word in command]
            if words[0] == "hvdlite-run":
                words[:1] = [sys.executable, "-m", "hvdlite.launch"]
            running.append(
                subprocess.Popen(
                    bed.inside(index, *words),
                    env={**own, "OMP_NUM_THREADS": "1", **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        time.sleep(1)
        with names.open("a") as file:
            file.write(f"{bed.addresses[0]} {host}\n")
        done = [one.communicate(timeout=2 * HANG) for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
        for index in range(len(bed.addresses)):
            bed.run(index, "umount", "/etc/hosts")
    assert [one.returncode for one in running] == [0] * len(running), done
    lines = "".join(stdout for stdout, _ in done).splitlines()
    return sorted(re.sub(r"^\[\d+\] ", "", line) for line in lines)


@pytest.mark.parametrize(("kind", "host"), [("job", "train-0"), ("jobset", "train-ranks-0-0")])
def test_pods_with_one_rank_start_without_a_launcher(
    two_hosts: Bed, tmp_path: Path, kind: str, host: str
) -> None:
    request = EmitRequest([sys.executable, str(REPORT)], 2, 1, image="a")
    (one,) = next(pods(objects(kind, request)[-1]))["containers"]
    assert run_pods(two_hosts, tmp_path / "hosts", f"{host}.train", one["command"], one["env"]) == [
        "placement 0 2 1 0 1 0 2",
        "placement 1 2 1 0 1 1 2",
    ]


FOUR = [
    "placement 0 4 6 0 2 0 2",
    "placement 1 4 6 1 2 0 2",
    "placement 2 4 6 0 2 1 2",
    "placement 3 4 6 1 2 1 2",
]


def test_pods_with_several_ranks_start_in_node_mode(two_hosts: Bed, tmp_path: Path) -> None:
    request = EmitRequest([sys.executable, str(REPORT)], 4, 2, image="a")
    (one,) = next(pods(objects("jobset", request)))["containers"]
    names = tmp_path / "hosts"
    assert run_pods(two_hosts, names, "train-ranks-0-0.train", one["command"], one["env"]) == FOUR


def test_pods_of_a_train_job_start_in_node_mode(two_hosts: Bed, tmp_path: Path) -> None:
    """The variables of Kubeflow's policy for PyTorch say the rest."""
    request = EmitRequest([sys.executable, str(REPORT)], 4, 2, image="a")
    _, described = objects("trainjob", request)
    trainer = described["spec"]["trainer"]
    policy = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
    }
    more = [{**policy, "PET_NODE_RANK": str(index)} for index in range(2)]
    names, host = tmp_path / "hosts", "train-node-0-0.train"
    assert run_pods(two_hosts, names, host, trainer["command"], trainer["env"], *more) == FOUR


def test_command_of_the_page_prints_a_job_set() -> None:
    (flags,) = re.findall(r"^hvdlite-run (.*) > train.yaml$", PAGE.read_text(), re.MULTILINE)
    request = EmitRequest(["python", "train.py"], 8, 4, image="example/train:1")
    assert run_launcher(*flags.split()).stdout == emit("jobset", request)
