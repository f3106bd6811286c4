"""Requests that move while they run: this server ends them, and another one goes on from their state.

vLLM ends such a request as one that has all the tokens it asked for, after the token under way. So its answer, or the
last part of its stream, carries the parameters for the next server. They say that the request ``moves``, and how many
of its tokens were ``generated``. The next server gets these tokens behind the prompt, and takes them for generated
ones: penalties count them, as do ``min_tokens`` and ``max_tokens``.
"""

from __future__ import annotations

import copy
import hmac
import logging
import re
import signal
import threading
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.request import RequestStatus

from ._places import place_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Asked", "Moving", "has_moved"]

log = logging.getLogger("vllm.statelink")

ENDING = re.compile(r"(?:-[0-9]{1,9})?(?:-[0-9a-f]{8})?")
"""What vLLM adds to the id of an answer, for its requests: the prompt's number, and random digits."""


FIRST_RUNNER = (
    "with vLLM's first model runner, another server knows neither what was generated nor the state of the seed"
)


class Asked(NamedTuple):
    """What was asked for, and by whom.

    Attributes:
        which: The ids of answers whose requests are to move; ``None`` for all that run.
        key: The key that came with it.
    """

    which: tuple[str, ...] | None
    key: str

    @classmethod
    def read(cls, params: Any) -> Asked | None:
        """Read ``kv_transfer_params``: ``{"move": true, "key": ...}``, or a list of ids in place of ``true``."""
        given = params.get("move") if isinstance(params, Mapping) else None
        if given is None:
            return None
        ids = tuple(each for each in given if isinstance(each, str)) if isinstance(given, list) else ()
        return cls(None if given is True else ids, str(params.get("key", "")))


