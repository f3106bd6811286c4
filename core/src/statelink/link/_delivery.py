"""One push to one destination; runs on a data thread."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from statelink.backend import Blocks, Moved
from statelink.errors import Reason, RoomError
from statelink.plan import ComponentPlan, Move, plan_move

from ._mover import Moving, move, reason_of
from ._transport import check_transport
from ._verify import digest_of

if TYPE_CHECKING:
    from ._node import Node
    from ._sending import Delivery, Push

__all__ = ["Delivered", "deliver"]


class Delivered(NamedTuple):
    """What became of one push to one destination.

    Attributes:
        moving: Bytes, blocks, failure.
        grains: Per component, the granules that moved.
        moved: Per component, what was moved.
    """

    moving: Moving
    grains: dict[str, tuple[int, int]]
    moved: dict[str, Moved]


def deliver(node: Node, delivery: Delivery, push: Push) -> Generator[None, None, Delivered]:
    """Plan, hand to the strategies, submit, and wait until everything is visible at the destination.

    Gives the thread back, by a ``yield``, where a strategy has to wait. Never raises: what goes wrong is in the result.
    """
    counted = _Counted()
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
    except Exception as error:
        return Delivered(Moving(0, 0, reason_of(error, room=delivery.request.room)), grains, {})
    moving = yield from move(
        node.backend,
        destination.name,
        counted.all(node, delivery, [piece for _, piece in moves]),
        room=delivery.request.room,
        generation=delivery.request.generation,
        tables=(node.regions, destination.regions),
        slice_bytes=node.config.slice_bytes,
        cancelled=delivery.cancelled,
    )
    if moving.reason is None and push.last and not moving.pending:
        moving = moving._replace(reason=_finish(node, delivery))
    moved = {piece.component: Moved(piece.nbytes, counted.blocks.get(piece.component, 0)) for _, piece in moves}
    return Delivered(moving, grains, moved)


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
        low, high = piece.grains
        raise RoomError(
            f"component {name!r} is pushed twice",
            cause=f"some of positions {low * plan.granule} to {high * plan.granule} were in an earlier push"
            if plan.target.page
            else "its item was in an earlier push",
            component=name,
            code="room.overlap",
        )
    covered[rows, piece.due] = True


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
        grain = owed.first + place if owed.grains is None else int(owed.grains[place])
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
        except Exception as error:
            return reason_of(error, room=delivery.request.room, component=name, strategy=node.strategies[name].name)
    return None


class _Counted:
    """The blocks of all components of a push as one stream, counted per component."""

    def __init__(self) -> None:
        self.blocks: dict[str, int] = {}

    def all(self, node: Node, delivery: Delivery, moves: list[Move]) -> Iterator[Blocks | None]:
        """Join small batches of neighbouring components, since one submission costs more than one block."""
        limit = node.backend.capabilities.max_blocks
        waiting: list[Blocks] = []
        count = 0
        for piece in moves:
            for blocks in delivery.hooks[piece.component].chunk(delivery.contexts[piece.component], piece):
                if blocks is None:
                    if waiting:
                        yield Blocks.concatenate(waiting)
                        waiting, count = [], 0
                    yield None
                    continue
                self.blocks[piece.component] = self.blocks.get(piece.component, 0) + blocks.count
                if count + blocks.count > limit and waiting:
                    yield Blocks.concatenate(waiting)
                    waiting, count = [], 0
                waiting.append(blocks)
                count += blocks.count
        if waiting:
            yield Blocks.concatenate(waiting)
