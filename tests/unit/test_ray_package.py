"""`hvdlite.ray` without a cluster: it imports no Ray, says what is missing, checks arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, ClassVar

import pytest

from hvdlite.errors import ArgumentError, UnsupportedError
from hvdlite.launch.elastic.discovery import DiscoveryError
from hvdlite.ray import RayExecutor, elastic, run
from hvdlite.ray.elastic import RayHosts
from hvdlite.ray.group import Demand


def answer(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_import_leaves_ray_alone() -> None:
    assert answer("import sys, hvdlite.ray; print('ray' in sys.modules)").strip() == "False"


@pytest.mark.parametrize("use", ["run(print, num_workers=1)", "HvdliteTrainer(print)"])
def test_missing_ray_is_told_with_the_command_that_installs_it(use: str) -> None:
    said = answer(f"import sys; sys.modules['ray'] = None; import hvdlite.ray as r; r.{use}")
    assert said.splitlines()[-1].startswith("ImportError: hvdlite.ray needs Ray")
    assert "pip install 'hvdlite[ray]'" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0: at least one"),
        ({}, "give num_workers, or min_np and max_np"),
        ({"max_np": 2, "cpus_per_worker": 0}, "Ray reserves nothing"),
        ({"max_np": 2, "slots_per_host": 1}, "Ray knows the nodes itself"),
        ({"max_np": 2, "placement": "SPREAD"}, "placement='SPREAD': an elastic job fills"),
        ({"num_workers": 2, "cpus_per_worker": 0}, "Ray reserves nothing"),
        ({"num_workers": 2, "gpus_per_worker": -1}, "gpus_per_worker=-1"),
        ({"num_workers": 2, "placement": "pack"}, "placement='pack': give one of PACK"),
        ({"num_workers": 2, "start_timeout": -1}, "start_timeout=-1"),
    ],
)
def test_arguments_are_checked_before_ray_starts(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(print, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either num_workers or num_hosts"),
        ({"num_workers": 2, "num_hosts": 1}, "give either num_workers or num_hosts"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "gpus_per_worker needs use_gpu=True"),
        ({"num_hosts": 2, "num_workers_per_host": 0}, "num_workers_per_host=0"),
    ],
)
def test_arguments_of_the_executor_are_checked(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RayExecutor(**arguments)  # type: ignore[arg-type]


def test_elastic_workers_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(
        UnsupportedError, match=r"RayExecutor\(min_workers=...\): .* HvdliteTrainer"
    ):
        RayExecutor(num_workers=2, min_workers=1)
    RayExecutor(num_workers=2, max_workers=None)


def test_executor_runs_nothing_before_it_is_started() -> None:
    with pytest.raises(ArgumentError, match=r"call start\(\) first"):
        RayExecutor(num_workers=1).run(print)


def test_settings_for_ssh_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="ssh_identity_file"):
        RayExecutor.create_settings(ssh_identity_file="key")
    assert RayExecutor.create_settings(nics=["eth0"], verbose=True).nics == ("eth0",)


def test_room_of_a_node_is_what_all_its_resources_allow() -> None:
    hosts = RayHosts(cpus=1.5, gpus=1, most=3)
    assert hosts.room({"CPU": 8.0, "GPU": 2.0}) == 2
    assert hosts.room({"CPU": 8.0, "GPU": 8.0}) == 3
    assert hosts.room({"CPU": 8.0}) == 0
    hosts._slots["node"] = 3
    assert hosts.reserved("node") == {"num_cpus": 4.5, "num_gpus": 3}


def test_nodes_are_listed_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        living: ClassVar[list[str]] = ["aaaaaaaaaa"]

        def nodes(self) -> list[dict[str, Any]]:
            if not self.living:
                raise RuntimeError("planted")
            return [
                {
                    "NodeID": one,
                    "Alive": one in self.living,
                    "NodeManagerAddress": "10.0.0.1",
                    "Resources": {"CPU": 2.0},
                }
                for one in ("bbbbbbbbbb", "aaaaaaaaaa")
            ]

    monkeypatch.setattr(elastic, "import_ray", Ray)
    hosts = RayHosts(1, 0)
    assert hosts.hosts() == {"10.0.0.1/aaaaaaaa": 2}
    Ray.living = ["aaaaaaaaaa", "bbbbbbbbbb"]
    assert list(hosts.hosts()) == ["10.0.0.1/aaaaaaaa", "10.0.0.1/bbbbbbbb"]
    assert hosts.ids["10.0.0.1/bbbbbbbb"] == "bbbbbbbbbb"
    Ray.living = ["bbbbbbbbbb"]
    assert list(hosts.hosts()) == ["10.0.0.1/bbbbbbbb"]
    Ray.living = []
    with pytest.raises(DiscoveryError, match="Ray does not tell its nodes: planted"):
        hosts.hosts()


def test_workers_of_a_node_are_reserved_together() -> None:
    assert Demand(6, cpus=2, gpus=0.5, per_node=3).bundles() == [{"CPU": 6, "GPU": 1.5}] * 2
