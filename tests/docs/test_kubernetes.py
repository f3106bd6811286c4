"""The manifests in ``examples/kubernetes``: the schemas of Kubernetes, and what the objects say of each other.

The schemas of ServiceMonitor and LeaderWorkerSet are not among those of Kubernetes. So what these two say is compared
with the other objects. The tests of the adapters run the pods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from statelink.backend import Ports
from statelink.wire import parse_listen

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
ENGINES = ("sglang", "vllm")
FILES = sorted(FOLDER.glob("*/*.yaml"))
ELSEWHERE = frozenset({"ServiceMonitor", "LeaderWorkerSet"})
"""Kinds that are no part of Kubernetes itself."""
VERSIONS = ("1.30", "1.37")


def objects(*paths: Path) -> list[dict[str, Any]]:
    return [each for path in paths for each in yaml.safe_load_all(path.read_text())]


def of_engine(engine: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in objects(*sorted((FOLDER / engine).glob("*.yaml"))) if each["kind"] == kind]


def templates(engine: str) -> Iterator[dict[str, Any]]:
    """The templates of all pods."""
    for kind in ("StatefulSet", "Deployment"):
        yield from (each["spec"]["template"] for each in of_engine(engine, kind))
    for each in of_engine(engine, "LeaderWorkerSet"):
        yield from (value for value in each["spec"]["leaderWorkerTemplate"].values() if isinstance(value, dict))


def configuration(container: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the links of a server."""
    for each in container["env"]:
        if each["name"] == "STATELINK_SGLANG_CONFIG":
            found: dict[str, Any] = json.loads(each["value"])
            return found
    given = container["args"][container["args"].index("--kv-transfer-config") + 1]
    found = json.loads(given)["kv_connector_extra_config"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_object_is_as_the_schema_says(path: Path, version: str) -> None:
    for each in objects(path):
        if each["kind"] in ELSEWHERE:
            with pytest.raises(kubernetes_validate.utils.SchemaNotFoundError):
                kubernetes_validate.validate(each, version, strict=True)
            for pod in (each["spec"].get("leaderWorkerTemplate") or {}).values():
                if isinstance(pod, dict):
                    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod}
                    kubernetes_validate.validate(whole, version, strict=True)
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_a_wrong_object_is_found() -> None:
    (wrong,) = (each for each in objects(FOLDER / "vllm" / "prefill.yaml") if each["kind"] == "StatefulSet")
    del wrong["spec"]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_probes_services_and_monitors_name_ports_that_are_there(engine: str) -> None:
    ports_of: dict[str, set[str]] = {}
    for template in templates(engine):
        (container,) = template["spec"]["containers"]
        names = {each["name"] for each in container.get("ports", [])}
        ports_of.setdefault(template["metadata"]["labels"]["app"], names)
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert bool(probes) != ("--headless" in container.get("args", []))
        assert {each["httpGet"]["port"] for each in probes} <= names
    exported: dict[str, set[str]] = {}
    for service in of_engine(engine, "Service"):
        app = service["spec"]["selector"]["app"]
        exported[service["metadata"]["labels"]["app"]] = {each["name"] for each in service["spec"]["ports"]}
        assert {each.get("targetPort", each["name"]) for each in service["spec"]["ports"]} <= ports_of[app]
    (monitor,) = of_engine(engine, "ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    (chosen,) = monitor["spec"]["selector"]["matchExpressions"]
    for app in chosen["values"]:
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= exported[app]


@pytest.mark.parametrize("engine", ENGINES)
def test_links_listen_where_the_network_policies_admit_them(engine: str) -> None:
    policies = {each["metadata"]["name"]: each["spec"]["ingress"] for each in of_engine(engine, "NetworkPolicy")}
    admitted = [(each["port"], each.get("endPort", each["port"])) for each in policies[f"{engine}-prefill"][0]["ports"]]
    for template in templates(engine):
        (container,) = template["spec"]["containers"]
        if template["metadata"]["labels"]["app"] == f"{engine}-router":
            continue
        config = configuration(container)
        listen = parse_listen(config["listen"].replace("$(POD_IP)", "10.0.0.8"))
        data = Ports.read(config["options"]["ucx"]["TCP_PORT_RANGE"])
        assert (tuple(listen.ports), tuple(data)) == (admitted[0], admitted[1])
        mounts = {each["mountPath"] for each in container["volumeMounts"]}
        assert {config["keys"]["secret_file"].rpartition("/")[0], config["keys"]["allow_file"]} <= mounts
        assert {each["name"] for each in template["spec"]["volumes"]} == {
            each["name"] for each in container["volumeMounts"]
        }
        metrics = {each["name"]: each["containerPort"] for each in container.get("ports", [])}.get("metrics")
        assert metrics in (config["telemetry"]["prometheus"]["port"], None)


@pytest.mark.parametrize(
    ("engine", "width", "leader"),
    [("sglang", "tp-size", "dist-init-addr"), ("vllm", "tensor-parallel-size", "master-addr")],
)
def test_a_server_on_several_nodes_has_the_variables_that_its_controller_sets(
    engine: str, width: str, leader: str
) -> None:
    (group,) = of_engine(engine, "LeaderWorkerSet")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    (container,) = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    given = dict(each.removeprefix("--").split("=", 1) for each in container["args"] if "=" in each)
    size, cards = group["spec"]["leaderWorkerTemplate"]["size"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(given[width]) == size * cards
    assert given["nnodes"] == "$(LWS_GROUP_SIZE)"
    assert given["node-rank"] == "$(LWS_WORKER_INDEX)"
    assert given[leader].startswith("$(LWS_LEADER_ADDRESS)")
    ports = parse_listen(configuration(container)["listen"].replace("$(POD_IP)", "10.0.0.8")).ports
    assert cards <= ports.last - ports.first


@pytest.mark.parametrize("engine", ENGINES)
def test_the_images_have_the_versions_that_the_adapters_take(engine: str) -> None:
    version = {"sglang": "0.5.23", "vllm": "0.33.0"}[engine]
    built = (FOLDER / engine / "Dockerfile").read_text()
    assert f":v{version}\n" in built
    images = {template["spec"]["containers"][0]["image"] for template in templates(engine)}
    assert images == {f"REGISTRY/{engine}-statelink:{version}"}
    assert f"-t {images.pop()} ." in built
    assert f"{engine}=={version}" in (ROOT / "adapters" / engine / "tests" / "requirements.txt").read_text().split()


def test_the_page_and_the_readme_name_the_same_commands() -> None:
    readme = [line.strip() for line in (FOLDER / "README.md").read_text().splitlines()]
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    commands = page.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert len(commands) > 5
    assert [line for line in commands if line.strip() not in readme] == []
