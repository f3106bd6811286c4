"""Runs the pods of Kubernetes manifests as processes of this host, each at a loopback address of its own.

No cluster is here. So what a cluster does is done by hand: variables are filled in, secrets and config maps become
folders with the links of Kubernetes, names of pods become their addresses, and probes are asked.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml
from engine_processes import READY_SECONDS, OwnProcess

__all__ = [
    "Cluster",
    "Container",
    "Nodes",
    "Pod",
    "check_policies",
    "check_probes",
    "cluster",
    "nodes",
    "refused_flows",
    "spread",
]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"


def _documents(folder: Path) -> list[dict[str, Any]]:
    """Every object of the manifests in a folder."""
    return [each for path in sorted(folder.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]


def _named(objects: Iterable[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The object of a kind and a name."""
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def _pod_addresses(count: int) -> list[str]:
    """Loopback addresses, as different from those of other test runs as chance has it."""
    first, second = random.SystemRandom().randrange(1, 255), random.SystemRandom().randrange(1, 255)
    return [f"127.{first}.{second}.{number + 1}" for number in range(count)]


def _mount(folder: Path, files: Mapping[str, str], mode: int) -> Path:
    """A folder as Kubernetes mounts a secret or a config map: names that are links to links of files."""
    data = folder / "..2026_11_28"
    data.mkdir(parents=True)
    for name, text in files.items():
        (data / name).write_text(text)
        (data / name).chmod(mode)
    (folder / "..data").symlink_to(data.name)
    for name in files:
        (folder / name).symlink_to(f"..data/{name}")
    return folder


class Container(NamedTuple):
    """What runs here in place of a container.

    Attributes:
        command: Makes what runs here of the container's command and arguments.
        environment: Variables of the image, before those of the container.
    """

    command: Callable[[list[str]], list[str]]
    environment: Mapping[str, str]


class Pod(OwnProcess):
    """A pod of one container, as processes of this host.

    Args:
        name: Its name.
        folder: Where its log is.
        template: The template that it is made of.
        address: Its IP address.
        replaced: Parts of arguments and of variables that mean something else here, such as mounted folders.
        runs: What runs here.
        given: Variables that Kubernetes adds.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        template: dict[str, Any],
        address: str,
        replaced: Mapping[str, str],
        runs: Container,
        given: Mapping[str, str] | None = None,
    ) -> None:
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.grace = float(template["spec"]["terminationGracePeriodSeconds"])
        (self.container,) = template["spec"]["containers"]
        self.address = address
        # What listens on every interface of a pod must not take the ports of other pods here.
        self._replaced = {"0.0.0.0": address, **replaced}
        variables = dict(given or {})
        for each in self.container.get("env", []):
            variables[each["name"]] = address if "valueFrom" in each else self._filled(each["value"], variables)
        command = [self._filled(each, variables) for each in self.container["command"] + self.container["args"]]
        super().__init__(name, folder, runs.command(command), {**runs.environment, **variables})

    def _filled(self, text: str, variables: Mapping[str, str]) -> str:
        """A text with the variables and the replaced parts."""
        text = re.sub(r"\$\((\w+)\)", lambda read: variables[read[1]], text)
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text

    @property
    def ports(self) -> dict[str, int]:
        """The container's ports by name."""
        return {each["name"]: each["containerPort"] for each in self.container.get("ports", [])}

    def get(self, port: str, path: str, timeout: float = 30.0) -> tuple[int, str]:
        """The status and the text of what a named port answers.

        Raises:
            OSError: It does not answer.
        """
        url = f"http://{self.address}:{self.ports[port]}{path}"
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def probe(self, which: str) -> bool:
        """Whether a probe succeeds now, as the kubelet judges it."""
        asked = self.container[which]
        try:
            status, _ = self.get(asked["httpGet"]["port"], asked["httpGet"]["path"], asked.get("timeoutSeconds", 1))
        except OSError:
            return False
        return 200 <= status < 400

    def wait_ready(self) -> None:
        """Return once the pod is started and ready.

        Raises:
            RuntimeError: It ended, or takes too long. The error has the end of its log.
        """
        until = time.monotonic() + READY_SECONDS
        for which in ("startupProbe", "readinessProbe"):
            while which in self.container and not self.probe(which):
                if not self.running or time.monotonic() > until:
                    raise RuntimeError(f"{self.name} is not ready:\n{self.logged()[-6000:]}")
                time.sleep(0.5)

    def terminate(self) -> None:
        """What the kubelet does to end a pod: SIGTERM to the first process of the container. `preStop` is no part."""
        os.kill(self._process.pid, signal.SIGTERM)

    def processes(self) -> list[psutil.Process]:
        """All of its processes."""
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]


