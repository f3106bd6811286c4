"""State types as data: how state is indexed, and which part of a sequence it covers."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

import msgspec

from statelink._arguments import shown, switch, text
from statelink.errors import StateError
from statelink.hints import did_you_mean

__all__ = ["Coverage", "IndexSpace", "StateType", "register_state_type", "state_type", "state_types"]


MAX_NAME = 255


class IndexSpace(enum.Enum):
    """What one index of a component addresses."""

    PAGE = "page"
    """A block of consecutive positions."""
    RING = "ring"
    """One row of a request's ring: ``slot * ring + position mod ring``."""
    SLOT = "slot"
    """The one item of a request in a pool of recurrent states."""
    ROW = "row"
    """The one item of a request in a pool of per-request rows."""


class Coverage(enum.Enum):
    """Which positions of a request must arrive, with ``tokens`` N, ``prefix`` P and a window W."""

    SUFFIX = "suffix"
    """``[P, N)``: what decode does not hold yet."""
    WHOLE = "whole"
    """``[0, N)``: also what a prefix hit covers."""
    WINDOW = "window"
    """``[max(P, N - W), N)``."""
    RECENT = "recent"
    """``[max(0, N - W), N)``: the window, whatever decode holds of the prefix."""
    TAIL = "tail"
    """``[max(0, N - N mod q - k), N)``: the open group of q positions, and the k before it."""
    OPEN = "open"
    """``[max(P, N - N mod q), N)``: the open group of q positions, as far as decode does not hold it yet.

    With chunked local attention, the token at position t attends to the positions from ``t - t mod q`` to t. Decode
    goes on at position N, so it needs the group of that position. With q = 64: of N = 100 tokens those from 64 on must
    arrive, or with P = 80 those from 80 on; of N = 127 those from 64 on; of N = 128 none. An engine whose decode
    computes the prompt's last token itself says N without that token: then position N is that token's.

    vLLM keeps exactly these: after n tokens, ``ChunkedLocalAttentionManager.get_num_skipped_tokens`` gives
    ``n // q * q`` tokens back.
    """
    REQUEST = "request"
    """No positions: exactly one item, which is final when the last position has been computed."""


