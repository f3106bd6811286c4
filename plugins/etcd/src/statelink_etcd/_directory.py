"""The client in a link whose directory is etcd: keeps the link registered under a lease, and follows instances."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from statelink.backend import logger
from statelink.errors import Reason
from statelink.rendezvous import MAX_RANKS, Directory, DirectoryConfig, Instance

from ._cluster import Cluster, Options
from ._gateway import (
    MOST_ANSWER_BYTES,
    EtcdRefusedError,
    EtcdSilentError,
    Gateway,
    LeaseEndedError,
    Waits,
    end_of,
    key_in,
    unpack,
)
from ._listing import instances
from ._records import Record, Seen, folder_of, key_of, link_of, look

if TYPE_CHECKING:
    from statelink.rendezvous import Endpoint

    from ._answers import Pair

__all__ = ["EtcdDirectory"]

log = logger("statelink.rendezvous")

RETRY_SECONDS = 1.0
"""Seconds after which what failed is tried again."""
FIRST_ANSWER_SECONDS = 0.5
"""Most seconds that `resolve` waits for the first answer about an instance, while etcd answers."""
LEAVE = 2.0
"""Most seconds that `close` waits for etcd to end the lease."""


class EtcdDirectory(Directory):
    """Finds instances through etcd. `close` ends its thread.

    A rank writes one key, under a lease that it renews; the key is removed when the lease ends. A rank that starts
    replaces the key of an earlier process of the same rank. The earlier one cannot write it again while the later one
    is registered. An instance is followed by a watch from when somebody asks for it until nobody has for a while.

    Args:
        config: See `Directory`.
        link: See `Directory`.
        waits: How long it waits for etcd, and for somebody to ask again.
    """

    Options = Options

    def __init__(self, config: DirectoryConfig, *, link: str, waits: Waits | None = None) -> None:
        self._cluster = Cluster.of(config)
        self._waits = waits or Waits()
        self._link = link
        self._changed = threading.Condition()
        self._wanted: dict[str, float] = {}  # when somebody last asked for it
        self._seen: dict[str, Seen] = {}  # of instances that are followed, while the watch is up to date
        self._trouble: EtcdSilentError | EtcdRefusedError | None = None
        self._complaint: Reason | None = None
        self._registration: tuple[str, int, Record] | None = None
        self._lease = 0
        self._placed = False
        """Whether this link has ever been registered. Then it does not replace another process any more."""
        self._closing = False
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="statelink-rendezvous", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left
            self._loop.close()
            raise
        started.wait()

    @classmethod
    def check(cls, config: DirectoryConfig) -> None:
        """See `Directory.check`."""
        Cluster.of(config)

    @classmethod
    def instances(cls, config: DirectoryConfig) -> list[Instance]:
        """See `Directory.instances`."""
        return instances(Cluster.of(config))

    # Any thread.

    def register(self, instance: str, rank: int, ranks: int, address: str) -> None:
        """See `Directory.register`."""
        self._registration = instance, rank, Record(link=self._link, address=address, ranks=ranks)
        self._post(lambda: self._begin("", self._stay_registered))

    def resolve(self, instance: str) -> tuple[Endpoint, ...] | None:
        """See `Directory.resolve`. Waits a short time for the first answer, or not at all while etcd is silent."""
        with self._changed:
            fresh = instance not in self._wanted
            self._wanted[instance] = time.monotonic()
            if fresh:
                self._post(lambda: self._look_for(instance))
                if self._trouble is None:
                    self._changed.wait_for(
                        lambda: instance in self._seen or self._closing or self._trouble, FIRST_ANSWER_SECONDS
                    )
            seen = self._seen.get(instance)
            return seen.addresses if seen is not None else None

    def explain(self, instance: str | None) -> tuple[str, str]:
        """See `Directory.explain`."""
        trouble = self._trouble
        if isinstance(trouble, EtcdSilentError):
            return f"etcd at {self._cluster.where} does not answer: {trouble}", trouble.hint
        if trouble is not None:
            return f"etcd at {self._cluster.where} refuses: {trouble}", "see 'rendezvous_options' in the configuration"
        if instance is None:
            return ("", "") if self._complaint is None else (str(self._complaint.cause), self._complaint.hint)
        seen = self._seen.get(instance, Seen(None, 0, 0))
        hint = "is every rank of prefill registered, under this name, with the same etcd and prefix?"
        return f"{seen.words} registered in etcd at {self._cluster.where}", hint

    def close(self) -> None:
        """See `Directory.close`. Blocks, for two seconds if etcd does not answer."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._post(self._ended.set)
        self._thread.join()

    def _post(self, job: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(job)

    # The thread.

    def _run(self, started: threading.Event) -> None:
        try:
            self._loop.run_until_complete(self._serve(started))
        finally:
            started.set()
            self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self._gateway = Gateway(self._cluster.members, self._cluster.login, self._waits)
        started.set()
        try:
            await self._ended.wait()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._lease:
                try:
                    await asyncio.wait_for(self._gateway.revoke(self._lease), LEAVE)
                except (EtcdSilentError, EtcdRefusedError, asyncio.TimeoutError) as error:
                    log.debug("the lease was not ended: %s", error)
        finally:
            await self._gateway.close()

    def _begin(self, name: str, step: Callable[[], Coroutine[Any, Any, float]]) -> None:
        """Repeat a step in a task of its own. It returns after how many seconds. A task of the same name goes on."""
        if name not in self._tasks and not self._ended.is_set():
            self._tasks[name] = self._loop.create_task(self._repeat(name, step))

    async def _repeat(self, name: str, step: Callable[[], Coroutine[Any, Any, float]]) -> None:
        while True:
            pause = RETRY_SECONDS
            try:
                pause = await step()
            except (EtcdSilentError, EtcdRefusedError) as error:
                with self._changed:
                    self._seen.pop(name, None)
                self._note(error)  # last: whoever reads of the trouble finds nothing that is out of date
            except Exception:
                log.exception("defect: in the thread that speaks to etcd")
            # After etcd was away, not all links of a fleet come back to it in the same moment.
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))

    def _look_for(self, name: str) -> None:
        self._begin(name, partial(self._follow, name))
        self._loop.call_later(self._waits.forget, self._forget, name)

    def _note(self, trouble: EtcdSilentError | EtcdRefusedError | None) -> None:
        """Note whether etcd does what it is asked. Logs the beginning of a trouble, and its end."""
        with self._changed:
            known, self._trouble = self._trouble, trouble
            self._changed.notify_all()
        if known is None and trouble is not None:
            log.warning("%s; %s", *self.explain(None))
        elif known is not None and trouble is None:
            log.warning("etcd at %s answers again", self._cluster.where)

    # Registration.

    async def _stay_registered(self) -> float:
        """One beat: renew the lease, and look whether the key is still this link's."""
        try:
            return await self._beat()
        except LeaseEndedError:  # since it was renewed: this thread got no processor for so long
            self._lease = 0
            return 0.0

    async def _beat(self) -> float:
        lifetime = self._cluster.lifetime
        if self._lease and not await self._gateway.keep_alive(self._lease):
            self._lease = 0
        if not self._lease:
            self._lease = (await self._gateway.grant(lifetime)).ID
        assert self._registration is not None
        instance, rank, record = self._registration
        key, value = key_of(self._cluster.prefix, instance, rank), msgspec.json.encode(record)
        held = await self._gateway.holds(key, value, self._lease)
        if held is not True:
            refused = await self._why_not(instance, rank, record, held or None)
            if refused is None:
                if not await self._gateway.put(key, value, self._lease, after=held.mod_revision if held else 0):
                    return 0.0  # somebody wrote it in between: look again
                self._placed = True
            self._complain(refused)
        self._note(None)
        return RETRY_SECONDS if self._complaint else lifetime / 3

    async def _why_not(self, instance: str, rank: int, record: Record, held: Pair | None) -> Reason | None:
        """Why this link must not write its key; ``None`` if it may. ``held``: what the key has."""
        what = f"rank {rank} of instance {instance!r:.80} is not registered in etcd"
        who = {"peer": self._link[:80]}
        other = "" if held is None else link_of(unpack(held.value))
        if self._placed and held is not None and other != self._link:
            return Reason("rendezvous.replaced", what, who, f"{other or 'somebody'} has taken its place")
        others = (await self._entries(instance))[0]
        others.pop(key_of(self._cluster.prefix, instance, rank), None)
        seen = look(others)
        if seen.ranks not in (0, record.ranks):
            cause = f"it says that there are {record.ranks} ranks, another rank that there are {seen.ranks}"
            return Reason("rendezvous.ranks", what, who, cause)
        return None

    def _complain(self, reason: Reason | None) -> None:
        """Log a refusal once, and log when it ends."""
        if reason != self._complaint:
            log.warning("%s", "this link is registered in etcd again" if reason is None else reason.coded)
        self._complaint = reason

    # Look-ups.

    async def _entries(self, instance: str) -> tuple[dict[str, bytes], int]:
        """The keys of an instance with their values, and the revision of that."""
        folder = folder_of(self._cluster.prefix, instance)
        found = await self._gateway.range(folder, end_of(folder), limit=MAX_RANKS)
        return {key_in(pair): unpack(pair.value) for pair in found.kvs}, found.header.revision

    async def _follow(self, name: str) -> float:
        """Read what is registered of an instance, and follow the changes until it has to be read again."""
        entries, revision = await self._entries(name)
        self._note(None)
        self._publish(name, entries)
        try:
            async for changes in self._gateway.watch(folder_of(self._cluster.prefix, name), revision + 1):
                for change in changes:
                    if change.value is None:
                        entries.pop(change.key, None)
                    else:
                        entries[change.key] = change.value
                if (
                    len(entries) > MAX_RANKS
                    or sum(len(key) + len(value) for key, value in entries.items()) > MOST_ANSWER_BYTES
                ):
                    raise EtcdSilentError(f"it tells more of {name!r:.80} than an instance has", "")
                self._publish(name, entries)
        except EtcdSilentError as error:  # another member may answer: what is known counts until none does
            log.debug("a watch of etcd broke: %s", error)
            return RETRY_SECONDS
        return 0.05

    def _publish(self, name: str, entries: Mapping[str, bytes]) -> None:
        seen = look(entries)
        with self._changed:
            if name in self._wanted:
                self._seen[name] = seen
                self._changed.notify_all()

    def _forget(self, name: str) -> None:
        """Follow an instance no more, if nobody has asked for it for a while; otherwise look again later."""
        with self._changed:
            left = self._wanted[name] + self._waits.forget - time.monotonic()
            if left <= 0:
                del self._wanted[name]
                self._seen.pop(name, None)
        if left > 0:
            self._loop.call_later(left, self._forget, name)
        else:
            self._tasks.pop(name).cancel()