class Flow(NamedTuple):
    """A connection between two pods: who opened it, who took it, and at which port."""

    source: str
    target: str
    port: int


def flows(pods: Sequence[Pod]) -> set[Flow]:
    """The TCP connections between pods that are there now. Those within a pod are left out: no policy is about them."""
    listening: dict[tuple[str, int], str] = {}
    opened: list[tuple[str, tuple[str, int]]] = []
    for pod in pods:
        for process in pod.processes():
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    listening[_plain(each.laddr)] = pod.name
                elif each.status == psutil.CONN_ESTABLISHED:
                    opened.append((pod.name, _plain(each.raddr)))
    met = [(source, listening.get(remote), remote[1]) for source, remote in opened]
    return {Flow(source, target, port) for source, target, port in met if target not in (None, source)}


def _plain(place: Any) -> tuple[str, int]:
    """An address and a port, where an address of IPv4 may be written as IPv6."""
    return place.ip.removeprefix("::ffff:"), place.port


def permitted(policies: Iterable[dict[str, Any]], source: Pod, target: Pod, port: int) -> bool:
    """Whether network policies let a pod connect to a port of another one, as Kubernetes reads them."""
    about = [each["spec"] for each in policies if _selects(each["spec"]["podSelector"], target.labels)]
    rules = [rule for spec in about for rule in spec["ingress"]]
    return not about or any(
        any("podSelector" in each and _selects(each["podSelector"], source.labels) for each in rule["from"])
        and (
            "ports" not in rule  # all of them
            or any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])
        )
        for rule in rules
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", []))


def image(dockerfile: Path, folder: Path, python: str) -> Path:
    """Do what a Dockerfile does, as far as it can be done without its base image: copy, and install with pip.

    The environment of ``python`` stands for the base image. pip first resolves each list against it, and installs
    nothing there. Then the packages that are no dependencies are built and installed into a folder.

    Args:
        dockerfile: The file. Its context is the root of the repository.
        folder: Gets the copies and the packages.
        python: The interpreter.

    Returns:
        The folder with the packages, for ``PYTHONPATH``.
    """
    packages, context, place = folder / "packages", folder / "image", folder / "image"
    for line in dockerfile.read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "COPY":
            source, target = rest.split()
            ignore = shutil.ignore_patterns("__pycache__", "tests")
            shutil.copytree(ROOT / source, context / target.lstrip("/"), ignore=ignore)
        elif word == "WORKDIR":
            place = context / rest.lstrip("/")
        elif word == "RUN":
            pip, install, *given = shlex.split(rest)
            assert (pip, install) == ("pip", "install"), f"nobody runs this here: {line}"
            quiet = ("--no-input", "--disable-pip-version-check", "--no-build-isolation", "--quiet", *given)
            for how in (["--dry-run"], ["--no-deps", "--target", str(packages)]):
                subprocess.run([python, "-m", "pip", "install", *how, *quiet], cwd=place, check=True, timeout=600)
        else:
            assert word in ("FROM", "#", ""), f"nobody knows this here: {line}"
    return packages


class Cluster(NamedTuple):
    """What ``kubectl apply`` makes of the manifests of an engine.

    Attributes:
        objects: The manifests.
        prefill: The prefill server.
        decodes: The decode servers.
        router: The router.
    """

    objects: list[dict[str, Any]]
    prefill: Pod
    decodes: list[Pod]
    router: Pod

    @property
    def servers(self) -> list[Pod]:
        """Prefill, and then decode."""
        return [self.prefill, *self.decodes]

    def succeeded(self, *pods: Pod) -> list[int]:
        """How many rooms succeeded on servers, by default on each, as Prometheus scrapes it by the ServiceMonitor."""
        (monitor,) = (each for each in self.objects if each["kind"] == "ServiceMonitor")
        (endpoint,) = monitor["spec"]["endpoints"]
        found = []
        for pod in pods or self.servers:
            assert _selects(monitor["spec"]["selector"], pod.labels)
            _, text = pod.get(endpoint["port"], endpoint["path"])
            rooms = [line for line in text.splitlines() if line.startswith("statelink_rooms_total{")]
            found.append(int(sum(float(line.split()[-1]) for line in rooms if 'outcome="succeeded"' in line)))
        return found