class StateType(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of request state, as data.

    Backends never look inside a type. Every backend that declares a registered type can move it.

    Attributes:
        name: Name, also in messages.
        index: What one index addresses.
        coverage: Which positions of a request must arrive.
        aligned: Whether the first required position of a request must be at the beginning of an item of decode. It is,
            if decode's prefix ends between two items.
        elide_empty: Whether a buffer that one side lists with zero items is left out of the plan. Otherwise a buffer
            that is empty on one side only is a mismatch.
        complete: Whether only complete groups of positions count: N is rounded down to the component's group first.
        with_last: Whether items move only with a request's last push, such as metadata rows, which are final only then.
        aliases: Other names of this type.
        doc: A description.
    """

    name: str
    index: IndexSpace
    coverage: Coverage
    aligned: bool = False
    elide_empty: bool = False
    complete: bool = False
    with_last: bool = False
    aliases: tuple[str, ...] = ()
    doc: str = ""

    def __post_init__(self) -> None:
        if not text(self.name, "the name of a state type", most=MAX_NAME):
            raise StateError("a state type needs a name")
        for field, expected in (("index", IndexSpace), ("coverage", Coverage)):
            if not isinstance(getattr(self, field), expected):
                found = shown(getattr(self, field))
                raise StateError(
                    f"the {field} of {self.name!r} is {found}", cause=f"an {expected.__name__} is expected"
                )
        for field in ("aligned", "elide_empty", "complete", "with_last"):
            switch(getattr(self, field), f"{field!r} of state type {self.name!r}")
        if not isinstance(self.aliases, tuple):
            raise StateError(f"the aliases of {self.name!r} are {shown(self.aliases)}", cause="a tuple is expected")
        for alias in self.aliases:
            text(alias, f"an alias of {self.name!r}", most=MAX_NAME)
        text(self.doc, f"the description of {self.name!r}")
        if (self.index in (IndexSpace.PAGE, IndexSpace.RING)) == (self.coverage is Coverage.REQUEST):
            raise StateError(
                f"state type {self.name!r} has index space {self.index.value!r} but coverage {self.coverage.value!r}",
                hint="pages and ring rows cover positions; slots and rows have coverage 'request'",
            )

    @property
    def positional(self) -> bool:
        """Whether indices stand for positions of the sequence."""
        return self.coverage is not Coverage.REQUEST


_PAGE, _RING, _SLOT, _ROW = IndexSpace.PAGE, IndexSpace.RING, IndexSpace.SLOT, IndexSpace.ROW

_BUILT_IN = (
    StateType(
        name="kv",
        index=_PAGE,
        coverage=Coverage.SUFFIX,
        aligned=True,
        doc="Keys and values (MHA, GQA) or latents (MLA) of full attention, in pages.",
    ),
    StateType(
        name="swa",
        index=_PAGE,
        coverage=Coverage.WINDOW,
        doc="Keys and values of sliding-window layers in a page pool of their own; indices are that pool's pages.",
    ),
    StateType(
        name="chunked_local",
        index=_PAGE,
        coverage=Coverage.OPEN,
        doc="Keys and values of layers with chunked local attention, whose tokens attend to their own group only.",
    ),
    StateType(
        name="swa_ring",
        index=_RING,
        coverage=Coverage.RECENT,
        doc="Keys and values of sliding-window layers in a ring of each request.",
    ),
    StateType(
        name="dsa",
        index=_PAGE,
        coverage=Coverage.SUFFIX,
        aligned=True,
        elide_empty=True,
        aliases=("nsa",),
        doc="Sparse-attention index keys, in the pages of the full pool; layers that share an index list no items.",
    ),
    StateType(
        name="dsa_tail",
        index=_RING,
        coverage=Coverage.TAIL,
        elide_empty=True,
        doc="Keys and scores of the positions that do not fill a pooling group of the index yet, in a ring.",
    ),
    StateType(
        name="dsv4",
        index=_PAGE,
        coverage=Coverage.SUFFIX,
        aligned=True,
        aliases=("dsv4_kv",),
        doc="Compressed keys, values and index keys in the pages of the full pool: an item has fewer rows than tokens.",
    ),
    StateType(
        name="dsv4_c128",
        index=_PAGE,
        coverage=Coverage.SUFFIX,
        complete=True,
        doc="Compressed keys and values in pages of their own, one row for each complete group of positions.",
    ),
    StateType(
        name="dsv4_c4_state",
        index=_RING,
        coverage=Coverage.TAIL,
        doc="Rows of a compressor's ring: the open group, and the group before it, which overlaps it.",
    ),
    StateType(
        name="c128_state",
        index=_PAGE,
        coverage=Coverage.TAIL,
        aliases=("dsv4_state",),
        doc="A compressor's open group as one item of a request-scoped pool; nothing where no group is open.",
    ),
    StateType(
        name="minimax_index_k",
        index=_PAGE,
        coverage=Coverage.SUFFIX,
        aligned=True,
        aliases=("index_k",),
        doc="Index keys of sparse layers, without values.",
    ),
    StateType(
        name="minimax_dense_kv",
        index=_PAGE,
        coverage=Coverage.WHOLE,
        aliases=("dense_kv",),
        doc="Keys and values of the dense layers of a sparse model, in the pages of the full pool.",
    ),
    StateType(
        name="qsa_compressed",
        index=_PAGE,
        coverage=Coverage.WHOLE,
        doc="Compressed index keys in the pages of the full pool.",
    ),
    StateType(
        name="block_scale",
        index=_PAGE,
        coverage=Coverage.WHOLE,
        doc="Scales of block-quantised keys and values, in the pages of the full pool.",
    ),
    StateType(
        name="block_scale_swa",
        index=_PAGE,
        coverage=Coverage.WINDOW,
        doc="Scales of block-quantised keys and values, in the pages of the sliding pool.",
    ),
    StateType(
        name="mamba",
        index=_SLOT,
        coverage=Coverage.REQUEST,
        doc="Convolution and recurrent states of Mamba, gated-delta and linear-attention layers, one slot a request.",
    ),
    StateType(
        name="qsa_pending",
        index=_SLOT,
        coverage=Coverage.REQUEST,
        doc="Raw index keys of the open compression group, and its rotary positions: one ring a request, moved whole.",
    ),
    StateType(
        name="request_row",
        index=_ROW,
        coverage=Coverage.REQUEST,
        doc="One row of a per-request pool, such as from where a draft's window is valid.",
    ),
    StateType(
        name="hidden",
        index=_ROW,
        coverage=Coverage.REQUEST,
        doc="Hidden states that a draft model starts from, one row a request.",
    ),
    StateType(
        name="encoder",
        index=_ROW,
        coverage=Coverage.REQUEST,
        doc="Encoder outputs of a request, in one row.",
    ),
    StateType(
        name="aux",
        index=_ROW,
        coverage=Coverage.REQUEST,
        with_last=True,
        doc="Metadata of one request (first token, logprobs, draft state, ...), one row a request.",
    ),
)

_lock = threading.Lock()
_by_name: dict[str, StateType] = {}
_loader: Callable[[], object] | None = None


def register_state_type(new: StateType) -> None:
    """Register a state type in this process.

    Registering an equal type again does nothing. Thread-safe.

    Raises:
        StateError: Another type already has this name or alias.
    """
    if not isinstance(new, StateType):
        raise StateError(f"{shown(new)} is not a StateType")
    with _lock:
        for name in (new.name, *new.aliases):
            known = _by_name.get(name)
            if known is not None and known != new:
                raise StateError(
                    f"state type name {name!r} is taken",
                    cause=f"it belongs to type {known.name!r} with another definition",
                    hint="a third party's type takes its package's name as a prefix",
                )
        for name in (new.name, *new.aliases):
            _by_name[name] = new


def state_type(name: str) -> StateType:
    """The type with this name or alias.

    Raises:
        StateError: No such type is registered.
    """
    if text(name, "the name of a state type", most=MAX_NAME) not in _by_name:
        _ask_loader()
    try:
        return _by_name[name]
    except KeyError:
        raise StateError(
            f"no state type named {name!r}",
            cause=f"known types: {', '.join(sorted(_by_name))}",
            hint=did_you_mean(
                name,
                _by_name,
                "a plugin registers its types with the hook statelink_state_types, "
                "or call statelink.state.register_state_type",
            ),
            code="state.unknown_type",
        ) from None


def load_types_with(loader: Callable[[], object]) -> None:
    """Set a function that loads plugins. It is called, without a lock, when somebody asks for an unregistered type."""
    global _loader
    _loader = loader


def _ask_loader() -> None:
    if _loader is not None:
        _loader()


def state_types() -> tuple[StateType, ...]:
    """Every registered type, ordered by name."""
    with _lock:
        return tuple(sorted(set(_by_name.values()), key=lambda each: each.name))


for _type in _BUILT_IN:
    register_state_type(_type)
