"""One link for each scheduler: SGLang's "KV manager".

SGLang calls everything here from the scheduler's one thread, between forwards, so nothing blocks but the constructor
and the two methods that give memory away and take it back. On prefill, another thread makes most calls to the link.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.base.conn import BaseKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

import statelink
from statelink import state
from statelink.errors import ConfigError, StatelinkError

from ._calls import Calls
from ._declines import Declines
from ._directory import Directory, Prefill
from ._dp_ranks import RankFinder
from ._hooks import making_manager
from ._http import Bootstrap
from ._inventory import Pools, describe_pools
from ._limits import Server, check_server
from ._offering import linker_of
from ._options import read_options
from ._proofs import KeyPair, allowed
from ._recompute import Recomputed, recompute
from ._registrar import Registrar
from ._server import SCHEMA, Row

if TYPE_CHECKING:
    from statelink import Link, Receiving, Room

    from ._offering import CacheLinker

__all__ = ["Manager", "Timeouts"]

log = logging.getLogger("statelink.sglang")

LOOPBACK = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
"""Where to reach a server of this host that listens everywhere."""

FOLLOW = "follow_bootstrap_room"
"""SGLang's name for choosing a DP rank by the room."""

SUSPENDING_SECONDS = 30.0
"""Seconds in which transfers have to end before SGLang gives its memory away."""

MARGIN_SECONDS = 5.0
"""Seconds by which SGLang's time limit for the pages of a failed request is above the link's bound."""

RECOMPUTED_AT_ONCE = 16
"""Most retracted requests that prefill is asked to compute at one time, as with SGLang's own backends."""


class Timeouts(NamedTuple):
    """Seconds, all of them SGLang's own settings but the last.

    Attributes:
        bootstrap: How long prefill waits for decode's destinations, from the request's arrival.
        waiting: How long decode waits for the state, from the moment when it named its memory.
        hold: How long prefill keeps the pages of a failed request that a transfer may still read.
    """

    bootstrap: float
    waiting: float
    hold: float = 30.0


