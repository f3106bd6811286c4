"""The scheduler's side: what each request needs, and when its blocks may be used again.

vLLM calls everything here from the thread of the engine core, between steps. Nothing blocks. There are no tensors here.
"""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.request import RequestStatus

from statelink.errors import ConfigError

from ._admission import Admission, blocks_needed
from ._content import content_of_request, ids_of_request
from ._held import HeldBlocks
from ._leases import Leases
from ._messages import Address, FromWorker, Receive, Send, Tables, ToWorker
from ._misdirected import Misdirected
from ._moving import Asked, Moving, has_moved
from ._params import Prefix, Source, Wanted, answer, failure, fresh_room, held, refusal, wanted
from ._places import place_of
from ._prefixes import Prefixes, longest_of
from ._repeats import Repeats
from ._rest import rest
from ._retries import Retries
from ._unclaimed import Unclaimed

if TYPE_CHECKING:
    from ._early import EarlyChunks
    from ._options import Options

__all__ = ["SchedulerSide"]

log = logging.getLogger("vllm.statelink")

COMPUTED = (
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_REPETITION,
)
"""The final statuses of a request whose whole prompt was computed."""

KINDS = "a server of a model with windows, attention chunks, recurrent layers, or drafts of several tokens"
"""Models of which prefill does not compute the last tokens of a prompt; see `SchedulerSide.tokens`."""

NOTHING = Wanted()


class _Loading(NamedTuple):
    """A request that is received, and its blocks."""

    request: Any
    tables: Tables


