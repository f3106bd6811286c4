"""One push to one destination; runs on a data thread."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.backend import Blocks, Moved
from statelink.errors import Reason, RoomError
from statelink.plan import NO_LAYER, ComponentPlan, Due, Move, plan_move

from ._mover import Moving, move, reason_of
from ._transport import check_transport
from ._verify import digest_of

if TYPE_CHECKING:
    from ._node import Node
    from ._sending import Delivery, Push

__all__ = ["Delivered", "deliver"]

FEW = 4
"""Layers that a reason names before it counts the rest."""


class Delivered(NamedTuple):
    """What became of one push to one destination.

    Attributes:
        moving: Bytes, blocks, failure.
        grains: Per component, the granules that moved.
        moved: Per component, what the backend was given.
    """

    moving: Moving
    grains: dict[str, tuple[int, int]]
    moved: dict[str, Moved]


def deliver(node: Node, delivery: Delivery, push: Push) -> Generator[float | None, None, Delivered]:
    """Plan, hand to the strategies, submit, and wait until everything is visible at the destination.

    Yields as `move` does. Never raises: what goes wrong is in the result.
    """
    counted = _Counted(node, delivery)
    grains: dict[str, tuple[int, int]] = {}
    destination = delivery.destination
    try:
        # A new connection may have another transport than the one that was required when it attached.
        check_transport(node.config.require, destination.carried(node), node.backend.name, destination.name)
        moves = list(_moves(delivery, push))
        for plan, piece in moves:
            _cover(delivery, plan, piece)
            grains[piece.component] = piece.grains
        if push.last:
            _check_covered(delivery)
        if node.config.verify != "off":
            # Before the move: what was pushed counts, whatever the engine does to its memory meanwhile.
            for _, piece in moves:
                digest = digest_of(piece.content(), delivery.cancelled)
                delivery.digests[piece.component] = delivery.digests.get(piece.component, 0) + digest
    except BaseException as error:
        return Delivered(Moving(0, 0, reason_of(error, room=delivery.request.room)), grains, {})
    moving = yield from move(
        node.backend,
        destination.name,
        counted.all([piece for _, piece in moves]),
        room=delivery.request.room,
        generation=delivery.request.generation,
        tables=(node.regions, destination.regions),
        slice_bytes=node.config.slice_bytes,
        cancelled=delivery.cancelled,
    )
    if moving.reason is None and push.last and not moving.pending:
        moving = moving._replace(reason=_finish(node, delivery))
    return Delivered(moving, grains, counted.moved)


def _moves(delivery: Delivery, push: Push) -> Iterator[tuple[ComponentPlan, Move]]:
    for name, items in push.items.items():
        plan = delivery.plan.components.get(name)
        if plan is None:
            continue  # held by this rank, and assigned to another writer: the plan's digest vouches for it
        piece = plan_move(plan, items, delivery.targets[name], delivery.owed(name), push.layers)
        if piece.nbytes:
            yield plan, piece


def _cover(delivery: Delivery, plan: ComponentPlan, piece: Move) -> None:
    """Note which granules of which layers this moves.

    Raises:
        RoomError: Some of them were moved before: the engine's pushes overlap.
    """
    name = piece.component
    covered = delivery.covered.setdefault(name, np.zeros((len(plan.layers), len(delivery.owed(name))), np.bool_))
    layers = np.array(plan.layers)
    rows = slice(None)
    if piece.layers is not None:
        # Layers are in order, so that those of a push are neighbours.
        rows = slice(*np.searchsorted(layers, piece.layers).tolist())
    if covered[rows, piece.due].any():
        raise RoomError(
            f"component {name!r} is pushed twice",
            cause=f"{_overlap(delivery.owed(name), plan, piece, covered, rows)} in an earlier push",
            component=name,
            code="room.overlap",
        )
    covered[rows, piece.due] = True


def _overlap(owed: Due, plan: ComponentPlan, piece: Move, covered: npt.NDArray[np.bool_], rows: slice) -> str:
    """What was moved before, in words: its first range of positions, and the layers."""
    before = covered[rows, piece.due]
    layers = np.array(plan.layers[rows])[np.any(before, axis=1)].tolist()
    known = [layer for layer in layers if layer != NO_LAYER]
    where = f" of layer{'s' if len(known) > 1 else ''} {', '.join(map(str, known[:FEW]))}" if known else ""
    where += f" and {len(known) - FEW} more" if len(known) > FEW else ""
    if not plan.target.page:
        return f"its item{where} was"
    places = np.arange(len(owed))[piece.due][np.any(before, axis=0)]
    grains = places + owed.first if owed.granules is None else owed.granules[places]
    gaps = np.flatnonzero(np.diff(grains) != 1)
    last = int(grains[gaps[0]] if len(gaps) else grains[-1]) + 1
    return f"positions [{int(grains[0]) * plan.granule}, {last * plan.granule}){where} were"


def _check_covered(delivery: Delivery) -> None:
    """Check that the pushes cover everything that decode requires.

    Raises:
        RoomError: Names the component and the first position or layer that is missing.
    """
    for name, plan in delivery.plan.components.items():
        owed = delivery.owed(name)
        covered = delivery.covered.get(name)
        if not len(owed) or (covered is not None and covered.all()):
            continue
        holes = np.argwhere(~covered) if covered is not None else np.array([[0, 0]])
        row, place = (int(n) for n in holes[0])
        layer = plan.layers[row]
        grain = owed.first + place if owed.granules is None else int(owed.granules[place])
        where = f"position {grain * plan.granule}" if plan.target.page else "its item"
        raise RoomError(
            f"the last push leaves component {name!r} incomplete",
            cause=f"{where}{f' of layer {layer}' if layer >= 0 else ''} was never pushed",
            hint="push every position that decode requires, for every layer, before or with the last push",
            component=name,
            peer=delivery.destination.name,
            code="room.incomplete",
        )


def _finish(node: Node, delivery: Delivery) -> Reason | None:
    for name, hook in delivery.hooks.items():
        try:
            hook.finish(delivery.contexts[name])
        except BaseException as error:
            return reason_of(error, room=delivery.request.room, component=name, strategy=node.strategies[name].name)
    return None


class _Counted:
    """The blocks of all components of a push as one stream, compared with the plan, and counted per component.

    A batch counts once the backend has all of it.

    Attributes:
        moved: Per component, what counts so far.
    """

    def __init__(self, node: Node, delivery: Delivery) -> None:
        self.moved: dict[str, Moved] = {}
        self._node = node
        self._delivery = delivery
        self._waiting: list[Blocks] = []
        self._tally: list[tuple[str, int, int]] = []

    def all(self, moves: list[Move]) -> Iterator[Blocks | None]:
        """Join small batches of neighbouring components, since one submission costs more than one block.

        Raises:
            RoomError: A strategy that writes in place hands over other bytes than the plan has (``room.bytes``).
        """
        limit = self._node.backend.capabilities.max_blocks
        delivery, count = self._delivery, 0
        for piece in moves:
            name, nbytes = piece.component, 0
            in_place = name not in delivery.request.elsewhere
            for blocks in delivery.hooks[name].chunk(delivery.contexts[name], piece):
                if blocks is None:
                    yield from self._flushed()
                    yield None
                    count = 0
                    continue
                total = blocks.total
                nbytes += total
                if in_place and nbytes > piece.nbytes:
                    raise self._unlike(piece, f"more than {piece.nbytes}")
                if count + blocks.count > limit:
                    yield from self._flushed()
                    count = 0
                self._waiting.append(blocks)
                self._tally.append((name, total if in_place else 0, blocks.count))
                count += blocks.count
            if in_place and nbytes != piece.nbytes:
                raise self._unlike(piece, str(nbytes))
            if not in_place:  # its receive hook vouches for the payload
                self._tally.append((name, piece.nbytes, 0))
        yield from self._flushed()

    def _flushed(self) -> Iterator[Blocks]:
        waiting, self._waiting = self._waiting, []
        tally, self._tally = self._tally, []
        if waiting:
            yield Blocks.concatenate(waiting)
        for name, nbytes, blocks in tally:
            before = self.moved.get(name, Moved(0, 0))
            self.moved[name] = Moved(before.nbytes + nbytes, before.blocks + blocks)

    def _unlike(self, piece: Move, handed: str) -> RoomError:
        name = piece.component
        return RoomError(
            "a strategy does not move what the plan says",
            cause=f"{piece.nbytes} bytes of component {name!r} are planned for a push, {handed} were handed over",
            hint="chunk() of its send hook yields every block of the move once, and no other",
            component=name,
            peer=self._delivery.destination.name,
            strategy=self._node.strategies[name].name,
            code="room.bytes",
        )
