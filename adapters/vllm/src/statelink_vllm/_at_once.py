"""A middleware of vLLM's API server, for serial routers: prefill answers as soon as its engine has the request.

A serial router asks decode when prefill has answered. So nothing of a transfer overlaps with prefill's forward pass.
All that such a router takes from prefill's answer are its ``kv_transfer_params``, and all of these can be known before:
the room follows from a ``transfer_id``, and the addresses are those of every earlier answer. So the request goes on
behind the answer, and decode asks for its state as it does behind a router that asks both servers at once.

Everything here runs in the event loop of an API server. vLLM itself reads, checks and admits the request. Whatever it
refuses until the engine has the request is answered as without the middleware, and so is every request that cannot be
answered early.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from ._params import LONGEST_ID
from ._seam import SEAM

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

__all__ = ["AnswerAtOnce"]

log = logging.getLogger("vllm.statelink")

PATHS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "/v1/completions": ("cmpl", "text_completion", {"text": ""}),
    "/v1/chat/completions": ("chatcmpl", "chat.completion", {"message": {"role": "assistant", "content": ""}}),
}
"""Where a request may be answered early: how the id of the answer begins, its type, and what each choice has."""
IN_THE_ANSWER = ("do_remote_prefill", "hold", "cached")
"""With these parameters, the answer says for how many tokens there is state. That is not known before."""


class AnswerAtOnce:
    """Answers requests that have ``do_remote_decode`` as soon as the engine has them.

    It answers those for one token, without logprobs and without a stream, if this server has answered such a request
    before. If an answered request fails, so does its room on both sides, with the reason.

    Args:
        app: What vLLM serves.

    Raises:
        ConfigError: This vLLM lacks what the middleware needs.
    """

    def __init__(self, app: App) -> None:
        SEAM.check(allowed=True)
        self._app = app
        self._client: Any = None
        self._known: dict[bytes, dict[str, Any]] = {}
        """For each engine behind this API server, where its links are, as its last answer had it."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve a request."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        client = getattr(scope["app"].state, "engine_client", None) if path in PATHS else None
        if client is None:
            await self._app(scope, receive, send)
            return
        self._watch(client)
        exchange = _Exchange(path, receive, send)
        token = _CURRENT.set(exchange)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            _CURRENT.reset(token)
            self._learn(exchange)
            if exchange.transfer and exchange.status != 200:
                await self._refuse(client, exchange)

    def _watch(self, client: Any) -> None:
        """See what vLLM hands to its engines: of each request, its calls run in the context of that request."""
        if client is self._client:
            return
        self._client = client
        generate, add = client.generate, client.add_request

        def watched(*args: Any, **kwargs: Any) -> Any:
            exchange = _CURRENT.get()
            if exchange is not None:
                exchange.prompts += 1  # of a list, vLLM calls this for each prompt before it adds any request
            return generate(*args, **kwargs)

        async def added(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            exchange = _CURRENT.get()
            if exchange is None or not self._may(client, exchange, prompt, params):
                return await add(request_id, prompt, params, *args, **kwargs)
            exchange.wanted, exchange.prompt, exchange.adapter = True, prompt, kwargs.get("lora_request")
            transfer = self._name(params) if self._known else ""
            queue = await add(request_id, prompt, params, *args, **kwargs)
            exchange.engine = _engine_of(client, queue)
            known = None if exchange.engine is None else self._known.get(exchange.engine)
            if transfer and known is not None:  # another request may have been answered meanwhile
                adapter, config = exchange.adapter, client.vllm_config.model_config
                model = config.served_model_name if adapter is None else adapter.lora_name
                await exchange.answer(transfer, known, model, params.n, len(prompt["prompt_token_ids"]))
            return queue

        client.generate, client.add_request = watched, added

    @staticmethod
    def _may(client: Any, exchange: _Exchange, prompt: Any, params: Any) -> bool:
        """Whether only the ``kv_transfer_params`` of a request's answer are wanted, and one engine computes it."""
        if not isinstance(params, SamplingParams) or not isinstance(prompt, dict) or "prompt_token_ids" not in prompt:
            return False
        given = (params.extra_args or {}).get("kv_transfer_params")
        if not isinstance(given, dict) or given.get("do_remote_decode") is not True:
            return False
        if any(given.get(key) for key in IN_THE_ANSWER):
            return False
        name = given.get("transfer_id")
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= LONGEST_ID):
            return False
        plain = params.logprobs is None and params.prompt_logprobs is None and params.logprob_token_ids is None
        one = params.max_tokens == 1 and params.output_kind is RequestOutputKind.FINAL_ONLY
        experts = client.vllm_config.aux_output_config.enable_return_routed_experts
        # Several answers to a prompt may be computed by several engines, and each prompt of a list, too.
        here = exchange.prompts == 1 and (params.n == 1 or len(client.engine_core.core_engines) == 1)
        return plain and one and here and not experts

    @staticmethod
    def _name(params: SamplingParams) -> str:
        """Give a request a ``transfer_id``, if a router has not. Returns it."""
        extra: dict[str, Any] = params.extra_args or {}
        given = extra["kv_transfer_params"]
        transfer: str | None = given.get("transfer_id")
        if transfer is None:
            transfer = f"once-{secrets.token_hex(16)}"
            given = {**given, "transfer_id": transfer, "once": True}
            params.extra_args = {**extra, "kv_transfer_params": given}
        return transfer

    def _learn(self, exchange: _Exchange) -> None:
        """Take the addresses from vLLM's own answer. So those of an engine that was started anew are known, too."""
        if not exchange.wanted or exchange.engine is None or exchange.status != 200:
            return
        said = exchange.said("kv_transfer_params")
        if said.get("do_remote_prefill") and isinstance(said.get("peer"), list):
            self._known[exchange.engine] = {key: said[key] for key in ("remote_engine_id", "peer")}

    @staticmethod
    async def _refuse(client: Any, exchange: _Exchange) -> None:
        """Fail the room of a request that was answered and then refused, perhaps before the scheduler knew it.

        Another request for the same prompt says so to the connector, and is not computed. If the connector has failed
        the room itself, this one changes nothing.
        """
        reason = exchange.said("error").get("message", "its log says why")
        why = f"prefill's server answered {exchange.status or 'nothing'}: {reason}"
        log.warning("a request that was answered at once has failed: %s", why)
        engines = client.engine_core.core_engines
        rank = engines.index(exchange.engine) if len(engines) > 1 and exchange.engine in engines else None
        said = {"do_remote_decode": True, "transfer_id": exchange.transfer, "failed": why}
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": said})
        more = {"lora_request": exchange.adapter, "data_parallel_rank": rank}
        try:
            queue = await client.add_request(f"failed-{exchange.transfer}", exchange.prompt, params, **more)
            await client.abort(queue.request_id, internal=True)
        except Exception as error:  # the engine is dead, and decode loses its links
            log.warning("decode is not told of it: %s: %s", type(error).__name__, error)


