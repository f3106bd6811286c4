"""The manifests for Kubernetes in ``examples/kubernetes/sglang``: their pods run as processes of this host.

Not run here: the base image, the scheduling of pods, and memory of a GPU. What the Dockerfile copies and installs is
built, and the pods run with it.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from engine_environments import SGLANG
from manifests import Cluster, Container, Pod, check_policies, check_probes, cluster, nodes, refused_flows, spread
from support.models import generate, prompt_of
from support.servers import ON_A_CPU, ORDINARY, ordinary_path

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

FEW_TOKENS = ("--max-total-tokens", "2048", "--disaggregation-decode-retraction-backup", "cpu_tensor")


def command(given: list[str]) -> list[str]:
    """What runs in place of a server."""
    assert given[:3] == ["python3", "-m", "sglang.launch_server"]
    return [sys.executable, *ORDINARY, *ON_A_CPU, *FEW_TOKENS, *given[3:]]


@pytest.fixture(scope="module")
def applied(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    server = Container(command, {**SGLANG, "PYTHONPATH": ordinary_path()})
    with cluster("sglang", tmp_path_factory.mktemp("kubernetes"), llama, server, SGLANG) as made:
        yield made


def post(pod: Pod, prompt: Sequence[int], count: int, **more: Any) -> list[int]:
    """The tokens that a server or the router answers."""
    params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = json.dumps({"input_ids": list(prompt), "sampling_params": params, **more}).encode()
    url = f"http://{pod.address}:{pod.ports['http']}/generate"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        tokens: list[int] = json.loads(answer.read())["output_ids"]
        return tokens


@pytest.mark.shows("manifests for Kubernetes: one prefill, two decodes and a router, with keys, over nixl")
def test_the_router_answers_with_the_tokens_of_one_server(applied: Cluster, llama: Path) -> None:
    with spread(applied, 4):
        for seed in range(4):
            assert post(applied.router, prompt_of(seed, 60), 6) == generate(llama, prompt_of(seed, 60), 6)


def test_every_probe_succeeds_while_the_pods_run(applied: Cluster) -> None:
    check_probes(applied)


def test_the_network_policies_admit_what_the_pods_do_and_no_more(applied: Cluster) -> None:
    for seed in range(10, 14):
        post(applied.router, prompt_of(seed, 60), 4)
    check_policies(applied, range(7100, 7200), range(7200, 7300), 30000)


def test_a_pod_that_ends_serves_the_requests_that_it_has(applied: Cluster, llama: Path) -> None:
    """The last test: it ends prefill, behind which no request is left then, and a decode server."""
    before = applied.succeeded()[1:]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post, applied.router, prompt_of(20, 60), 400)
        until = time.monotonic() + 60
        while (after := applied.succeeded()[1:]) == before:
            assert time.monotonic() < until
            time.sleep(0.02)
        # It has the state, and generates for a while.
        decode = next(pod for pod, then, now in zip(applied.decodes, before, after, strict=True) if now > then)
        decode.terminate()
        assert answer.result()[:6] == generate(llama, prompt_of(20, 60), 6)
    assert decode.wait_end(decode.grace) == 0
    applied.prefill.terminate()
    assert applied.prefill.wait_end(applied.prefill.grace) == 0


@pytest.mark.shows("manifests for Kubernetes: a prefill server on two nodes (TP 2), over nixl")
def test_a_server_on_two_nodes(llama: Path, tmp_path: Path) -> None:
    here = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}
    server = Container(command, {**SGLANG, **here, "PYTHONPATH": ordinary_path()})
    with nodes("sglang", tmp_path, llama, server, {"--tp-size=16": "--tp-size=2"}) as made:
        leader = made.prefill[0]
        for seed in range(2):
            body = {
                "bootstrap_host": leader.address,
                "bootstrap_port": leader.ports["bootstrap"],
                "bootstrap_room": random.randrange(1, 1 << 62),
            }
            with ThreadPoolExecutor(1) as thread:
                first = thread.submit(post, leader, prompt_of(seed, 60), 6, **body)
                assert post(made.decode, prompt_of(seed, 60), 6, **body) == generate(llama, prompt_of(seed, 60), 6)
                first.result()
        assert not refused_flows(made.objects, [*made.prefill, made.decode])