class SchedulerSide:
    """Decides what is sent and received.

    Args:
        options: What the operator configured.
        engine_id: The name of this instance.
        cache: vLLM's ``KVCacheConfig``.
        left_out: How many of a prompt's last tokens prefill does not compute; see `tokens`.
        beyond: Tokens behind a request's own for which vLLM reserves blocks, for drafts.
        early: What is sent before the end of a prompt.
        moving: What moves to another server while it runs.
        follows: Whether drafts are made by a model whose state of a token depends on the next one.
        awaited: Whether other ranks wait for the end of each step, as those of data parallelism do that share experts.
        spread: Whether vLLM chooses a rank of data parallelism for each answer to a prompt.
    """

    def __init__(
        self,
        options: Options,
        engine_id: str,
        cache: Any,
        left_out: int,
        beyond: int,
        early: EarlyChunks,
        moving: Moving,
        *,
        follows: bool,
        awaited: bool,
        spread: bool,
    ) -> None:
        self._options = options
        self._follows, self._awaited, self._spread = follows, awaited, spread
        self._engine_id = engine_id
        self._cache = cache
        self._left_out = left_out
        self._secret = secrets.token_bytes(16)
        self._next = ToWorker()
        self._addresses: tuple[str, ...] = ()
        self._wanted: dict[str, Wanted] = {}
        """What each request wants that came with ``kv_transfer_params``, until it ends. A source is taken once."""
        self._unfinished: set[str] = set()
        """All requests that have not ended, by vLLM's id."""
        self._leases = Leases(options.link.deadline)
        self._turns: dict[int, str] = {}
        """The rooms whose state is held for a turn to come, and the request of each."""
        self._misdirected = Misdirected()
        self._loading: dict[str, _Loading] = {}
        self._lacking: dict[str, set[int]] = {}
        """Per request that is received, blocks that lack tokens in front of a window, as far as ranks have said."""
        self._manager: Any = None
        self.held = HeldBlocks()
        self.retries = Retries()
        self._repeats = Repeats()
        self._admission = Admission(beyond)
        self._prefixes = Prefixes(cache, left_out, drafts=beyond > 0)
        self._unclaimed = Unclaimed()
        self._looked_at: Any = None
        """The request that vLLM looked at last in this step, if it has got no blocks."""
        self.early = early
        self.moving = moving
        self._answers: dict[str, dict[str, Any]] = {}
        """What requests are answered that only ask for something."""

    def bind(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``: blocks of failed requests may be held in its pool."""
        self._manager = manager
        self.held.bind(manager.block_pool)
        self.early.bind(manager.block_pool)
        self.retries.bind(manager)
        self._admission.bind(manager)
        self._unclaimed.bind(manager.block_pool)

    def set_addresses(self, found: Mapping[tuple[int, int], Any]) -> None:
        """Take the address of each worker's link, by pipeline stage and rank of tensor parallelism.

        Raises:
            ConfigError: They are another connector's.
        """
        addresses = [found[place] for place in sorted(found)]
        others = {type(each).__name__ for each in addresses if not isinstance(each, Address)}
        if others:
            raise ConfigError(
                "this vLLM server cannot use StatelinkConnector",
                cause=f"vLLM passes on the addresses of one connector only, and took those of another ({min(others)})",
                hint="name StatelinkConnector first among the 'connectors' of MultiConnector",
            )
        self._addresses = tuple(each.address for each in addresses)
        self._next.addresses = self._addresses
        self.early.ranks = len(addresses)

    def tokens(self, count: int) -> int:
        """For how many of a prompt's tokens prefill has state that decode can use.

        Decode computes the last token itself, and samples from it. A recurrent state must not have seen that token,
        because it would see it twice. After N tokens, prefill has given back the oldest token of a window that decode's
        last token looks at, and all of its attention chunk if the chunk ends with it. So with recurrent layers, windows
        or attention chunks, prefill does not compute the last token at all.
        """
        return count - self._left_out if count > self._left_out else count

    def new_request(self, request: Any) -> None:
        """A request arrives.

        On decode, prefill has to keep its state while it waits for blocks. On prefill, its last tokens are left out, if
        decode has to compute them from the state.
        """
        name = request.request_id
        self._unfinished.add(name)
        if request.kv_transfer_params is not None and name not in self._wanted:
            asked = Asked.read(request.kv_transfer_params)
            if asked is not None:
                self._answers[name] = self._move(asked)
                return
            self.moving.goes_on(request)
            self._read(request)
        self.moving.arrived(request)
        asks = self._wanted.get(name, NOTHING)
        if asks.source is not None:
            self._leases.add(name, asks.source)
        # Only a router that asks both servers at once gives this id. Another decode asks when prefill has answered.
        at_once = asks.known and request.kv_transfer_params.get("transfer_id") is not None
        if asks.room and at_once and not asks.another and asks.source is None:
            self.early.watch(request, asks.room)

    def _move(self, asked: Asked) -> dict[str, Any]:
        """Move requests to another server, as somebody asked for it."""
        why = self.moving.refusal(asked)
        if why:
            log.warning("requests are not moved: %s", why)
            return refusal(why)
        moved, stay = self._end_early(asked.which)
        return {"moved": moved, "stay": stay}

    def _end_early(self, which: Iterable[str] | None = None) -> tuple[list[str], dict[str, str]]:
        """End requests that move, and keep their state. Returns them, and why others stay."""
        moved, stay = self.moving.choose(which, {name for name, asks in self._wanted.items() if asks.known})
        why = self._prefixes.refusal
        for request in moved:
            asks = self._wanted.get(request.request_id, NOTHING)
            room = 0 if why else asks.room or fresh_room()
            self._wanted[request.request_id] = asks._replace(room=room, not_sent=why, moved=not asks.room, hold=0.0)
        if moved:
            log.info("%d requests move to another server, and %d stay", len(moved), len(stay))
        return [request.request_id for request in moved], stay

    def _choose(self, request: Any, asks: Wanted) -> Wanted:
        """Choose what is received of the prefixes that another server offers."""
        count = request.num_tokens
        whole = self.tokens(count) if count > self._left_out else 0
        found = None
        if asks.room and self._left_out and not self._goes_on(request, asks):
            # Its own last tokens are left out, too, and of what is left one has to be computed here.
            found = longest_of(asks.offered, request, whole - self._left_out)
        found = found or longest_of(asks.offered, request, whole)
        if found is not None:
            source = Source(found.room, asks.source.peer)  # type: ignore[union-attr]
            return asks._replace(source=source, answered=found.content, tokens=found.tokens)
        longest = asks.offered[0]
        if longest.tokens == self.tokens(count):  # a mistake of the router's: see `Receive.for_another`
            return asks
        self._misdirected.add(request.request_id, asks.source, longest.tokens)  # type: ignore[arg-type]
        why = f"the other server has state for {longest.tokens} tokens, and for none with which this prompt begins"
        return asks._replace(source=None, answered=b"", not_received=why, usual=True)

    def _goes_on(self, request: Any, asks: Wanted) -> bool:
        """Whether a request's state is that of its end, and not of a prompt whose last token decode computes."""
        return bool(request.max_tokens > 1 or asks.hold or asks.cached)

    def _cut_to_cache(self, request: Any, asks: Wanted) -> str:
        """Leave of a prompt what this server's cache has, and a token to compute. Returns why nothing is sent of it."""
        if request.max_tokens > 1 or asks.several or asks.source is not None or request.prompt_token_ids is None:
            return "with 'cached' it may ask for one token, and one answer, and receive nothing"
        found = self._manager.get_computed_blocks(request)[1]
        del request.prompt_token_ids[found + 1 :]
        del request._all_token_ids[found + 1 :]
        request.num_prompt_tokens = found + 1
        return "" if found else "this server's cache has nothing of its prompt"

    def _cut_end(self, request: Any, asks: Wanted) -> str:
        """Leave out the last tokens of a prompt whose state is sent. Returns why that cannot be; empty if it is done.

        Its client gets a token behind the ones that are left. So this is only for a router, which asks prefill for
        one token and drops it. One that goes on here has to have the whole prompt, and its state is sent at its end.
        """
        left_out = self._left_out
        if self._goes_on(request, asks):
            if asks.known or asks.several:
                return (
                    f"it asks for {request.max_tokens} tokens, and {KINDS} then has no state of its prompt at its end"
                )
            return self._prefixes.refusal
        received = asks.source is not None and (
            not asks.tokens or asks.tokens > request.num_prompt_tokens - 2 * left_out
        )
        # Of several answers, one receives. The others say the same as that one.
        if received or (asks.another and asks.usual):
            return f"they have 'do_remote_prefill', too, and {KINDS} keeps no state that it could send on"
        # A request with logprobs of its prompt loads nothing on decode, which computes all of it. Embeddings have no
        # token that could be left out.
        whole = request.prompt_token_ids is None or request.get_skip_reading_prefix_cache()
        if whole or request.num_prompt_tokens <= left_out:
            return "the prompt has no state that decode can use"
        if self._follows and not request.use_structured_output:
            # A draft model takes what is sampled for the next token, and the router drops it: so it is the next token.
            request.sampling_params = copy.copy(request.sampling_params)
            request.sampling_params.allowed_token_ids = [request.prompt_token_ids[-left_out]]
        del request.prompt_token_ids[-left_out:]
        del request._all_token_ids[-left_out:]
        request.num_prompt_tokens -= left_out
        return ""

    def _read(self, request: Any) -> None:
        """Read what a request wants, and say what of it is not done."""
        name, given = request.request_id, request.kv_transfer_params
        asks = self._wanted[name] = wanted(given, place_of(request), self._options, self._secret, spread=self._spread)
        if asks.extend:
            turn = self._turns.get(asks.extend)
            if turn is None:
                asks = self._wanted[name] = asks._replace(extend=0, not_sent="no state is held under their 'extend'")
            else:
                self._next.extend[turn] = asks.hold
        if asks.source is not None and asks.offered:
            asks = self._wanted[name] = self._choose(request, asks)
        level, because = (logging.INFO, "") if asks.usual else (logging.WARNING, "kv_transfer_params are no use: ")
        if asks.not_received:
            log.log(level, "request %s is computed here: %s%s", name, because, asks.not_received)
        if asks.not_sent:
            log.log(level, "the state of request %s is not sent: %s%s", name, because, asks.not_sent)
        if asks.room and asks.cached:
            why = self._cut_to_cache(request, asks)
            if why:
                log.info("the state of request %s is not sent: %s", name, why)
                asks = self._wanted[name] = asks._replace(room=0, not_sent=why)
        if asks.room and self._left_out:
            count = request.num_prompt_tokens
            why = self._cut_end(request, asks)
            if not why:
                asks = self._wanted[name] = asks._replace(cut=request.num_prompt_tokens < count)
            else:
                self._refuse(request, asks, self.tokens(request.num_prompt_tokens), why)
                asks = self._wanted[name] = asks._replace(room=0, not_sent=why)
        if asks.room and not asks.another and (given.get("transfer_id") is None or given.get("once") is True):
            self._repeats.arrived(name)
        if not isinstance(given, Mapping):
            request.kv_transfer_params = None  # vLLM itself would take it for a dictionary
        # vLLM pickles these for its workers, which need no such field. Pickle fails where something is nested hundreds
        # of times, and the engine would end. Another answer to the same prompt may have the same object: it stays as
        # it is.
        params = request.sampling_params
        if params is not None and params.extra_args:
            request.sampling_params = copy.copy(params)
            request.sampling_params.extra_args = {
                key: value for key, value in params.extra_args.items() if key != "kv_transfer_params"
            }

    # Decode.

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens can be received beyond the ``computed`` ones. Called again while the request waits.

        ``None``: vLLM has to ask again, when there are more free blocks.
        """
        self._looked_at = request
        if self._source(request) is None:
            return 0, False
        asks = self._wanted[request.request_id]
        count = self._received_tokens(request, asks) - computed
        if not asks.tokens and self._left_out and request.num_prompt_tokens <= self._left_out:
            count = 0
        if count <= 0:
            return 0, False
        # With nothing left out, all that is left to compute has its blocks.
        if (self._left_out or asks.tokens < request.num_tokens) and not self._admission.fits(
            request, computed, computed + count
        ):
            return None, False
        return count, True

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """A request has its blocks. Called again after the state was received, and after a preemption."""
        self._looked_at = None
        source = self._taken(request)
        if source is None:
            self._admission.end(request.request_id)
            return
        name = request.request_id
        tokens = self._received_tokens(request, self._wanted[name])
        if external > 0:
            self._admission.begin(request)
            tables = self._cache.select_transfer_block_ids(blocks.get_block_ids())
            received = Receive(
                *source,
                tokens,
                tokens - external,
                tables,
                content=content_of_request(request, tokens),
                answered=self._wanted[name].answered,
                history=has_moved(request) or 0 < self._wanted[name].tokens < self.tokens(request.num_prompt_tokens),
            )
            self._next.receive[name] = received
            self._loading[name] = _Loading(request, tables)
            if received.for_another:
                self._misdirected.add(name, source, tokens)
            else:
                self._misdirected.drop(source.room)
        else:
            self._decline(request, source, self._wanted[name], "decode needs nothing: it has the prompt's state")

    def _decline(self, request: Any, source: Source, asks: Wanted, why: str) -> None:
        """Tell prefill that a request needs no state. The room of another request is not this one's to decline."""
        name, tokens = request.request_id, self._received_tokens(request, asks)
        if asks.answered in (b"", content_of_request(request, tokens)):
            self._next.receive[name] = Receive(*source, tokens, why=why)
            self._misdirected.drop(source.room)
        else:
            self._misdirected.add(name, source, tokens)

    def _received_tokens(self, request: Any, asks: Wanted) -> int:
        """For how many of a request's first tokens state comes."""
        return asks.tokens or self.tokens(request.num_prompt_tokens)

    def _source(self, request: Any) -> Source | None:
        """Where the state of a request comes from, if it is to be received and was not yet."""
        return self._wanted.get(request.request_id, NOTHING).source

    def _taken(self, request: Any) -> Source | None:
        """The same, once for each request."""
        name = request.request_id
        asks = self._wanted.get(name, NOTHING)
        if asks.source is not None:
            self._wanted[name] = asks._replace(source=None)
            self._leases.drop(name)
        return asks.source

    # The end of a request.

    def finished(self, request: Any, tables: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Returns whether its blocks have to be held, and the parameters of its answer."""
        name = request.request_id
        self._unfinished.discard(name)
        if name in self._answers:
            return False, self._answers.pop(name)
        asks, moves = self._wanted.get(name, NOTHING), self.moving.ended(request)
        if moves is None and asks.moved:  # it has just ended by itself
            self._wanted[name] = asks._replace(room=0)
        held, params = self._end(request, tables)
        if moves is not None:
            params = {**(params or {}), **moves}
        if not held:
            self._repeats.ended(name)
        return held, params

    def _end(self, request: Any, tables: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        asks = self._wanted.get(name, NOTHING)
        source = self._taken(request)
        self._wanted.pop(name, None)
        self._admission.end(name)
        content, given_up = self.early.ended(name)
        if source is not None:  # it never got blocks
            self._decline(request, source, asks, "decode gave the request up before it had memory")
        elif name in self._loading:  # vLLM holds its blocks until the worker says that nothing writes to them
            self._next.abort.add(name)
        elif self.retries.drop(name):
            self._next.again.add(name)
        if given_up:  # the workers know, and have told decode
            return False, refusal(given_up)
        if asks.extend:
            return False, held(asks.hold)
        if asks.room:
            return self._send(request, tables, asks, content)
        return False, refusal(asks.not_sent) if asks.not_sent else None

    def _send(
        self, request: Any, tables: tuple[list[int], ...], asks: Wanted, content: bytes
    ) -> tuple[bool, dict[str, Any] | None]:
        name, tokens = request.request_id, request.num_prompt_tokens
        why = failure(request.kv_transfer_params)
        if not why and (request.status not in COMPUTED or request.num_computed_tokens < tokens):
            why = f"prefill did not compute the prompt: {request.status.name}"
        if not why and self._left_out and not asks.cut and request.num_computed_tokens > request.num_tokens:
            why = "more was computed than its tokens"
        if why:
            self._refuse(request, asks, tokens, why)
            return False, refusal(why)
        moved = self._cache.select_transfer_block_ids(tables)
        lengths = [tokens] if asks.cut or asks.several else self._prefixes.of(request)
        if asks.known:  # decode may wait for the prompt alone
            lengths.sort(key=lambda each: each != tokens)
        ids = ids_of_request(request)
        content = content or content_of_request(request, tokens, ids)
        sends = [
            Send(
                fresh_room() if place else asks.room,
                length,
                moved,
                content=content if length == tokens else content_of_request(request, length, ids),
                running=request.num_in_flight_tokens > 0,
                hold=asks.hold,
            )
            for place, length in enumerate(lengths)
        ]
        if not asks.another:
            sends[0].shorter = tuple(sends[1:])
            self._next.send[name] = sends[0]
            self._unclaimed.add(name, tables, turn=asks.hold > 0)
            self._turns.update((each.room, name) for each in sends if asks.hold)
            repeated = self._repeats.computed(name, content)
            if repeated:
                self._next.repeated.add(repeated)
        offered = sorted(
            (Prefix(each.room, each.tokens, each.content) for each in sends), key=lambda each: -each.tokens
        )
        return not asks.another, answer(offered, self._engine_id, self._addresses, as_vllm=asks.as_vllm)

    def _refuse(self, request: Any, asks: Wanted, tokens: int, why: str) -> None:
        """Say that the state of a request is not sent, also to a decode that may be waiting already."""
        name = request.request_id
        log.info("the state of request %s is not sent: %s", name, why)
        if asks.known and not asks.another:
            # Decode states the content, too: the room would fail for its lack, and not for this reason.
            self._next.send[name] = Send(asks.room, tokens, why=why, content=content_of_request(request, tokens))

    # Each step.

    def step(self, output: Any) -> ToWorker:
        """What the workers get with the next step.

        Args:
            output: vLLM's ``SchedulerOutput`` of the step.
        """
        if self.moving.draining:
            self._end_early()
            self._unclaimed.ending = True
        self._next.idle = not output.total_num_scheduled_tokens and not self._awaited
        self._admission.next_step()
        self.early.plan(output, self._next)
        self._next.again |= self.retries.ready()
        wanted = {each.source.room for each in self._wanted.values() if each.source} if self._misdirected else set()
        self._next.receive |= self._misdirected.take(wanted)
        self._next.unclaimed = self._unclaimed.choose(self._short())
        self._next.keep = self._leases.take()
        made, self._next = self._next, ToWorker()
        if not made and not self._unfinished and not output.finished_req_ids:
            rest(awaited=self._awaited)
        return made

    def _short(self) -> int:
        """Blocks that a request lacks for which vLLM found too few in this step; 0 if it found enough."""
        request, self._looked_at = self._looked_at, None
        if not self._unclaimed:
            return 0
        if request is None:
            needed = self._admission.needed(self._loading)
        else:
            needed = blocks_needed(self._manager, request, capped=True)
        if not needed:
            return 0
        free = self._manager.block_pool.get_num_free_blocks()
        return int(max(needed + self._manager.watermark_blocks - free, 0))

    def told(self, output: Any) -> None:
        """What the workers said in a step. Called before vLLM frees the blocks of what has ended.

        A failed request that vLLM would compute itself is taken out of ``output.finished_recving``. The workers name it
        again when there is room for it.
        """
        said = output.kv_connector_worker_meta
        if isinstance(said, FromWorker):
            self.held.told(said)
            self.early.told(said)
            self._unclaimed.claimed(said.claimed)
            for name, blocks in said.lacking.items():
                self._lacking.setdefault(name, set()).update(blocks)
        for name in output.finished_sending or ():
            self._repeats.ended(name)
            self._unclaimed.ended(name)
            self._turns = {room: turn for room, turn in self._turns.items() if turn != name}
        if output.finished_sending:
            self._say_drained()
        received = set(output.finished_recving or ())
        for name in sorted(received & self._loading.keys()):
            if self._received(name, failed=name in output.failed_recving):
                received.remove(name)
        output.finished_recving = received or None

    def _received(self, name: str, *, failed: bool) -> bool:
        """The state of a request has come, or has failed to come. Returns whether vLLM has to hear of it later."""
        request, tables = self._loading.pop(name)
        lacking = self._lacking.pop(name, set())
        self.held.ended(name, {block for table in tables for block in table})
        if request.is_finished():
            return False
        if failed:
            self._admission.end(name)
            self.retries.add(request)
        elif lacking:
            # vLLM is about to keep its full blocks for other requests. It does so here, and these are taken out again.
            self._manager.cache_blocks(request, request.num_computed_tokens)
            self._manager.evict_blocks(lacking)
        return failed

    def _say_drained(self) -> None:
        if self.moving.draining and not self.moving and not self._unclaimed:
            self.moving.drained()

    def shutdown(self) -> None:
        """The engine ends. If nothing ran when it was told so, this is when it is drained."""
        self._say_drained()

    @property
    def settled(self) -> bool:
        """Whether nothing is left of any request."""
        nothing = not (
            self.busy
            or self._answers
            or self.moving
            or self._unfinished
            or self._wanted
            or self._leases
            or self._loading
            or self._lacking
        )
        idle = not self._admission and not self._repeats and not self._unclaimed
        return nothing and idle and self.early.settled

    def give_way(self) -> bool:
        """See `Unclaimed.give_way`."""
        return self._unclaimed.give_way()

    @property
    def busy(self) -> bool:
        """Whether there is something to do that needs further steps, although no request does."""
        return bool(self._next or self.held or self.retries or self.early or self._misdirected)

    def reset(self) -> None:
        """Whoever changes the model's weights asks for this. What decode has of a prompt is of the old ones."""
        self.early.give_up("the caches were reset while its prompt was computed", self._next)
