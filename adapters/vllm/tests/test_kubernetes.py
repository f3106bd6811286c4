"""The manifests for Kubernetes in ``examples/kubernetes/vllm``: their pods run as processes of this host.

Not run here: the base image, the scheduling of pods, and memory of a GPU. What the Dockerfile copies and installs is
built, and the pods run with it.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from engine_environments import VLLM, completion
from manifests import Cluster, Container, Pod, check_policies, check_probes, cluster, nodes, refused_flows, spread
from support.engines import PREFILL, prompt_of
from support.servers import ON_A_CPU

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""What these processes have, as all that are not forked by one that has imported vLLM."""


def command(given: list[str]) -> list[str]:
    """What runs in place of a server."""
    assert given[0] == "vllm"
    return [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", *given[1:], *ON_A_CPU]


@pytest.fixture(scope="module")
def applied(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    server = Container(command, {**VLLM, **FIRST_RUNNER})
    with cluster("vllm", tmp_path_factory.mktemp("kubernetes"), llama, server, {}) as made:
        yield made


def ask(pod: Pod, prompt: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
    """The answer to a request for a completion, by a server or through the router."""
    body = json.dumps({**completion("model", prompt, count), **more}).encode()
    url = f"http://{pod.address}:{pod.ports['http']}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def complete(pod: Pod, prompt: Sequence[int], count: int, **more: Any) -> list[int]:
    """The tokens of such an answer."""
    tokens: list[int] = ask(pod, prompt, count, **more)["choices"][0]["token_ids"]
    return tokens


@pytest.mark.shows("manifests for Kubernetes: one prefill, two decodes and a router, with keys, over nixl")
def test_the_router_answers_with_the_tokens_of_one_server(applied: Cluster) -> None:
    with spread(applied, 4):
        for seed in range(4):
            prompt = prompt_of(seed, 100)
            assert complete(applied.router, prompt, 8) == complete(applied.prefill, prompt, 8)


def test_every_probe_succeeds_while_the_pods_run(applied: Cluster) -> None:
    check_probes(applied)


def test_the_network_policies_admit_what_the_pods_do_and_no_more(applied: Cluster) -> None:
    for seed in range(10, 14):
        complete(applied.router, prompt_of(seed, 100), 4)
    check_policies(applied, range(7100, 7200), range(7200, 7300), 8000)


def test_a_pod_that_ends_serves_the_requests_that_it_has(applied: Cluster) -> None:
    """It ends a decode server, which no later test uses."""
    decode, prompt = applied.decodes[1], prompt_of(20, 100)
    expected = complete(applied.prefill, prompt, 600)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(complete, decode, prompt, 600)
        until = time.monotonic() + 60
        while not _running(decode):
            assert time.monotonic() < until
            time.sleep(0.01)
        decode.terminate()
        assert answer.result() == expected
    assert decode.wait_end(decode.grace) == 0


def test_a_prefill_that_ends_keeps_what_decode_has_not_fetched(applied: Cluster) -> None:
    """The last test with these pods: it ends prefill."""
    prefill, (decode, _) = applied.prefill, applied.decodes
    prompt = prompt_of(30, 100)
    expected, before = complete(prefill, prompt, 8), applied.succeeded(decode)[0]
    first = ask(prefill, prompt, 1, kv_transfer_params=PREFILL)
    prefill.terminate()
    prefill.wait_logged("start mode=drain")
    assert complete(decode, prompt, 8, kv_transfer_params=first["kv_transfer_params"]) == expected
    assert applied.succeeded(decode)[0] == before + 1
    assert prefill.wait_end(prefill.grace) == 0


@pytest.mark.shows("manifests for Kubernetes: a prefill server on two nodes (TP 2), over nixl")
def test_a_server_on_two_nodes(llama: Path, tmp_path: Path) -> None:
    server = Container(command, {**VLLM, **FIRST_RUNNER, "GLOO_SOCKET_IFNAME": "lo"})
    fewer = {"--tensor-parallel-size=16": "--tensor-parallel-size=2"}
    with nodes("vllm", tmp_path, llama, server, fewer) as made:
        prompt = prompt_of(40, 100)
        first = ask(made.prefill[0], prompt, 1, kv_transfer_params=PREFILL)
        params = first["kv_transfer_params"]
        assert len(params["peer"]) == 2
        tokens = complete(made.decode, prompt, 8, kv_transfer_params=params)
        assert tokens == complete(made.prefill[0], prompt, 8)
        status, text = made.decode.get("metrics", "/metrics")
        assert status == 200
        assert 'outcome="succeeded",rank="0",reason="",role="decode"} 1.0' in text
        assert not refused_flows(made.objects, [*made.prefill, made.decode])


def _running(pod: Pod) -> bool:
    """Whether vLLM computes a request."""
    lines = pod.get("http", "/metrics")[1].splitlines()
    return any(float(line.split()[-1]) > 0 for line in lines if line.startswith("vllm:num_requests_running"))