class _Namespace:
    """What all pods of an engine have in common: the manifests, the keys, and the addresses.

    Args:
        engine: The folder of the manifests.
        folder: Where everything is that the pods need, and their logs.
        model: What is in the volume of models.
        server: What runs in place of a server.
        command: The command ``statelink``, with its variables.
    """

    def __init__(
        self, engine: str, folder: Path, model: Path, server: Container, command: tuple[Path, Mapping[str, str]]
    ) -> None:
        self._folder, self._model, self._server = folder, model, server
        self.objects = _documents(EXAMPLES / engine)
        self._addresses = iter(_pod_addresses(8))
        script, variables = command
        for role in ("prefill", "decode"):
            words = [sys.executable, str(script), "keys", "new", str(folder / role)]
            subprocess.run(words, env={**os.environ, **variables}, check=True, capture_output=True, timeout=60)
        public = {f"{role}.pub": (folder / f"{role}.pub").read_text() for role in ("prefill", "decode")}
        self._allowed = _mount(folder / "allowed", public, 0o644)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Namespace:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def address(self) -> str:
        """An address of a pod."""
        return next(self._addresses)

    def start(
        self, name: str, template: dict[str, Any], address: str, replaced: Mapping[str, str], runs: Container
    ) -> Pod:
        """Start a pod that is no server. It is ended with the namespace."""
        made = Pod(name, self._folder, template, address, replaced, runs)
        self._stack.callback(made.kill)
        return made

    def start_server(
        self,
        name: str,
        template: dict[str, Any],
        role: str,
        address: str,
        replaced: Mapping[str, str] | None = None,
        given: Mapping[str, str] | None = None,
    ) -> Pod:
        """Start a server: with a secret of its role, and the volumes of all."""
        secret = _mount(self._folder / f"secret-{name}", {"key": (self._folder / role).read_text()}, 0o400)
        volumes = {
            "/models/model": str(self._model),
            "/run/statelink/secret": str(secret),
            "/run/statelink/allowed": str(self._allowed),
        }
        # Pods of several hosts have no memory in common: UCX's other transports within a host are off.
        runs = self._server._replace(environment={**self._server.environment, "UCX_TLS": "tcp,self"})
        made = Pod(name, self._folder, template, address, {**volumes, **(replaced or {})}, runs, given)
        self._stack.callback(made.kill)
        return made


@contextlib.contextmanager
def cluster(engine: str, folder: Path, model: Path, server: Container, router: Mapping[str, str]) -> Iterator[Cluster]:
    """Every pod of the manifests of an engine, ready; all are ended afterwards.

    Args:
        engine: The folder of the manifests.
        folder: Where everything is that the pods need, and their logs.
        model: What is in the volume of models.
        server: What runs in place of a server.
        router: Variables of the image, for the router.
    """
    built = image(EXAMPLES / engine / "Dockerfile", folder / "built", sys.executable)
    packages = {"PYTHONPATH": str(built)}
    path = [str(built), *filter(None, [server.environment.get("PYTHONPATH")])]
    server = server._replace(environment={**server.environment, "PYTHONPATH": os.pathsep.join(path)})
    with _Namespace(engine, folder, model, server, (built / "bin" / "statelink", packages)) as namespace:
        hosts: dict[str, str] = {}
        servers: dict[str, list[Pod]] = {}
        for role in ("prefill", "decode"):
            owner = _named(namespace.objects, "StatefulSet", f"{engine}-{role}")["spec"]
            for number in range(owner["replicas"]):
                name, address = f"{engine}-{role}-{number}", namespace.address()
                pod = namespace.start_server(name, owner["template"], role, address)
                servers.setdefault(role, []).append(pod)
                hosts[f"{name}.{owner['serviceName']}:"] = f"{address}:"
        behind = _named(namespace.objects, "Deployment", f"{engine}-router")["spec"]["template"]
        runs = Container(lambda given: [sys.executable, "-W", "ignore", *given[1:]], {**packages, **router})
        pod = namespace.start(f"{engine}-router", behind, namespace.address(), hosts, runs)
        (prefill,) = servers["prefill"]
        made = Cluster(namespace.objects, prefill, servers["decode"], pod)
        for each in (*made.servers, pod):
            each.wait_ready()
        yield made


