"""What a ``memfabric_hybrid`` is and answers on a machine without an NPU, printed as JSON; run as a program.

Whichever is found first on the path is asked: the library, or the simulator.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

URL, ANY, LOW = "tcp://127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:1"
CASTS = {
    "U8": "int",
    "U32": "int",
    "U64": "int",
    "I32": "int",
    "Text": "str",
    "Addresses": "list",
    "Function_": "collections.abc.Callable",
}
FUNCTIONS = ("create_config_store", "set_log_level", "set_extern_logger")
NATIVE = {
    "collections.abc.Sequence[typing.SupportsInt]": "list",
    "typing.SupportsInt": "int",
    "_pymf_transfer.": "",
    " = ": "=",
}


class Index:
    def __index__(self) -> int:
        return 5


class Int:
    def __int__(self) -> int:
        return 5


def parameters(function: Any) -> Iterator[str]:
    """Parameters of a function, each with its type and default; a native one tells them in its documentation."""
    if not inspect.isfunction(function):
        text = function.__doc__.strip().splitlines()[0]
        text = text[text.index("(") + 1 : text.rindex(")")]
        for old, new in NATIVE.items():
            text = text.replace(old, new)
        yield from (part for part in text.split(", ") if part and not part.startswith("self"))
        return
    for name, each in inspect.signature(function).parameters.items():
        default = "" if each.default is each.empty else f"={each.default!r}"
        if name != "self":
            yield f"{name}: {CASTS.get(each.annotation, each.annotation)}{default}"


def calls(library: Any, engine: Any) -> Iterator[tuple[Any, ...]]:
    """Calls to make, in order."""
    kinds, first = library.TransDataOpType, engine.initialize
    yield from ((kinds, value) for value in (999, -1, "x"))
    yield from ((library.set_log_level, level) for level in (-1, 0, 4, 5, 9, "1"))
    yield from ((library.set_extern_logger, function) for function in (None, 5, "x"))
    yield from [(library.set_conf_store_tls, False, "")]
    yield from ((library.create_config_store, url) for url in (None, "bogus"))
    yield (engine.get_rpc_port,)
    for role in ("Prefill", "Decode"):
        yield first, URL, ANY, role, 0
        yield engine.unregister_memory, 0
        yield engine.batch_transfer_sync_write, LOW, [], [], []
    yield first, None, None, "x", 0
    yield first, None, ANY, "Decode", 0
    yield first, URL, None, "Decode", 0
    yield first, b"tcp://x", "localhost:0", "Decode", 0
    yield first, URL, ANY, "Decode", 0, kinds.HOST_RDMA, "Decode", "tcp://127.0.0.1:1"
    yield from ((first, URL, ANY, "Decode", 0, kind) for kind in (1, None))
    yield from ((first, URL, ANY, "Decode", device) for device in (-1, 1 << 32, (1 << 32) - 1, 1.0))
    yield first, URL, ANY, 5, 0
    yield (engine.get_rpc_port,)
    for value in (0, 4096, -1, 1.5, 1 << 64, True, Index(), Int(), "5", None):
        yield engine.register_memory, value, 1
    yield engine.register_memory, 1
    for values in ([1], [], None, (1,), range(1), "a", {1}, {1: 2}, {1: 2}.keys(), b"a", [1.0], [-1], 5):
        yield engine.batch_register_memory, values, [1]
    yield engine.batch_register_memory, [], []
    yield engine.unregister_memory, 4096
    for name in ("transfer_sync_write", "transfer_sync_read"):
        for dest in (LOW, "garbage", None, 5):
            yield getattr(engine, name), dest, 1, 1, 1
        yield getattr(engine, name), LOW, 1, 1, 1, -1
        yield getattr(engine, f"batch_{name}"), LOW, [1], [1], []
        yield getattr(engine, f"batch_{name}"), LOW, [1], [1], [1], 1
        yield getattr(engine, f"batch_{name}"), LOW, [1], None, [1], 1
    yield engine.transfer_async_write_submit, LOW, 1, 1, 1, 0
    yield engine.transfer_async_read_submit, LOW, 1, 1, 1
    yield engine.batch_transfer_async_read_submit, LOW, [1], [1], [1], 0, -1
    yield engine.batch_transfer_write_with_quant, LOW, [1], [1], [1], [], [], 64
    yield from 2 * [(engine.destroy,), (engine.unInitialize,)]
    yield engine.register_memory, 1, 1
    yield engine.transfer_sync_write, LOW, 1, 1, 1


def answer(library: Any, call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What a call returns or raises, and the text of the last error after it."""
    try:
        got = repr(call(*arguments, **named))
    except Exception as error:
        got = f"{type(error).__name__}: {str(error).partition('(')[0]}"
    return f"{got} {library.get_and_clear_last_err_msg()!r}"


def main() -> None:
    """Print everything, behind whatever the library logs."""
    import memfabric_hybrid as library

    kinds, found = library.TransDataOpType, {}
    for owner in (library.TransferEngine, library):
        for name in sorted(vars(owner)):
            known = owner is library.TransferEngine or name in (
                "create_config_store",
                "set_log_level",
                "set_extern_logger",
            )
            if known and not name.startswith("_"):
                value = getattr(owner, name)
                found[name] = [value.__name__] if inspect.isclass(value) else list(parameters(value))
    for kind in (kinds, library.TransferOpcode):
        found[kind.__name__] = [f"{name} {int(member)} {member!r}" for name, member in kind.__members__.items()]
    member = kinds.SDMA
    found["a member"] = [str(member), member.name, str(member.value), repr(kinds(4)), str(hash(member))]
    found["equality"] = [str(each) for each in (kinds(1) == member, member == 1, isinstance(member, int))]
    engine = library.TransferEngine()
    for number, (call, *arguments) in enumerate(calls(library, engine)):
        shown = [type(each).__name__ if isinstance(each, (Index, Int)) else repr(each) for each in arguments]
        found[f"{number}: {call.__name__}({', '.join(shown):.80})"] = [answer(library, call, *arguments)]
    named = {"dest_session": LOW, "buffer": 1, "peer_buffer": 1, "length": 1, "flags": 0}
    found["by keyword"] = [answer(library, engine.transfer_sync_write, **named)]
    found["by a wrong keyword"] = [answer(library, engine.register_memory, addr=1, capacity=1)]
    print("\nANSWERS " + json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