class Manager(BaseKVManager):
    """Owns a scheduler's link.

    Args:
        args: SGLang's `KVArgs`.
        disaggregation_mode: Prefill or decode.
        server_args: SGLang's `ServerArgs`.
        is_mla_backend: Not used: the pools say it.

    Raises:
        StatelinkError: The server cannot use Statelink; the text says why. SGLang logs it, and the server ends.
    """

    supports_role_switch = False
    supports_host_destination = False
    supports_deferred_decode_kv_release = True
    enable_deferred_decode_kv_release = True
    is_dummy_cp_rank = False
    scheduler: Any = None
    """The scheduler of the queue that made it."""
    attn_cp_rank, attn_cp_size = 0, 1
    linker: CacheLinker | None = None
    """The linker of the scheduler's prefix cache, if it is Statelink's."""

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        queue = making_manager.get()
        if queue is None:
            raise ConfigError(
                "a KV manager is made outside the queues that statelink-sglang hooks",
                cause="the hook on _init_kv_manager is not in place",
                hint="another plugin may have replaced it: name only 'statelink' in SGLANG_PLUGINS",
            )
        self.kv_args = args
        self.scheduler = queue.scheduler
        self.role = "prefill" if disaggregation_mode is DisaggregationMode.PREFILL else "decode"
        self.timeouts = Timeouts(
            float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()),
            float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
        )
        self._options = read_options(self.role)
        parallel = get_parallel()
        self._place = parallel.attn_tp_rank, parallel.attn_tp_size
        self._stage, self.stages = parallel.pp_rank, parallel.pp_size
        self._rank = self._stage * self._place[1] + self._place[0]
        self._ranks = self.stages * self._place[1]
        self.dp = _dp_rank(parallel, args.system_dp_rank)
        pool = queue.token_to_kv_pool
        draft = queue.draft_token_to_kv_pool
        check_server(
            Server(
                self.role,
                server_args,
                parallel,
                get_disagg(),
                device=str(pool.device),
                state_types=tuple(each.value for each in args.state_types),
            ),
            self._options.allow,
        )
        self._groups = [
            *([parallel.attn_tp_group] if self._place[1] > 1 else []),
            *([parallel.pp_group] if self.stages > 1 else []),
        ]
        instance = f"sglang-{self.role}-{self._same_everywhere(secrets.token_hex(6))}"
        config = queue.scheduler.model_config
        pools = Pools(
            pages=pool,
            draft=draft,
            requests=getattr(queue.scheduler, "req_to_token_pool", None),
            metadata=queue.metadata_buffers,
            config=config,
            window=int(queue.scheduler.sliding_window_size or 0),
            tp=self._place,
            kind=_memory_kind(str(pool.device), args.gpu_id),
            rows_optional=self._options.rows_optional,
            layers=_layers(queue.scheduler) if self.stages > 1 else None,
            role=self.role,
        )
        self.metadata, self.vocabulary = queue.metadata_buffers, int(config.vocab_size)
        self.rows_optional = self._options.rows_optional
        if self.rows_optional and draft is not None:
            raise ConfigError(
                "metadata rows are optional, and the server has a draft model",
                cause="the draft starts from what prefill puts into the rows",
                hint="start the server without a draft model, or without 'rows'",
                code="config.engine",
            )
        self._components, self.lists = describe_pools(pools, args)
        self.has_rows = pools.rows
        self.set_layers()
        self._instance, self._model = instance, self._options.model or _identity(config)
        self._inventory = self.describe()
        self.link: Link = self._open()
        self.page_size: int = args.page_size
        self._reopens = False
        """Whether the link has to be opened again, because it could not be suspended."""
        self.declines = Declines()
        self._held: dict[int, list[Receiving]] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._directory: Directory | None = None
        self._finder: RankFinder | None = None
        self.follows = _follows(parallel)
        """Whether a request's room says which DP rank of this prefill server has it."""
        self._registrar: Registrar | None = None
        if self.role == "decode":
            self._directory, self._finder = Directory(allow=allowed(self._options.keys)), RankFinder()
            self.raise_limit(queue.transfer_queue)
        else:
            self.calls, self.pushes = Calls(), Calls()
            self.register_to_bootstrap()
        self.linker = linker_of(queue.scheduler)
        if self.linker is not None:
            self.linker.open(self, _bootstrap_address())
        log.info(
            "Statelink backend %r moves %s of this %s rank %d of %d%s; its link listens at %s",
            self.link.backend,
            ", ".join(each.name for each in self._inventory.components),
            self.role,
            self._rank,
            self._ranks,
            f" (DP rank {self.dp[0]} of {self.dp[1]})" if self.dp[1] > 1 else "",
            self.link.address.partition("@")[0],
        )

    # The link.

    def describe(self, more: str = "", without: str = "") -> state.Inventory:
        """What a link of this rank moves.

        Args:
            more: Follows the instance's name.
            without: A component that the link does not move.
        """
        return state.describe(
            self._instance + more,
            [each for each in self._components if each.component.name != without],
            rank=self._rank,
            ranks=self._ranks,
            axes={"tp": self._place, "pp": (self._stage, self.stages)},
            model=self._model,
        )

    def _same_everywhere(self, value: str) -> str:
        """The value of the first rank, for all ranks. Every rank must call this."""
        return str(self.gathered(value)[0])

    def _anywhere(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Every rank must call this."""
        return any(self.gathered(flag))

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of their numbers. Every rank must call this."""
        values = [value]
        for group in self._groups:  # the ranks of a stage, and then the stages
            values = [each for part in group.all_gather_object(values) for each in part]
        return values

    def _open(self) -> Link:
        link = statelink.open(self._options.link, self._inventory)
        if self._ranks > 1 and (self.role == "decode" or self.stages > 1):
            everyone = self.gathered(link.address)
            link.siblings([each for rank, each in enumerate(everyone) if rank != self._rank])
        return link

    def deregister_buffer_to_engine(self) -> None:
        """Unregister the memory, because SGLang gives it away. Blocks until nothing touches it, or for half a minute.

        SGLang gives the memory away whatever happens. So this method aborts the requests that have not ended. It then
        waits for proof that each has quiesced, and takes the memory of a request back without proof after that time.

        On prefill, calls to the link may still be to come, and one deadline bounds the waits for them and for the
        requests. If a call has not returned by then, the memory stays registered under it. This is logged. The link is
        closed as soon as the call has returned, and `register_buffer_to_engine` opens another one.
        """
        if self.linker is not None:
            self.linker.shut()
        why, until = "SGLang gives its memory away", time.monotonic() + SUSPENDING_SECONDS
        self.declines.keep()
        self._abort_rooms(why)  # they quiesce while the calls are waited for
        made = self.role != "prefill" or all(
            each.drain(max(0.0, until - time.monotonic())) for each in (self.calls, self.pushes)
        )
        for room in self._abort_rooms(why):
            room.wait(max(0.0, until - time.monotonic()), quiesced=True)
            if not room.quiesced:
                room.take_back(why)
        self._held.clear()
        if not made:
            log.error(
                "prefill's rank %d of %d: SGLang gives its memory away, and it stays registered, because a call to the "
                "link has not returned in %.0f s; the link is closed when the call returns, and another one is opened "
                "when SGLang takes the memory back; if this repeats, "
                "look with 'statelink inspect' at what the link waits for",
                self._rank,
                self._ranks,
                SUSPENDING_SECONDS,
            )
            self._reopens = True
            self.calls.put((self.pushes.put, ((self._close_after_calls, (self.link, why)),)))
            return
        try:
            self.link.suspend(max(1.0, until - time.monotonic()))
        except StatelinkError:
            log.exception("transfers may still touch memory that SGLang gives away")
            self._reopens = True
            self.link.close()

    def _abort_rooms(self, why: str) -> list[Room]:
        """Abort the rooms that have not ended. Returns them, and those that have not quiesced. Does not block."""
        rooms = self.link.rooms()
        for room in rooms:
            room.abort(why)
        return rooms

    def _close_after_calls(self, link: Link, why: str) -> None:
        """Close a link whose memory was given away under a call. On the thread of the pushes, after that call.

        The rooms that such late calls opened are aborted, also on the link that has been opened meanwhile: every room
        that is open there now is of a request from before SGLang gave its memory away.
        """
        self._abort_rooms(why)
        link.close()

    def register_buffer_to_engine(self) -> None:
        """Register the memory again, at the same addresses. Blocks.

        Raises:
            StatelinkError: The link could not be suspended, and this server has pipeline stages. They take memory back
                one after the other, so they cannot tell each other where new links listen. SGLang ends the server.
        """
        if self.stages > 1 and self._reopens:
            raise StatelinkError(
                f"rank {self._rank} of {self._ranks} cannot take its memory back",
                cause="its link could not be suspended when SGLang gave the memory away",
                hint="start the server again",
            )
        if self.stages > 1 or not self._anywhere(self._reopens):
            self.link.resume()
        else:
            # A link that could not be suspended may still have the old memory registered.
            self._reopens = False
            self.link.close()
            self.link = self._open()
            if self.role == "prefill":
                self.register_to_bootstrap()
        if self.linker is not None:
            self.linker.open(self, _bootstrap_address())
        self.declines.send(self.link)

    # Prefill: layers that leave while the forward pass runs.

    def set_layers(self) -> None:
        """Work out, once, in which groups the layers of this rank leave."""
        self.layer_order = self.lists.layers
        self.layer_places = {layer: place for place, layer in enumerate(self.layer_order)}
        self.layer_ends = statelink.layer_groups(len(self.layer_order))

    # Prefill: the bootstrap server.

    def register_to_bootstrap(self) -> None:
        """Tell the bootstrap server where this rank is, again and again, on a thread. Does not block."""
        row = Row(
            SCHEMA,
            self._inventory.instance,
            self._rank,
            self._ranks,
            self.link.address,
            *self.dp,
            follows=self.follows,
            http_port=get_serving().port,
        )
        if self._registrar is None:
            self._registrar = Registrar(Bootstrap(_bootstrap_address(), KeyPair(self._options.keys)), row)
        else:
            self._registrar.register(row)

    def announce(self, room: int) -> None:
        """Tell decode that a request came to this DP rank, as its room does not say it. Does not block.

        One rank tells it for all ranks of the DP rank.
        """
        if self._registrar is not None and not self.follows and self.dp[1] > 1 and self._rank == 0:
            self._registrar.announce(room)

    # Decode: where prefill is. `prefill_info_table` and the names of these methods are SGLang's.

    @property
    def prefill_info_table(self) -> dict[str, Prefill]:
        """The prefill servers that are known, by ``host:port`` of their bootstrap servers."""
        return {} if self._directory is None else self._directory.table

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill server is known. If not, a thread asks it. Does not block."""
        return self._directory is not None and self._directory.find(bootstrap_addr) is not None

    def why_unknown(self, bootstrap_addr: str) -> str:
        """Why a prefill server is not known."""
        return "" if self._directory is None else self._directory.why(bootstrap_addr)

    def find_dp_rank(self, request: Any) -> int | None:
        """Which DP rank of prefill has a request; ``None`` while that is not known. Does not block.

        Args:
            request: SGLang's ``Req``.
        """
        address = f"{request.bootstrap_host}:{request.bootstrap_port}"
        prefill = self.prefill_info_table.get(address)
        if prefill is None or self._finder is None:
            return None
        if request.disagg_prefill_dp_rank is not None:
            return int(request.disagg_prefill_dp_rank)
        if (
            prefill.follow_bootstrap_room
            or prefill.dp_size == 1
            or getattr(request, "pd_rebootstrap_in_progress", False)
        ):
            # For a request that prefill is to compute again, decode chooses the rank, and sends it there.
            return int(request.bootstrap_room) % prefill.dp_size
        return self._finder.find(address, request.bootstrap_room)

    def forget_dp_rank(self, bootstrap_addr: str, bootstrap_room: Any) -> None:
        """Nobody looks for the DP rank of a request any more. Does not block."""
        if self._finder is not None:
            self._finder.forget(bootstrap_addr, bootstrap_room)

    # Decode: the memory of failed requests.

    def memory_is_free(self) -> Any:
        """An event that has passed once nothing here writes any more to memory that SGLang has just given to a request.

        With the overlap schedule, a request that has ended may have one more forward pass in flight, which writes to
        the memory that it had. SGLang lets its own streams wait for that pass. A peer's write waits for this event.
        ``None`` without the overlap schedule. The scheduler's thread.
        """
        if self.scheduler is None or not self.scheduler.enable_overlap:
            return None
        event = self.scheduler.device_module.Event()
        event.record(self.scheduler.forward_stream)
        return event

    def raise_limit(self, queue: Any) -> None:
        """Have SGLang keep the pages of a failed request until nothing writes to them any more.

        By default, SGLang gives the pages to others after 30 s, even if something may still write to them. If the link
        has a bound (`Link.quiet_within`), this sets SGLang's limit above the bound. Without a bound, it sets no limit:
        SGLang then waits for proof.
        """
        bound = self.link.quiet_within
        limit = math.inf if bound is None else bound + MARGIN_SECONDS
        queue.deferred_kv_release_timeout = max(float(queue.deferred_kv_release_timeout), limit)

    def hold(self, room: int, receiving: Receiving) -> None:
        """Note a failed request to whose memory something may still be written.

        Several failed requests may have one room id. If a second request comes while the first one has not quiesced on
        some rank, the second one fails on that rank, and therefore on every rank.
        """
        self._held.setdefault(room, []).append(receiving)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing writes to the memory of any failed request with this room any more."""
        return all(each.quiesced for each in self._held.get(bootstrap_room, ()))

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """SGLang gives the memory of a failed request to others. It calls `clear` of that request's receiver next."""

    def let_go(self, room: int, receiving: Receiving) -> None:
        """SGLang has given the memory of a request to others."""
        held = self._held.pop(room, [])
        others = [each for each in held if each is not receiving]
        if others:
            self._held[room] = others
        if len(others) < len(held) and not receiving.quiesced:
            receiving.take_back("SGLang's time limit for the pages of a failed request is over")

    # What SGLang asks for besides.

    def _ensure_prefill_recompute_executor(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(RECOMPUTED_AT_ONCE, thread_name_prefix="statelink-recompute")
        return self._executor

    def submit_prefill_recompute(self, kv_receiver: Recomputed, payload: dict[str, Any]) -> None:
        """Have prefill compute a request again that SGLang retracted for new weights. Does not block.

        Every decode rank calls this, and one of them asks prefill for all.
        """
        prefill = self.prefill_info_table.get(kv_receiver.bootstrap_addr)
        if self._rank or kv_receiver.failed or prefill is None:
            return  # if there is no prefill server, the receiver has failed or will fail
        executor = self._ensure_prefill_recompute_executor()
        executor.submit(recompute, kv_receiver, prefill.http_port, payload, self.timeouts.waiting)


def _dp_rank(parallel: Any, dp_rank: int | None) -> tuple[int, int]:
    """Which DP rank of how many this one is, with replicas of the whole model or with DP attention."""
    if parallel.dp_size > 1:
        return dp_rank or 0, parallel.dp_size
    return parallel.attn_dp_rank, parallel.attn_dp_size


def _follows(parallel: Any) -> bool:
    """Whether SGLang's controller gives a request to the DP rank that its room says."""
    forced = envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get()
    return not forced and getattr(parallel, "load_balance_method", FOLLOW) == FOLLOW


def _bootstrap_address() -> str:
    """Where the bootstrap server of this prefill server listens: on the first of its machines."""
    parallel, host = get_parallel(), get_serving().host
    if parallel.dist_init_addr:
        host = parallel.dist_init_addr.rpartition(":")[0].strip("[]")
    host = LOOPBACK.get(host, host)
    address = f"[{host}]" if ":" in host else host
    return f"{address}:{get_disagg().disaggregation_bootstrap_port}"


def _layers(scheduler: Any) -> tuple[int, int]:
    """The first layer of this pipeline stage, and one past its last."""
    held = scheduler.tp_worker.model_runner.layer_info
    return held.start_layer, held.end_layer


def _memory_kind(device: str, number: int) -> str:
    """The kind of memory on a device, such as ``cuda:1``.

    Args:
        device: The device, as SGLang's pool names it. The name may lack the number of the device.
        number: The number of the device, for a name that lacks it.
    """
    if device == "cpu":
        return "dram"
    return device if ":" in device else f"{device}:{number}"


def _identity(config: Any) -> str:
    """The identity of the model. Two servers with the same model have the same text, in whatever release of SGLang."""
    text = config.hf_text_config
    numbers = (config.num_hidden_layers, config.hidden_size, config.vocab_size)
    names = ",".join(getattr(config.hf_config, "architectures", None) or [type(text).__name__])
    return f"sglang, {names}, {'x'.join(map(str, numbers))}"