class Moving:
    """Knows each request of this server, and which of them move. Runs on the thread of the engine core.

    Args:
        key: Who asks for a move has to know it; empty if nobody may.
        follows: Whether the model's runner takes tokens for generated ones that another server has generated.
            vLLM's first runner does not.
        longest: Most tokens of a request.
        drains: Whether vLLM's engine core waits for what runs when it gets SIGTERM. Then all requests move.

    Attributes:
        draining: Whether this server ends. A signal handler sets it.
    """

    def __init__(self, key: str, *, follows: bool, longest: int, drains: bool) -> None:
        self._key = key
        self._follows = follows
        self._longest = longest
        self._requests: dict[str, Request] = {}
        self._leaving: set[str] = set()
        self._left = 0
        self._watches = not (key and drains)
        self._drained = False
        self.draining = False

    def arrived(self, request: Any) -> None:
        """A request has come."""
        if self._key:
            self._requests[request.request_id] = request
        if not self._watches:  # some releases of vLLM set their own handler behind the making of the connector
            self._watches = True
            self._watch_signal()

    def _watch_signal(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            return  # the engine is a part of somebody's program, which ends it as it likes

        def handle(number: int, frame: Any) -> None:  # on the main thread, between two instructions of Python
            self.draining = True
            before(number, frame)

        signal.signal(signal.SIGTERM, handle)

    def goes_on(self, request: Any) -> None:
        """Let a request go on from where it was on another server, if ``kv_transfer_params`` say so.

        They say how many of its last tokens that server has generated. vLLM then takes it for one that it preempted.
        """
        count = request.kv_transfer_params.get("generated") if has_moved(request) else None
        sampling = request.sampling_params
        if type(count) is not int or request.prompt_token_ids is None or sampling is None:
            return
        if not 0 < count < request.num_prompt_tokens:
            return
        if not self._follows:
            if _counts(sampling):
                log.warning(
                    "request %s may get other tokens than where it came from: %s", request.request_id, FIRST_RUNNER
                )
            return
        request._output_token_ids.extend(request.prompt_token_ids[-count:])  # noqa: SLF001
        request.prompt_token_ids = request.prompt_token_ids[:-count]
        request.num_prompt_tokens -= count
        request.prefill_stats = None  # vLLM counts what it has of a prompt once, before a request is preempted
        request.sampling_params = sampling = copy.copy(sampling)
        sampling.min_tokens += count if sampling.min_tokens else 0
        if sampling.max_tokens is not None:
            sampling.max_tokens += count
        request.max_tokens += count

    def refusal(self, asked: Asked) -> str:
        """Why nothing is done of what was asked for; empty if it is."""
        if not self._key:
            return "this server moves no requests: its configuration names no file with a key ('move_key_file')"
        if not hmac.compare_digest(asked.key.encode(errors="surrogatepass"), self._key.encode()):
            return "the 'key' is not the one of this server"
        if asked.which == ():
            return "'move' is neither true nor a list of the ids of answers"
        return ""

    def choose(self, which: Iterable[str] | None, awaited: Container[str]) -> tuple[list[Request], dict[str, str]]:
        """The requests that end now, and why others do not, by request.

        Args:
            which: The ids of their answers; ``None`` for all.
            awaited: Requests of whose prompt another server waits for the state.
        """
        moved: list[Request] = []
        stay: dict[str, str] = {}
        for name, request in self._requests.items():
            if name in self._leaving or request.is_finished() or not _is_one_of(name, which):
                continue
            why = _why_it_stays(request, follows=self._follows)
            if not why and name in awaited:
                why = "another server waits for the state of its prompt"
            made = request.num_output_tokens + max(request.num_output_placeholders, 1)
            if not why and made >= request.max_tokens:
                why = "it ends with the token under way"
            if why:
                stay[name] = why
                continue
            request.max_tokens = made
            if request.sampling_params is not None and request.sampling_params.min_tokens > made:
                request.sampling_params = copy.copy(request.sampling_params)
                request.sampling_params.min_tokens = made
            self._leaving.add(name)
            moved.append(request)
        return moved, stay

    def ended(self, request: Any) -> dict[str, Any] | None:
        """What the answer of a request says beside where its state is, if it moves; ``None`` if it has just ended."""
        name = request.request_id
        self._requests.pop(name, None)
        if name not in self._leaving:
            return None
        self._leaving.remove(name)
        # The client may have left, a token may have come that ends the answer, or the model takes no more.
        if request.status is not RequestStatus.FINISHED_LENGTH_CAPPED or request.num_tokens >= self._longest:
            return None
        self._left += 1
        return {"moves": True, "generated": request.num_output_tokens}

    def __bool__(self) -> bool:
        """Whether a request is known that has not ended."""
        return bool(self._requests)

    def drained(self) -> None:
        """Say that the last state has left, once."""
        if self._drained:
            return
        self._drained = True
        log.info("this server is drained: %d requests go on elsewhere, and their state has left", self._left)


def has_moved(request: Any) -> bool:
    """Whether a request comes from another server on which it ran, if ``kv_transfer_params`` say so."""
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and params.get("moves") is True


def _is_one_of(name: str, which: Iterable[str] | None) -> bool:
    return which is None or any(name.startswith(each) and ENDING.fullmatch(name[len(each) :]) for each in which)


def _why_it_stays(request: Any, *, follows: bool) -> str:
    """Why a request cannot go on elsewhere with the tokens that it would have here; empty if it can."""
    sampling = request.sampling_params
    if sampling is None:
        return "it generates nothing"
    if place_of(request).several:
        return "it is one of several answers to a prompt ('n'), and vLLM's answer has the parameters of one of them"
    if request.mm_features or request.prompt_embeds is not None:
        return "its prompt has more than tokens, and a client cannot give generated tokens behind them"
    if sampling.structured_outputs is not None:
        return "another server would begin its grammar anew"
    if sampling.stop:
        return "another server does not see a stop string that has begun here"
    if sampling.thinking_token_budget is not None:
        return "another server would count its tokens of thinking anew"
    if request.resumable:
        return "its input is a stream"
    return FIRST_RUNNER if not follows and _counts(sampling) else ""


def _counts(sampling: Any) -> bool:
    """Whether the next token depends on which tokens were generated, or on how many."""
    counts = sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words
    return bool(counts) or sampling.seed is not None
