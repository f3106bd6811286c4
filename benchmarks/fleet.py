"""What a fleet asks of its directory: many clients of links register, find each other and leave.

``python -m benchmarks.fleet [--directory server|etcd] [--clients 1000]`` starts the directory, and clients in this
process, without links and memory. It prints JSON: seconds for each phase, and what one client costs (threads, open
files, resident bytes), by which a fleet can be reckoned. `docs/scale.md` is written from it.

``registered`` and ``left`` are counted in the directory's own list, and ``found`` are clients that got the addresses
that were registered. If one of them is not the number of clients, there is no result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from statelink.config import LinkConfig
from statelink.rendezvous import Directory, connecting, list_instances

RANKS = 8
"""Ranks of one instance."""
PATIENCE = 600.0
REST = 10.0
"""Seconds for which the clients rest."""


@contextlib.contextmanager
def server() -> Iterator[tuple[str, int]]:
    """``statelink rendezvous`` in a process of its own: its address, and its process id."""
    command = [sys.executable, "-c", "from statelink.cli import main; main()", "rendezvous", "--lifetime", "60"]
    process = subprocess.Popen([*command, "--listen", "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@contextlib.contextmanager
def etcd() -> Iterator[tuple[str, int]]:
    """One member of etcd in a process of its own."""
    program = shutil.which("etcd")
    if program is None:
        sys.exit("no etcd here; tools/etcd-server.sh installs it")
    with contextlib.ExitStack() as taken:
        ports = [taken.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
    folder = tempfile.mkdtemp(prefix="statelink-fleet-")
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    command = [program, "--data-dir", folder, "--listen-client-urls", client, "--advertise-client-urls", client]
    command += [
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"default={peer}",
    ]
    with (Path(folder) / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait(lambda: answers(client))
        yield f"etcd://127.0.0.1:{ports[0]}", process.pid
    finally:
        process.kill()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def answers(client: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{client}/health", timeout=5) as answer:
        return int(answer.status) == 200
    return False


def wait(done: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            sys.exit("the directory does not keep up")
        time.sleep(0.01)


def processor(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def state() -> dict[str, int]:
    """Threads, open files and resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def address_of(number: int) -> str:
    """The address that a client registers. Nothing listens there."""
    return f"tcp://10.0.0.1:{1024 + number}"


def listed(config: LinkConfig) -> int:
    """How many ranks the directory lists."""
    return sum(len(each.registered) for each in list_instances(config, keys=None))


def measure(kind: str, count: int, rest: float = REST) -> dict[str, Any]:
    """Register, find and leave."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    options: dict[str, Any] = {"rendezvous_options": {"lifetime": 60}} if kind == "etcd" else {}
    instances = max(1, count // RANKS)
    with (etcd if kind == "etcd" else server)() as (address, pid):
        config = LinkConfig.read({"role": "both", "backend": "tcp", "rendezvous": address, **options})
        before = state()
        clients: list[Directory] = []
        phases: dict[str, dict[str, float]] = {}
        counted = {"registered": 0, "found": 0, "left": 0}

        def phase(name: str, work: Callable[[], None]) -> None:
            began, used, own = time.monotonic(), processor(pid), time.process_time()
            work()
            phases[name] = {
                "seconds": round(time.monotonic() - began, 3),
                "directory_processor_seconds": round(processor(pid) - used, 3),
                "clients_processor_seconds": round(time.process_time() - own, 3),
            }

        def opened() -> None:
            clients.extend(
                connecting(config, link=f"fleet-{number:016x}", keys=None) for number in range(instances * RANKS)
            )

        def registered() -> None:
            for number, client in enumerate(clients):
                instance, rank = divmod(number, RANKS)
                client.register(f"i{instance}", rank, RANKS, address_of(number))
            waiting = [f"i{number}" for number in range(instances)]
            wait(lambda: not waiting or (clients[0].resolve(waiting[-1]) and waiting.pop() and not waiting))

        def found() -> None:
            """Each client looks up one other instance."""
            waiting = {number: f"i{(number // RANKS + 1) % instances}" for number in range(len(clients))}

            def look() -> bool:
                for number, name in list(waiting.items()):
                    if ends := clients[number].resolve(name):
                        first = int(name[1:]) * RANKS
                        wanted = [address_of(first + rank) for rank in range(RANKS)]
                        if [end.address for end in ends] != wanted:
                            sys.exit(f"client {number} found {ends} for {name}, and {wanted} are registered")
                        del waiting[number]
                        counted["found"] += 1
                return not waiting

            wait(look)

        def rested() -> None:
            time.sleep(rest)

        def left() -> None:
            threads = [threading.Thread(target=client.close) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        phase("open", opened)
        phase("register", registered)
        counted["registered"] = listed(config)
        phase("find", found)
        during = state()
        phase(f"rest_{rest:g}_s", rested)
        phase("leave", left)
        wait(lambda: not listed(config))
        counted["left"] = counted["registered"] - listed(config)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    made = len(clients)
    if set(counted.values()) != {made}:
        sys.exit(f"{made} clients were started, and the directory counted {counted}")
    each = {name: round((during[name] - before[name]) / made, 2) for name in before}
    result: dict[str, Any] = {"directory": kind, "clients": made, "instances": instances, **counted}
    return {**result, "phases": phases, "one_client": each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", choices=("server", "etcd"), default="server")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rest", type=float, default=REST, help="seconds for which the clients rest")
    given = parser.parse_args()
    print(json.dumps(measure(given.directory, given.clients, given.rest), indent=2))


if __name__ == "__main__":
    main()