class Nodes(NamedTuple):
    """A prefill server on two nodes, and a decode server.

    Attributes:
        objects: The manifests.
        prefill: The pods of the prefill server, the leader first.
        decode: The decode server.
    """

    objects: list[dict[str, Any]]
    prefill: list[Pod]
    decode: Pod


@contextlib.contextmanager
def nodes(engine: str, folder: Path, model: Path, server: Container, fewer: Mapping[str, str]) -> Iterator[Nodes]:
    """The LeaderWorkerSet of an engine and one of its decode servers, ready; all are ended afterwards.

    The packages are those of this environment. See `cluster`.

    Args:
        engine: The folder of the manifests.
        folder: Where everything is that the pods need, and their logs.
        model: What is in the volume of models.
        server: What runs in place of a server.
        fewer: Arguments with the size of the server, and what they are here.
    """
    command = Path(sys.executable).parent / "statelink", dict[str, str]()
    with _Namespace(engine, folder, model, server, command) as namespace:
        group = _named(namespace.objects, "LeaderWorkerSet", f"{engine}-prefill-nodes")["spec"]["leaderWorkerTemplate"]
        addresses = [namespace.address() for _ in range(group["size"])]
        prefill = []
        for number, address in enumerate(addresses):
            # What the controller of LeaderWorkerSets gives to each pod.
            given = {
                "LWS_GROUP_SIZE": str(group["size"]),
                "LWS_WORKER_INDEX": str(number),
                "LWS_LEADER_ADDRESS": addresses[0],
            }
            name = f"{engine}-prefill-nodes-0-{number}"
            template = group["workerTemplate"] if number else group.get("leaderTemplate", group["workerTemplate"])
            prefill.append(namespace.start_server(name, template, "prefill", address, fewer, given))
        template = _named(namespace.objects, "StatefulSet", f"{engine}-decode")["spec"]["template"]
        decode = namespace.start_server(f"{engine}-decode-0", template, "decode", namespace.address())
        for each in (*prefill, decode):
            each.wait_ready()
        yield Nodes(namespace.objects, prefill, decode)


def refused_flows(objects: Iterable[dict[str, Any]], pods: Sequence[Pod]) -> list[Flow]:
    """The connections between pods that are there now, and that no network policy admits."""
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    of_name = {pod.name: pod for pod in pods}
    return [
        each for each in flows(pods) if not permitted(policies, of_name[each.source], of_name[each.target], each.port)
    ]


def check_policies(made: Cluster, control: range, data: range, http: int) -> None:
    """Check the network policies: they admit every connection that there is between pods, and refuse others."""
    policies = [each for each in made.objects if each["kind"] == "NetworkPolicy"]
    pods = {pod.name: pod for pod in (*made.servers, made.router)}

    def refused(each: Flow) -> bool:
        return not permitted(policies, pods[each.source], pods[each.target], each.port)

    found = flows(list(pods.values()))
    assert not refused_flows(made.objects, list(pods.values()))
    prefill, router = made.prefill.name, made.router.name
    decode, other = (pod.name for pod in made.decodes)
    assert any(each[:2] == (decode, prefill) and each.port in control for each in found), found
    assert any({each.source, each.target} == {decode, prefill} and each.port in data for each in found), found
    for each in (
        Flow(prefill, decode, control[0]),
        Flow(decode, prefill, http),
        Flow(router, prefill, control[0]),
        Flow(router, decode, data[0]),
        Flow(router, decode, made.prefill.ports["metrics"]),
        Flow(other, decode, data[0]),
    ):
        assert refused(each), each


def check_probes(made: Cluster) -> None:
    """Check that every probe of the manifests succeeds."""
    for pod in made.servers:
        assert pod.probe("startupProbe")
        assert pod.probe("readinessProbe")
        assert pod.probe("livenessProbe")
    assert made.router.probe("readinessProbe")
    assert made.router.probe("livenessProbe")


@contextlib.contextmanager
def spread(made: Cluster, requests: int) -> Iterator[None]:
    """Check that the router's requests within the block move their state, and that each decode gets a part of them."""
    before = made.succeeded()
    yield
    sent, *received = (after - then for after, then in zip(made.succeeded(), before, strict=True))
    assert (sent, sum(received)) == (requests, requests)
    assert min(received) > 0, "the router gives each decode a part"
