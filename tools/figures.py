"""The tables of measured figures in README.md and the docs, made from what `make bench` wrote.

``python -m tools.figures`` says whether each page has what ``benchmarks/measured.json`` says; ``--write`` makes it so.
``--take FOLDER`` first puts what `make bench` left in that folder into the file. ``--table FOLDER`` writes all tables
of a folder to its ``table.md``, and leaves the repository alone.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import after_forward
from benchmarks.busy import intervals
from benchmarks.rows import drawn

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "measured.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS = re.compile(r"(<!-- figures: ([a-z0-9-]+) -->\n).*?(<!-- figures: end -->)", re.DOTALL)
FILES = {
    "core": "results.json",
    "overlap": "overlap.json",
    "sglang": "sglang.json",
    "vllm": "vllm.json",
    "sglang-after-forward": "sglang-after-forward.json",
    "vllm-after-forward": "vllm-after-forward.json",
    "vllm-moves": "vllm-moves.json",
    "vllm-conversations": "vllm-conversations.json",
}
"""What each benchmark leaves in its folder."""
NAMES = {"tcp": "`tcp`", "nixl": "NIXL", "mooncake": "Mooncake"}
WORKLOADS = {
    "A": "one request of 8 MiB",
    "B": "one request of 512 MiB in random pages",
    "C": "one request of 512 MiB in order",
}
IN_FLIGHT = {64: "small requests, 64 in flight", 16: "small requests, 16 in flight", 1: "small requests, one at a time"}
MIXES = {
    "2x512": "a request of 1 MiB beside two of 512 MiB",
    "8x64": "a request of 1 MiB beside eight of 64 MiB",
}
BUSY = {
    "none": "quiet",
    "process": "beside another process that takes a core",
    "prefill": "Python in the sending process",
    "decode": "Python in the receiving process",
    "both": "Python in both",
    "scheduler": "an engine that computes 2 ms of each 3",
}

Row = dict[str, Any]
Found = dict[str, Any]
"""What each benchmark found, by its key in `FILES`."""


def taken(folder: Path) -> Found:
    """What is in a folder of results."""
    return {name: json.loads((folder / each).read_text()) for name, each in FILES.items() if (folder / each).exists()}


def written(found: Found) -> str:
    """The file: one row a line, so that a change shows the rows that changed."""
    text = json.dumps(found, indent=1)
    # What is inside of a row goes on one line.
    return re.sub(r"\n {4,}", " ", re.sub(r"\n {3,}([}\]])", r" \1", text)) + "\n"


def bounds(value: Any) -> str:
    """A ratio as ``0.63 (0.60–0.66)``, from what a benchmark writes: text, or the median and its bounds."""
    if isinstance(value, str):
        value = [float(each) for each in re.findall(r"-?[\d.]+", value)]
    median, low, high = value
    return f"{median:.2f} ({low:.2f}–{high:.2f})"


def one(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The row that has these values, if it was measured."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def cells(rows: Sequence[Row], show: Callable[[Row], Any], wanted: Iterable[dict[str, Any]]) -> list[Any]:
    """A cell for each wanted row; a dash for one that was not measured."""
    found = (one(rows, **each) for each in wanted)
    return ["–" if row is None else show(row) for row in found]


def sglang(found: Found) -> str:
    """Requests through Statelink and through SGLang's own connectors."""
    given = found["sglang"]
    libraries = ("nixl", "mooncake")
    rows = [
        [about, *cells(given["handoff"], _ratio, ({"workload": name, "sglang": each} for each in libraries))]
        for name, about in WORKLOADS.items()
    ]
    rows += [
        [about, *cells(given["rooms"], _ratio, ({"in_flight": number, "sglang": each} for each in libraries))]
        for number, about in IN_FLIGHT.items()
    ]
    rows += [
        [MIXES[name], *cells(given["mixed"], _ratio, ({"workload": name, "sglang": each} for each in libraries))]
        for name in dict.fromkeys(row["workload"] for row in given["mixed"])
    ]
    return drawn(["", *(NAMES[each] for each in libraries)], rows)


def sglang_short(found: Found) -> str:
    """A few lines of it, for a first look."""
    lines = sglang(found).splitlines()
    return "\n".join(line for line in lines if IN_FLIGHT[16] not in line and MIXES["8x64"] not in line) + "\n"


