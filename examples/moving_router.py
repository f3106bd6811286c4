"""A small router for vLLM servers whose requests move while they run: it has another server go on, in the same stream.

    python examples/moving_router.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 \
        --decode http://127.0.0.1:8201 --move-key-file key

It knows ``/v1/completions``, for one prompt and one answer. If a decode server ends a request because it moves, the
router has another one go on with it, and the client sees one stream. docs/moving.md has the meaning of every field.

A server from which a request has moved gets no others, until ``POST /use`` with its URL says that it may.
``POST /drain`` with ``{"server": "http://127.0.0.1:8200"}`` has a decode server hand over all that runs there. One that
gets SIGTERM does so by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from aiohttp import ClientConnectionError, ClientSession, ClientTimeout, web

NOT_FOR_PREFILL = ("stream", "stream_options", "min_tokens", "logprobs", "echo", "n")
ONCE = ("echo", "prompt_logprobs")
"""What the first server has answered."""
DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


class Refused(Exception):
    """A server answered with an error: its status and its body."""


class Router:
    """Routes completions.

    Args:
        prefill: The prefill servers.
        decode: The decode servers.
        key: What decode servers want to be told before they hand requests over.
    """

    def __init__(self, prefill: list[str], decode: list[str], key: str) -> None:
        self._prefill = itertools.cycle(prefill)
        self._decode = decode
        self._turn = itertools.count()
        self._key = key
        self._away: set[str] = set()

    async def start(self, app: web.Application) -> AsyncIterator[None]:
        """The client, for as long as the router runs."""
        async with ClientSession(timeout=ClientTimeout(total=None, sock_connect=5)) as self._client:
            yield

    # Servers.

    async def _ask(self, server: str, body: Json) -> Json:
        async with self._client.post(f"{server}/v1/completions", json=body) as answer:
            said: Json = await answer.json()
            if answer.status != 200:
                raise Refused(answer.status, said)
            return said

    async def _parts(self, server: str, body: Json) -> AsyncGenerator[Json, None]:
        """The parts of a stream."""
        async with self._client.post(f"{server}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise Refused(answer.status, await answer.json())
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def _next(self) -> list[str]:
        """The decode servers, the one whose turn it is first. Those that are away come last, in case all are."""
        first = next(self._turn) % len(self._decode)
        servers = self._decode[first:] + self._decode[:first]
        return sorted(servers, key=lambda each: each in self._away)

    # One completion.

    async def _answer(self, body: Json) -> AsyncIterator[Json]:
        """The parts of an answer, of however many servers they come."""
        asked = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
        asked |= {"max_tokens": 1, "return_token_ids": True, "kv_transfer_params": {"do_remote_decode": True}}
        said = await self._ask(next(self._prefill), asked)
        prompt: list[int] = said["choices"][0]["prompt_token_ids"]
        params, made = said.get("kv_transfer_params") or {}, 0
        while True:
            rest = {**body, "stream": True, "return_token_ids": True, "prompt": prompt, "kv_transfer_params": params}
            if body.get("min_tokens"):
                rest["min_tokens"] = max(0, body["min_tokens"] - made)
            rest["max_tokens"] = body.get("max_tokens", 16) - made
            if made:
                rest = {key: value for key, value in rest.items() if key not in ONCE}
            moved = None
            async with aclosing(self._somewhere(rest)) as parts:
                async for part in parts:
                    said = part.get("kv_transfer_params") or {}
                    choice = part["choices"][0] if part["choices"] else {}
                    new = choice.get("token_ids") or []
                    if made:  # another server's prompt is this one's, and what was generated
                        choice.pop("prompt_token_ids", None)
                    prompt, made = [*prompt, *new], made + len(new)
                    if said.get("moves"):
                        moved = said
                        choice["finish_reason"] = None
                    yield {key: value for key, value in part.items() if key != "kv_transfer_params"}
                    if moved is not None:  # what is left of this stream is not the client's
                        break
            if moved is None:
                return
            params = moved

    async def _somewhere(self, body: Json) -> AsyncGenerator[Json, None]:
        """The parts of an answer of the first server that takes the request."""
        for server in self._next():
            begun = False
            try:
                async with aclosing(self._parts(server, body)) as parts:
                    async for part in parts:
                        begun = True
                        if (part.get("kv_transfer_params") or {}).get("moves"):
                            self._away.add(server)
                        yield part
            except ClientConnectionError:
                self._away.add(server)
                if begun:
                    raise
            else:
                return
        raise web.HTTPServiceUnavailable(text="no decode server takes the request")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        body = await request.json()
        parts = self._answer(body)
        try:
            first = await anext(parts)
        except Refused as refused:
            status, said = refused.args
            return web.json_response(said, status=status)
        if not body.get("stream"):
            return web.json_response(await _whole(first, parts))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: " + json.dumps(first).encode() + b"\n\n")
        async for part in parts:
            await answer.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        await answer.write(DONE)
        return answer

    # For an operator.

    async def drain(self, request: web.Request) -> web.Response:
        """``POST /drain``."""
        server = (await request.json())["server"]
        self._away.add(server)
        asked = {"prompt": [1], "max_tokens": 1, "kv_transfer_params": {"move": True, "key": self._key}}
        return web.json_response((await self._ask(server, asked)).get("kv_transfer_params"))

    async def use(self, request: web.Request) -> web.Response:
        """``POST /use``."""
        self._away.discard((await request.json())["server"])
        return web.json_response({})

    async def health(self, request: web.Request) -> web.Response:
        """``GET /health``."""
        return web.json_response({})


async def _whole(first: Json, parts: AsyncIterator[Json]) -> Json:
    """One answer of all parts."""
    choice = first["choices"][0]
    async for part in parts:
        for more in part["choices"]:
            choice["text"] += more["text"]
            choice["token_ids"] = [*(choice.get("token_ids") or []), *(more.get("token_ids") or [])]
            choice["finish_reason"] = more.get("finish_reason") or choice["finish_reason"]
    return {**first, "object": "text_completion"}


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--move-key-file", type=Path)
    arguments = parser.parse_args()
    key = arguments.move_key_file.read_text().strip() if arguments.move_key_file else ""
    router = Router(arguments.prefill, arguments.decode, key)
    app = web.Application()
    app.cleanup_ctx.append(router.start)
    app.add_routes(
        [
            web.post("/v1/completions", router.complete),
            web.post("/drain", router.drain),
            web.post("/use", router.use),
            web.get("/health", router.health),
        ]
    )
    web.run_app(app, host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
