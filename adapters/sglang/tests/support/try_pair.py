"""``make try-sglang``: a tiny pair behind SGLang's router on a CPU, and one server. Prints an answer of each."""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import try_it
from engine_environments import SGLANG
from engine_processes import Answer, HttpServer, free_port, running

from .models import make_llama
from .servers import Alone, Pair

if TYPE_CHECKING:
    from pathlib import Path

PAGE, ROUTER, CURL = "sglang.md", "sglang_router.launch_router", "curl"
SECONDS = 120


class Router(HttpServer[Answer]):
    """The router, started as the page says, in front of a pair."""

    def __init__(self, folder: Path, pair: Pair) -> None:
        ports = {30000: pair.prefill.port, 8998: pair.bootstrap_port, 30001: pair.decode.port}
        given = shlex.split(try_it.block(PAGE, ROUTER))
        assert given[0] == "python", given
        at = given.index("--port")
        del given[at : at + 2]  # a free one follows
        for theirs, ours in ports.items():
            given = [word.replace(str(theirs), str(ours)) for word in given]
        more = ["--prometheus-port", str(free_port())]
        super().__init__("router", folder, [sys.executable, "-W", "ignore", *given[1:], *more], SGLANG)

    def answer(self, body: dict[str, Any]) -> Answer:
        """Its first answer with the status 200: it says that it is ready before it knows the servers."""
        until = time.monotonic() + SECONDS
        while (answer := self.ask("/v1/completions", body)).status != 200:
            assert self.running, self.logged()
            assert time.monotonic() < until, (answer, self.logged()[-4000:])
            time.sleep(0.5)
        return answer


def main() -> None:
    """Start them, ask, print, and end them."""
    with try_it.folder() as folder:
        model = make_llama(folder / "model")
        body = try_it.request(PAGE, CURL, str(model))
        print("starting a prefill server and a decode server, which takes a minute …", flush=True)
        with (
            running(Pair(folder, model, {"backend": "tcp", "verify": "digest"})) as pair,
            Alone(folder, model, []) as alone,
        ):
            router = Router(folder, pair)
            try:
                router.wait_ready()
                answers = [router.answer(body), alone.server.ask("/v1/completions", body)]
            finally:
                router.kill()
            try_it.report(*(answer.body["choices"][0]["text"] for answer in answers))


if __name__ == "__main__":
    main()
