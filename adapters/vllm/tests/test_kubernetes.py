"""The manifests for Kubernetes in ``examples/kubernetes/vllm``: their pods run as processes of this host.

Not run here: the base image, the scheduling of pods, and NIXL over a network. What the Dockerfile copies and installs
is built, and the pods run with it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from engine_environments import VLLM, completion
from manifests import EXAMPLES, Flow, Pod, documents, flows, image, mount, named, permitted, pod_addresses
from support.engines import prompt_of
from support.servers import ON_A_CPU

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

FOLDER = EXAMPLES / "vllm"
ENGINE_PORT = 8000


class Cluster(NamedTuple):
    """What ``kubectl apply`` makes of the manifests."""

    objects: list[dict[str, Any]]
    prefill: Pod
    decodes: list[Pod]
    router: Pod

    @property
    def servers(self) -> list[Pod]:
        return [self.prefill, *self.decodes]

    def complete(self, pod: Pod, prompt: Sequence[int], count: int) -> tuple[int, list[int]]:
        """The status and the tokens of a completion, by a server or through the router."""
        body = json.dumps(completion("model", prompt, count)).encode()
        url = f"http://{pod.address}:{pod.ports['http']}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())["choices"][0]["token_ids"]

    def succeeded(self, pod: Pod) -> int:
        """How many rooms succeeded, as Prometheus would scrape it by the ServiceMonitor."""
        monitor = named(self.objects, "ServiceMonitor", "vllm-statelink")
        (endpoint,) = monitor["spec"]["endpoints"]
        _, text = pod.get(endpoint["port"], endpoint["path"])
        lines = [
            line for line in text.splitlines() if line.startswith("statelink_rooms_total{") and "succeeded" in line
        ]
        return int(sum(float(line.split()[-1]) for line in lines))


@pytest.fixture(scope="module")
def cluster(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("kubernetes")
    objects = documents(FOLDER)
    packages = image(FOLDER / "Dockerfile", folder / "built", sys.executable)
    statelink = [sys.executable, "-m", "statelink_command"]
    for role in ("prefill", "decode"):
        subprocess.run([*statelink, "keys", "new", str(folder / role)], check=True, capture_output=True)
    public = {f"{role}.pub": (folder / f"{role}.pub").read_text() for role in ("prefill", "decode")}
    allowed = mount(folder / "allowed", public, 0o644)
    environment = {
        **VLLM,
        "PYTHONPATH": str(packages),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "UCX_TLS": "tcp,self",  # pods of several hosts have no memory in common
    }
    addresses = pod_addresses(4)

    def server(given: list[str]) -> list[str]:
        assert given[0] == "vllm"
        return [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", *given[1:], *ON_A_CPU]

    def pod(role: str, number: int, address: str) -> Pod:
        secret = mount(folder / f"secret-{role}-{number}", {"key": (folder / role).read_text()}, 0o400)
        replaced = {
            "/models/model": str(llama),
            "/run/statelink/secret": str(secret),
            "/run/statelink/allowed": str(allowed),
        }
        owner = named(objects, "StatefulSet", f"vllm-{role}")
        assert number < owner["spec"]["replicas"]
        return Pod(f"vllm-{role}-{number}", folder, owner, address, replaced, server, environment)

    with contextlib.ExitStack() as stack:
        made = [pod("prefill", 0, addresses[0]), pod("decode", 0, addresses[1]), pod("decode", 1, addresses[2])]
        for each in made:
            stack.callback(each.kill)
        hosts = {f"{each.name}.{each.name.rpartition('-')[0]}": each.address for each in made}
        router = Pod(
            "vllm-router",
            folder,
            named(objects, "Deployment", "vllm-router"),
            addresses[3],
            hosts,
            lambda given: [sys.executable, *given[1:]],
            {"PYTHONPATH": str(packages)},
        )
        stack.callback(router.kill)
        for each in (*made, router):
            each.wait_ready()
        yield Cluster(objects, made[0], made[1:], router)


@pytest.mark.shows("manifests for Kubernetes: one prefill, two decodes and a router, with keys, over nixl")
def test_the_router_answers_with_the_tokens_of_one_server(cluster: Cluster) -> None:
    before = [cluster.succeeded(pod) for pod in cluster.servers]
    for seed in range(4):
        prompt = prompt_of(seed, 100)
        assert cluster.complete(cluster.router, prompt, 8) == cluster.complete(cluster.prefill, prompt, 8)
    after = [cluster.succeeded(pod) for pod in cluster.servers]
    sent, *received = (now - then for now, then in zip(after, before, strict=True))
    assert (sent, sum(received)) == (4, 4)
    assert min(received) > 0, "the router gives each decode a part"


def test_every_probe_of_a_server_that_runs_succeeds(cluster: Cluster) -> None:
    for pod in cluster.servers:
        assert pod.probe("startupProbe")
        assert pod.probe("readinessProbe")
        assert pod.probe("livenessProbe")
    assert cluster.router.probe("readinessProbe")
    assert cluster.router.probe("livenessProbe")


def test_the_network_policies_admit_what_the_pods_do_and_no_more(cluster: Cluster) -> None:
    policies = [each for each in cluster.objects if each["kind"] == "NetworkPolicy"]
    for seed in range(10, 14):
        cluster.complete(cluster.router, prompt_of(seed, 100), 4)
    pods = {pod.name: pod for pod in (*cluster.servers, cluster.router)}
    found = flows(list(pods.values()))
    assert [each for each in found if not permitted(policies, pods[each.source], pods[each.target], each.port)] == []
    prefill, decode = cluster.prefill.name, cluster.decodes[0].name

    def some(source: str, target: str, ports: range) -> bool:
        return any(each.source == source and each.target == target and each.port in ports for each in found)

    assert some(decode, prefill, range(7100, 7200)), found
    assert some(prefill, decode, range(7200, 7300)) or some(decode, prefill, range(7200, 7300)), found
    refused = [
        Flow(prefill, decode, 7100),
        Flow(decode, prefill, ENGINE_PORT),
        Flow(cluster.router.name, prefill, 7100),
        Flow(cluster.router.name, decode, 7200),
        Flow(cluster.router.name, decode, 9464),
        Flow(cluster.decodes[1].name, decode, 7200),
    ]
    assert [each for each in refused if permitted(policies, pods[each.source], pods[each.target], each.port)] == []


def test_a_pod_that_ends_serves_the_requests_that_it_has(cluster: Cluster) -> None:
    """The last test: it ends a decode server, and then prefill."""
    decode, prompt = cluster.decodes[1], prompt_of(20, 100)
    expected = cluster.complete(cluster.prefill, prompt, 600)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(cluster.complete, decode, prompt, 600)
        until = time.monotonic() + 60
        while "vllm:num_requests_running" not in (text := decode.get("http", "/metrics")[1]) or not any(
            line.startswith("vllm:num_requests_running") and float(line.split()[-1]) for line in text.splitlines()
        ):
            assert time.monotonic() < until
            time.sleep(0.01)
        decode.terminate()
        assert answer.result() == expected
    assert decode.wait_end(decode.grace) == 0
    cluster.prefill.terminate()
    assert cluster.prefill.wait_end(cluster.prefill.grace) == 0