def sglang_mixed(found: Found) -> str:
    """A small request alone and beside large ones, and a large one then: Statelink's times and SGLang's."""
    rows = []
    for row in found["sglang"]["mixed"]:
        ours, theirs = (
            [
                f"{times[whose]:,.1f}"
                for times in (row["alone_ms"], row["beside_ms"], row["beside_p99_ms"], row["large_ms"])
            ]
            for whose in (0, 1)
        )
        both = (f"{each}, {other} ms" for each, other in zip(ours, theirs, strict=True))
        rows.append([f"{NAMES[row['sglang']]}, {MIXES[row['workload']]}", *both, bounds(row["large_ratio"])])
    return drawn(["", "alone", "beside", "beside, 99th percentile", "a large one", "large ones, ratio"], rows)


def sglang_cpu(found: Found) -> str:
    """Processor time of both processes for each small request."""
    rows = found["sglang"]["rooms"]
    show = lambda row: f"{row['cpu_ms_ours']:.2f} ms, {row['cpu_ms_theirs']:.2f} ms"  # noqa: E731
    libraries = ("nixl", "mooncake")
    return drawn(
        ["", *(f"{NAMES[each]}: Statelink, SGLang's connector" for each in libraries)],
        (
            [about, *cells(rows, show, ({"in_flight": number, "sglang": each} for each in libraries))]
            for number, about in IN_FLIGHT.items()
        ),
    )


def sglang_loop(found: Found) -> str:
    """What a scheduler's loop loses to each request."""
    rows = []
    for row in found["sglang"]["loop"]:
        own = f"{NAMES.get(row['sglang'], row['sglang'])}, {row['in_flight']} in flight"
        sides = [f"{role}_{what}" for what in ("lost", "added") for role in ("prefill", "decode")]
        times = [_both(row[f"{each}_us"]) for each in ("request", *sides[:2])]
        rows.append([own, *times, *(bounds(row[f"{each}_ratio"]) for each in sides)])
    ratios = [f"{what}, {role}" for what in ("ratio", "beside an idle connector") for role in ("prefill", "decode")]
    return drawn(["", "a request", "lost in prefill", "lost in decode", *ratios], rows)


def _both(times: tuple[int, int]) -> str:
    """Microseconds of Statelink's and of SGLang's."""
    return ", ".join(f"{each / 1e3:.2f} ms" if each >= 1000 else f"{each} µs" for each in times)


def sglang_turn(found: Found) -> str:
    """A turn of a scheduler's loop while no request is there."""
    rows = []
    for library in ("nixl", "mooncake"):
        given = [row for row in found["sglang"]["loop"] if row["sglang"] == library]
        for role in ("prefill", "decode") if given else ():
            # Alone it is measured before each connector's turn.
            alone = [each for row in given for each in row[f"{role}_turn_us"]]
            ours, theirs = ([row[f"{role}_idle_turn_us"][whose] for row in given] for whose in (0, 1))
            cells = (f"{statistics.median(each) / 1e3:.2f} ms" for each in (alone, ours, theirs))
            rows.append([f"{NAMES[library]}, {role}", *cells])
    return drawn(["", "without a connector", "Statelink, idle", "SGLang's connector, idle"], rows)


def vllm(found: Found) -> str:
    """Requests through Statelink and through vLLM's own connectors."""
    rows = found["vllm"]["rows"]
    own = {"NixlPushConnector": "the connector that pushes", "NixlConnector": "the connector that reads"}
    body = []
    for length in dict.fromkeys(row["tokens"] for row in rows):
        wanted = [{"tokens": length, "vllm": name, "statelink": "nixl"} for name in own]
        both = zip(cells(rows, _ratio, wanted), cells(rows, lambda row: bounds(row["at_once"]), wanted), strict=True)
        body.append([f"{length:,} tokens", *(cell for pair in both for cell in pair)])
    return drawn(["", *(head for about in own.values() for head in (about, "the same, both engines at once"))], body)


def sglang_after_forward(found: Found) -> str:
    """What is left after prefill's forward pass, between servers of SGLang."""
    return after_forward.table(found["sglang-after-forward"]["rows"])


def vllm_after_forward(found: Found) -> str:
    """What is left after prefill's forward pass, between engines of vLLM."""
    return after_forward.table(found["vllm-after-forward"]["rows"])


