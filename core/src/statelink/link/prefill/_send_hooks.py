"""What a send hook sees of its room, and the blocks that the hooks of a push yield."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from statelink.backend import Blocks, Moved
from statelink.errors import RoomError
from statelink.link._hook_context import HookContext
from statelink.plan import MAX_BATCH, Move

if TYPE_CHECKING:
    import weakref
    from collections.abc import Collection, Iterator, Mapping

    from statelink.backend import SendHook
    from statelink.link._context import Context
    from statelink.wire import Request

    from ._line import Line
    from ._push import Pushes

__all__ = ["Payload", "SendHookContext"]


class SendHookContext(HookContext):
    """The `statelink.backend.SendContext` of one component of one room and peer.

    Args:
        context: The link's parts.
        request: The peer's request.
        peer: The peer's link name.
        component: The component.
        line: The peer's line.
        pusher: Whose hook it is. A weak reference: pusher, hook and context would be a cycle, and a hook may keep this.
    """

    __slots__ = ("_line", "_pusher", "strategy")

    def __init__(
        self,
        context: Context,
        request: Request,
        peer: str,
        component: str,
        line: Line,
        pusher: weakref.ref[Pushes],
    ) -> None:
        super().__init__(context, request.room, request.generation, peer, component)
        self.strategy = context.strategies[component].name
        self._line = line
        self._pusher = pusher

    def wake(self) -> None:
        """See `statelink.backend.SendContext.wake`. Any thread; the hook is called again by a job."""
        pusher = self._pusher()
        if pusher is not None:
            self._line.wake(pusher)


class Payload:
    """Joins the blocks of all components of a push to one stream, checks it against the plan, and counts it.

    A batch counts once the backend has all of it. Belongs to the jobs with the peer's key.

    Args:
        hooks: Send hook per component.
        context_of: The context of a component's hook.
        elsewhere: Components whose bytes do not go to decode's items.
        limit: Most blocks of a batch.
        peer: The destination's name, for errors.

    Attributes:
        moved: Per component, the bytes and blocks that count so far.
    """

    def __init__(
        self,
        hooks: Mapping[str, SendHook],
        context_of: Callable[[str], SendHookContext],
        elsewhere: Collection[str],
        limit: int,
        peer: str,
    ) -> None:
        self.moved: dict[str, Moved] = {}
        self._hooks = hooks
        self._context_of = context_of
        self._elsewhere = elsewhere
        self._limit = min(limit, MAX_BATCH)
        self._peer = peer
        self._waiting: list[Blocks] = []
        self._tally: list[tuple[str, int, int]] = []

    def blocks(self, moves: list[Move]) -> Iterator[Blocks | None]:
        """Batches of blocks for `move`; ``None`` where a hook has to wait.

        Small batches of neighbouring components are joined, since a submission costs more than a block.

        Raises:
            RoomError: A strategy that writes in place yields more or fewer bytes than planned (``room.bytes``).
        """
        count = 0
        for piece in moves:
            name, nbytes = piece.component, 0
            in_place = name not in self._elsewhere
            for blocks in self._hooks[name].blocks(self._context_of(name), piece):
                if blocks is None:
                    yield from self._flushed()
                    yield None
                    count = 0
                    continue
                total, size = blocks.total, blocks.count
                nbytes += total
                if in_place and nbytes > piece.nbytes:
                    raise self._unlike(piece, f"more than {piece.nbytes}")
                if count + size > self._limit:
                    yield from self._flushed()
                    count = 0
                self._waiting.append(blocks)
                self._tally.append((name, total if in_place else 0, size))
                count += size
            if in_place and nbytes != piece.nbytes:
                raise self._unlike(piece, str(nbytes))
            if not in_place:  # count the planned bytes: the receive hook checks that they arrived
                self._tally.append((name, piece.nbytes, 0))
        yield from self._flushed()

    def _flushed(self) -> Iterator[Blocks]:
        """Yield what waits as one batch, and count it once the caller comes back for more."""
        waiting, self._waiting = self._waiting, []
        tally, self._tally = self._tally, []
        if waiting:
            yield Blocks.concatenate(waiting)
        for name, nbytes, blocks in tally:
            before = self.moved.get(name)
            here = Moved(nbytes, blocks)
            self.moved[name] = here if before is None else before + here

    def _unlike(self, piece: Move, handed: str) -> RoomError:
        name = piece.component
        return RoomError(
            "a strategy does not move what the plan says",
            cause=f"{piece.nbytes} bytes of component {name!r} are planned for a push, {handed} were handed over",
            hint="blocks() of its send hook yields every block of the move once, and no other",
            component=name,
            peer=self._peer,
            strategy=self._context_of(name).strategy,
            code="room.bytes",
        )