class _Exchange:
    """A request of an HTTP client, and its answer.

    Args:
        path: What is asked.
        receive: ASGI's.
        send: ASGI's.

    Attributes:
        prompts: How many prompts vLLM made of it.
        wanted: Whether vLLM's own answer is kept.
        prompt: What vLLM adds to its engine.
        adapter: vLLM's request for an adapter (LoRA), if there is one.
        engine: vLLM's identity of the engine that has the request; ``None`` until then.
        transfer: The ``transfer_id`` with which it was answered early; empty if it was not.
        status: The HTTP status of vLLM's own answer; 0 until then.
        body: The body of that answer.
    """

    def __init__(self, path: str, receive: Receive, send: Send) -> None:
        self._path, self._receive, self._send = path, receive, send
        self.prompts = 0
        self.wanted = False
        self.prompt: Any = None
        self.adapter: Any = None
        self.engine: bytes | None = None
        self.transfer = ""
        self.status = 0
        self.body = b""

    async def receive(self) -> Message:
        """What the client sends. An early answer ends the exchange for the server, and not the request."""
        message = await self._receive()
        if self.transfer and message["type"] == "http.disconnect":
            await asyncio.Event().wait()  # vLLM would abort the request; it cancels this at the request's end
        return message

    async def send(self, message: Message) -> None:
        """VLLM's own answer. Nobody waits for it after an early one."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self.wanted and message["type"] == "http.response.body":
            self.body += message.get("body", b"")
        if not self.transfer:
            await self._send(message)

    async def answer(self, transfer: str, known: dict[str, Any], model: Any, count: int, tokens: int) -> None:
        """Answer early.

        Args:
            transfer: The router's id of the request, or the one in place of it.
            known: Where the engine's links are.
            model: The model's name, or several.
            count: How many answers are wanted.
            tokens: Number of tokens of the prompt: a router may state it to the client.
        """
        prefix, kind, empty = PATHS[self._path]
        body = json.dumps(
            {
                "id": f"{prefix}-{transfer}",
                "object": kind,
                "created": int(time.time()),
                "model": model[0] if isinstance(model, list) else model,
                "choices": [{"index": place, **empty, "finish_reason": "length"} for place in range(count)],
                "usage": {"prompt_tokens": tokens, "completion_tokens": count, "total_tokens": tokens + count},
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": transfer,
                    **known,
                },
            }
        ).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self.transfer = transfer
        try:
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
        except OSError:  # the client has left: vLLM hears of it, and aborts the request
            self.transfer = ""

    def said(self, key: str) -> dict[str, Any]:
        """An object in vLLM's own answer; empty if it has none."""
        try:
            found = json.loads(self.body)[key]
        except (ValueError, KeyError, TypeError):
            found = None
        return found if isinstance(found, dict) else {}


_CURRENT: ContextVar[_Exchange | None] = ContextVar("statelink_exchange", default=None)
"""The exchange to which what runs belongs. Tasks that vLLM makes for a request inherit it."""


def _engine_of(client: Any, queue: Any) -> bytes | None:
    """VLLM's identity of the engine that has a request; ``None`` if it has ended already."""
    core = client.engine_core
    if len(core.core_engines) == 1:
        found: bytes | None = core.core_engines[0]
    else:
        found = core.reqs_in_flight.get(queue.request_id)
    return found