def vllm_moves(found: Found) -> str:
    """The pause of a stream that moves between servers of vLLM."""
    head = ["", "pause", "transfer", "a step", "the rest", "pause, over the transfer and two steps", "computed anew"]
    body = []
    for row in found["vllm-moves"]["rows"]:
        own = f"{row['model']}, {row['tokens']:,} tokens, {NAMES[row['statelink']]}"
        pause, *known = (row[f"{each}_ms"] for each in ("pause", "transfer", "step"))
        times = (f"{each:.1f} ms" for each in (pause, *known, pause - sum(known)))
        body.append([own, *times, bounds(row["over"]), f"{row['computed_ms']:,.0f} ms"])
    return drawn(head, body)


def vllm_conversations(found: Found) -> str:
    """The time to the first token of a turn of a conversation, and how many tokens prefill computed of it."""
    ways = ["held", "asked", "NixlConnector"]
    layers = {"attention": "full attention", "hybrid": "Mamba 2 and full attention"}
    body = []
    for row in found["vllm-conversations"]["rows"]:
        caches = "" if row["caches"] == "yes" else ", no prefix caches"
        of = f"{layers[row['model']]}, answers of {row['turns'][1]} tokens{caches}"
        for place, without in enumerate(row["ways"]["without"]):
            cells = [_first_token(row["ways"][way][place]) if way in row["ways"] else "–" for way in ways]
            took = f"{without['ms']:,} ms; {without['computed']:,}"
            body.append([of, f"{without['tokens']:,} tokens", took, *cells])
    return drawn(["", "prompt", "without", *ways], body)


def _first_token(turn: Row) -> str:
    return f"{bounds(turn['ratio'])}; {turn['computed']:,}"


def large(found: Found) -> str:
    """Large requests, over the library alone and over a plain copy."""
    rows = _core(found, "handoff")
    body = []
    for name, about in WORKLOADS.items():
        wanted = [{"workload": name, "backend": each} for each in NAMES]
        show = lambda row: bounds(row["over_raw"]) if "over_raw" in row else "–"  # noqa: E731
        body.append([f"{name}, {about}", *cells(rows, show, wanted)])
        body.append(["the same, over one thread's copy", *cells(rows, lambda row: bounds(row["over_floor"]), wanted)])
    return drawn(["", *NAMES.values()], body)


def small(found: Found) -> str:
    """Small requests: how many a second, or how long one takes; quiet and beside a busy engine."""
    rows = _core(found, "rooms")
    body = []
    for number, show in (
        (64, lambda row: f"{row['rooms_per_s']:,} a second"),
        (1, lambda row: f"{row['median_ms']} ms"),
    ):
        for wanted, about in _beside():
            each_backend = ({**wanted, "in_flight": number, "backend": each} for each in NAMES)
            body.append([f"{IN_FLIGHT[number]}, {about}", *cells(rows, show, each_backend)])
    return drawn(["", *NAMES.values()], body)


def small_cpu(found: Found) -> str:
    """Processor time of each side for a small request, quiet."""
    rows = _core(found, "rooms")
    show = lambda row: f"{row['prefill_cpu_ms']} ms, {row['decode_cpu_ms']} ms"  # noqa: E731
    return drawn(
        ["prefill, decode", *NAMES.values()],
        (
            [about, *cells(rows, show, ({"in_flight": number, "busy": "none", "backend": each} for each in NAMES))]
            for number, about in IN_FLIGHT.items()
            if number != 16
        ),
    )


def busy(found: Found) -> str:
    """Large requests beside a busy engine."""
    rows = _core(found, "handoff")
    show = lambda row: f"{row['busy_ms']} ms, {bounds(row['busy_over_quiet'])}"  # noqa: E731
    body = []
    for name in ("A", "B"):
        for wanted, about in _beside():
            if wanted["busy"] not in ("none", "both"):
                each_backend = ({**wanted, "workload": name, "backend": each} for each in NAMES)
                body.append([f"{name}, {about}", *cells(rows, show, each_backend)])
    return drawn(["", *NAMES.values()], body)


def unequal(found: Found) -> str:
    """Unequal ranks: 32 MiB in pieces of 512 bytes."""
    rows = _core(found, "unequal")
    ways = {
        "direct_over_whole": "every piece by itself, over the same bytes in whole pages",
        "staged_over_whole": "staged, over the same bytes in whole pages",
        "direct_over_staged": "every piece by itself, over staged",
    }
    return drawn(
        ["", *NAMES.values()],
        (
            [about, *cells(rows, partial(_bounds_of, way), ({"backend": each} for each in NAMES))]
            for way, about in ways.items()
        ),
    )


