"""What fails behind an answer at once, when only the API server knows it: stand-ins for what vLLM serves."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from pages import DOCS
from support.engines import PREFILL
from support.simulated_engine import tokens_of
from support.simulated_pair import STREAMS, pair_of
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request, RequestStatus

import statelink_vllm
from statelink_vllm.connector import SEAM

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

HERE = {"remote_engine_id": "prefill-0", "peer": ["tcp://127.0.0.1:7100"]}
ENGINES = [b"0", b"1"]
Reply = tuple[int, dict[str, Any]]


class Api:
    """An API server with two engines: hands a request to the second one, and then answers as it is told."""

    def __init__(self) -> None:
        config = SimpleNamespace(served_model_name=["model"])
        self.client = mock.AsyncMock()
        self.client.generate = mock.Mock()
        self.client.engine_core = SimpleNamespace(core_engines=ENGINES, reqs_in_flight={"r": ENGINES[1]})
        self.client.vllm_config = mock.MagicMock(model_config=config)
        self.client.vllm_config.aux_output_config.enable_return_routed_experts = False
        self.added = self.client.add_request
        self.added.return_value = SimpleNamespace(request_id="r")
        self.served = statelink_vllm.AnswerAtOnce(self._serve)
        self.reply: Reply | BaseException = RuntimeError()
        self.given: Any = None
        self.asked: dict[str, Any] = dict(PREFILL)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        params = SamplingParams(
            max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, extra_args={"kv_transfer_params": dict(self.asked)}
        )
        prompt = {"type": "token", "prompt_token_ids": [5, 6, 7]}
        self.client.generate(prompt, params, "r")
        await self.client.add_request("r", prompt, params)
        self.given = params.extra_args["kv_transfer_params"]
        if isinstance(self.reply, BaseException):
            raise self.reply
        status, body = self.reply
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    def ask(self, reply: Reply | BaseException, broken: bool = False) -> list[Any]:
        """Let vLLM answer so, and return what a router gets: statuses and bodies."""
        self.reply = reply
        got: list[Any] = []
        asyncio.run(self.serve(got, broken))
        return got

    async def serve(self, got: list[Any], broken: bool = False) -> None:
        """Serve a request, and add to a list what a router gets."""

        async def send(message: Any) -> None:
            if broken:
                raise OSError("the router has left")
            got.append(message.get("status") or json.loads(message["body"]))

        state = SimpleNamespace(state=SimpleNamespace(engine_client=self.client))
        scope = {"type": "http", "path": "/v1/completions", "app": state}
        await self.served(scope, mock.AsyncMock(), send)


@pytest.fixture
def api() -> Api:
    made = Api()
    first = made.ask((200, {"kv_transfer_params": {**HERE, "do_remote_prefill": True}}))
    assert first == [200, {"kv_transfer_params": {**HERE, "do_remote_prefill": True}}]
    assert made.given == PREFILL
    return made


def test_the_addresses_are_those_of_the_last_answer(api: Api) -> None:
    moved = {**HERE, "peer": ["tcp://127.0.0.1:7200"]}
    for expected in (HERE, moved):
        status, body = api.ask((200, {"kv_transfer_params": {**moved, "do_remote_prefill": True}}))
        params = body["kv_transfer_params"]
        assert (status, params) == (
            200,
            {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": api.given["transfer_id"], **expected},
        )
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    api.client.abort.assert_not_awaited()


@pytest.mark.parametrize("reply", [(400, {"error": {"message": "no such grammar"}}), (500, {}), RuntimeError("bug")])
@pytest.mark.parametrize("dead", [False, True])
def test_the_engine_hears_of_a_request_that_the_server_refuses_behind_its_answer(
    api: Api, reply: Reply | BaseException, dead: bool
) -> None:
    if dead:
        api.client.abort.side_effect = RuntimeError("the engine is dead")
    if isinstance(reply, BaseException):
        with pytest.raises(RuntimeError, match="bug"):
            api.ask(reply)
    else:
        status, body = api.ask(reply)
        assert (status, body["kv_transfer_params"]["transfer_id"]) == (200, api.given["transfer_id"])
    ((name, prompt, given), more) = api.added.await_args
    params = given.extra_args["kv_transfer_params"]
    assert (name, prompt["prompt_token_ids"]) == (f"failed-{api.given['transfer_id']}", [5, 6, 7])
    assert (params["do_remote_decode"], params["transfer_id"]) == (True, api.given["transfer_id"])
    assert params["failed"].startswith("prefill's server answered ")
    assert "no such grammar" in params["failed"] or "its log says why" in params["failed"]
    assert more == {"data_parallel_rank": 1, "lora_request": None}
    api.client.abort.assert_awaited_once_with("r", internal=True)


@pytest.mark.parametrize("asked", [{"do_remote_prefill": True}, {"cached": True}, {"hold": 60}])
def test_what_only_the_answer_can_say_is_waited_for(api: Api, asked: dict[str, Any]) -> None:
    api.asked |= asked
    said = {"kv_transfer_params": {**HERE, "do_remote_prefill": True, "tokens": 9}}
    assert api.ask((200, said)) == [200, said]


def test_a_request_that_came_before_the_first_answer_is_not_answered_at_once() -> None:
    """The first answer comes while vLLM hands that request to its engine."""
    api = Api()
    done = (200, {"kv_transfer_params": {**HERE, "do_remote_prefill": True}})
    here = api.added.return_value

    async def another(*args: Any, **kwargs: Any) -> Any:
        api.added.side_effect = None
        await contextvars.Context().run(asyncio.create_task, api.serve([]))
        return here

    api.added.side_effect = another
    assert api.ask(done) == [200, done[1]]
    assert api.ask(done)[1]["id"].startswith("cmpl-once-")


def test_a_router_that_has_left_gets_no_answer_and_vllm_hears_of_it(api: Api) -> None:
    with pytest.raises(OSError, match="has left"):
        api.ask((200, {}), broken=True)
    api.client.abort.assert_not_awaited()


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("aborted", [False, True])
def test_decode_hears_why(configuration: Path, kind: str, asked: bool, aborted: bool) -> None:
    """A request for the same prompt says it. Decode computes the prompt."""
    pair = pair_of(configuration, ("full",) if kind == "full" else ("full", kind), blocks=(4, 4), spare=(30, 30))
    prefill, decode = pair.engines
    params = {"transfer_id": "once-1", "peer": ["tcp://127.0.0.1:1"], "remote_engine_id": "one"}
    if asked:
        decode.add("r", STREAMS[0][:20], 4, {**params, "do_remote_prefill": True})
        for _ in range(3):
            decode.step()
    said = {**PREFILL, "transfer_id": "once-1", "failed": "prefill's server answered 400: no such grammar"}
    given = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": said})
    if aborted:
        prefill.scheduler.add_request(Request("failed-once-1", STREAMS[0][:20], given, None))
        prefill.scheduler.finish_requests("failed-once-1", RequestStatus.FINISHED_ABORTED)
    else:
        prefill.add("failed-once-1", STREAMS[0][:20], 1, said)
    for _ in range(9):
        prefill.step()
    (room,) = pair.network.rooms["send"]
    assert room.given_up == "prefill's server answered 400: no such grammar"
    if asked:
        (receiving,) = pair.network.rooms["receive"]
        assert (room.room, room.content, room.tokens) == (receiving.room, receiving.content, receiving.tokens)
        pair.settle()
        assert decode.ended["r"].tokens == tokens_of(STREAMS[0][:20], 4)


def test_the_page_names_the_middleware() -> None:
    (module, name) = re.findall(r"^--middleware (\w+)\.(\w+)$", (DOCS / "vllm.md").read_text(), re.MULTILINE)[0]
    assert getattr(importlib.import_module(module), name) is statelink_vllm.AnswerAtOnce


def test_the_installed_vllm_has_what_the_middleware_uses() -> None:
    statelink_vllm.AnswerAtOnce(mock.AsyncMock())
    assert SEAM.differences() == []