def growth(found: Found) -> str:
    """How costs and memory grow."""
    rows = _core(found, "growth")
    body: list[list[Any]] = []
    for kind, unit, about in (
        ("peers", "us", "a small request, with {} peers connected"),
        ("in flight", "us", "a small request, with {} in flight"),
        ("items", "ns", "a page, of {} in random order"),
    ):
        for count in dict.fromkeys(row["count"] for row in rows if row.get("growth") == kind):
            wanted = {"growth": kind, "count": count} | ({"order": "random"} if kind == "items" else {})
            each_backend = ({**wanted, "backend": each} for each in NAMES)
            body.append([about.format(f"{count:,}"), *cells(rows, partial(_time_in, unit), each_backend)])
    for what in dict.fromkeys(row["memory"] for row in rows if "memory" in row):
        each_backend = ({"memory": what, "backend": each} for each in NAMES)
        body.append([f"memory of {what}", *cells(rows, _memory, each_backend)])
    return drawn(["", *NAMES.values()], body)


def overlap(found: Found) -> str:
    """From the end of prefill's forward pass to success on decode."""
    rows = found["overlap"]["rows"]
    ways = [key.removesuffix("_ms") for key in rows[0] if key.endswith("_ms")]
    return drawn(
        ["rate of the network", *(f"pushed {way}" for way in ways)],
        ([f"{row['mbit']:,} Mbit/s", *(f"{row[f'{way}_ms']} ms" for way in ways)] for row in rows),
    )


TABLES: dict[str, Callable[[Found], str]] = {
    "sglang": sglang,
    "sglang-short": sglang_short,
    "sglang-mixed": sglang_mixed,
    "sglang-cpu": sglang_cpu,
    "sglang-loop": sglang_loop,
    "sglang-turn": sglang_turn,
    "sglang-after-forward": sglang_after_forward,
    "vllm": vllm,
    "vllm-after-forward": vllm_after_forward,
    "vllm-moves": vllm_moves,
    "vllm-conversations": vllm_conversations,
    "large": large,
    "busy": busy,
    "small": small,
    "small-cpu": small_cpu,
    "unequal": unequal,
    "growth": growth,
    "overlap": overlap,
}


def replaced(text: str, found: Found) -> str:
    """A page with each of its tables as it was measured."""
    return MARKS.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]](found)}\n{mark[3]}", text)


def every(found: Found) -> str:
    """All tables that can be made."""
    parts = []
    for name, make in TABLES.items():
        try:
            parts.append(f"## {(make.__doc__ or name).rstrip('.')}\n\n{make(found)}")
        except (KeyError, IndexError):  # that benchmark was not run
            parts.append(f"## {(make.__doc__ or name).rstrip('.')}\n\nnot measured\n")
    return "\n".join(parts)


def _beside() -> Iterator[tuple[Row, str]]:
    """What rows were measured beside, and how a table says it."""
    for busy, about in BUSY.items():
        for interval in intervals(busy):
            shorter = f", with a switch interval of {interval * 1e3:g} ms" if interval else ""
            yield {"busy": busy, "switch_interval": interval}, about + shorter


def _core(found: Found, suite: str) -> list[Row]:
    return [row for row in found["core"]["rows"] if row["suite"] == suite]


def _time_in(unit: str, row: Row) -> str:
    return f"{row[unit]:,} {unit.replace('u', 'µ')}"


def _memory(row: Row) -> str:
    return f"{row['KiB']:,} KiB" if "KiB" in row else f"{row['MiB']:,} MiB"


def _bounds_of(name: str, row: Row) -> str:
    return bounds(row[name])


def _ratio(row: Row) -> str:
    return bounds(row["ratio"])


def main() -> int:
    """Compare or write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, metavar="FOLDER", help="take what a folder has into the file")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="write the tables of a folder into it")
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    given = parser.parse_args()
    if given.table:
        (given.table / "table.md").write_text(every(taken(given.table)))
        print(f"wrote {given.table / 'table.md'}")
        return 0
    found: Found = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    if given.take:
        found |= taken(given.take)
        MEASURED.write_text(written(found))
    stale = []
    for page in PAGES:
        text = page.read_text()
        made = replaced(text, found)
        if made != text and given.write:
            page.write_text(made)
        elif made != text:
            stale.append(str(page.relative_to(ROOT)))
    if stale:
        print(f"figures are stale in {', '.join(stale)}: `make figures` writes them anew", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
