"""``statelink explain``: its files, what it prints, its JSON, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from statelink.cli import main
from statelink.errors import ConfigError, MismatchError
from statelink.plan import match
from statelink.registry import load_backend
from statelink_explain import Side, estimate, explain, inventories, presets, read_side, worth

from .published import PUBLISHED

ROOT = Path(__file__).parents[3]

TINY = """
[model]
name = "tiny"
layers = 2
attention = { heads = 2, dim = 64 }
[layout]
page = 16
"""


@pytest.fixture(name="files")
def files_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def run(prefill: str, decode: str, *options: str, expect: int = 0) -> str:
    Path("prefill.toml").write_text(prefill)
    Path("decode.toml").write_text(decode)
    result = CliRunner().invoke(main, ["explain", "prefill.toml", "decode.toml", *options])
    assert result.exit_code == expect, result.output
    return result.output


def test_the_tables_say_who_sends_what(files: Path) -> None:
    printed = run(TINY + "tp = 2", TINY, "--tokens", "1024")
    lines = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    assert lines[0] == ["tiny: 2 ranks of prefill can serve 1 rank of decode"]
    assert lines[1] == ["a request of 1,024 tokens: 1.0 MiB"]
    assert ["0 (tp0)", "0", "kv", "512.0 KiB", "4,096 × 128 B", "4,096 × 128 B", "[1]"] in lines
    assert ["kv", "kv", "1.0 MiB", "8,192 × 128 B", "8,192 × 128 B"] in lines
    assert ["prefill 1 (tp1) sends", "512.0 KiB"] in lines
    assert ["decode 0 receives", "1.0 MiB"] in lines
    assert "[1] shatters: one block per token and buffer, of 128 bytes;" in printed
    assert "'staging' in both links' configuration gathers them" in " ".join(printed.split())


def test_nothing_is_cut_off_on_a_narrow_terminal(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert "…" not in run('preset = "qwen3-next-80b"\nlayout = { tp = 2 }', 'preset = "qwen3-next-80b"')


def test_a_rank_without_a_part_is_shown(files: Path) -> None:
    latent = '[model]\nname = "l"\nlayers = 1\nlatent = { width = 64 }\n'
    printed = run(f"{latent}[layout]\ntp = 2", latent, "--tokens", "64")
    assert "prefill 1 (tp1) sends  0 B" in re.sub(r" +0 B", "  0 B", printed)
    assert "no part: told so by decode 0" in printed


def test_json_has_one_schema(files: Path) -> None:
    found = json.loads(run(TINY + "tp = 4", TINY, "--json", "--tokens", "128", "--prefix", "64"))
    half = {"target": 0, "component": "kv", "nbytes": 16384, "blocks": 128, "blocks_random": 128}
    shatters = (
        "shatters: one block per token and buffer, of 128 bytes; "
        "equal tp, or order 'hnd' on both sides, moves in larger ones, or 'staging' in both links' configuration "
        "gathers them into large blocks"
    )
    assert found == {
        "model": "tiny",
        "tokens": 128,
        "prefix": 64,
        "nbytes": 65536,
        "prefill": [{"rank": rank, "axes": {"tp": rank}, "nbytes": 16384, "told_by": None} for rank in range(4)],
        "decode": [{"rank": 0, "axes": {}, "nbytes": 65536, "told_by": None}],
        "totals": [{"component": "kv", "type": "kv", "nbytes": 65536, "blocks": 512, "blocks_random": 512}],
        "flows": [{"source": rank, **half, "mark": shatters} for rank in range(4)],
        "source": {"prefill": "", "decode": ""},
        "estimate": None,
        "worth": None,
    }


def test_a_mismatch_is_refused_in_the_words_of_connecting(files: Path) -> None:
    printed = run(TINY, f'{TINY}dtype = "float16"', expect=1)
    sides = [inventories(read_side(files / f"{name}.toml", name)) for name in ("prefill", "decode")]
    with pytest.raises(MismatchError) as expected:
        match(sides[0], sides[1])
    assert printed == f"Error [mismatch]: {expected.value}\n"
    assert "kv/layers.0-1.{k,v}: dtype: float16 on decode, bfloat16 on prefill" in printed
    refused = json.loads(run(TINY, f'{TINY}dtype = "float16"', "--json", expect=1))["refused"]
    assert refused["message"] == str(expected.value)
    assert set(refused) == {"code", "what", "who", "cause", "hint", "message"}
    assert (refused["code"], refused["who"]) == ("mismatch", {"prefill": "prefill", "decode": "decode"})


MODEL = '[model]\nname = "m"\n'
BAD = {
    "unknown key": (f"{TINY}tpp = 2", "unknown key 'tpp' in the layout (file f.toml)", "did you mean 'tp'?"),
    "unknown key of a file": ("prest = 1", "unknown key 'prest' in the file (file f.toml)", "did you mean 'preset'?"),
    "unknown key of a model": (f"{MODEL}layer = 1", "unknown key 'layer' in the model", "did you mean 'layers'?"),
    "unknown key of a section": (
        f"{MODEL}layers = 1\nattention = {{ head = 1 }}",
        "unknown key 'head' in the section 'attention' of the model",
        "did you mean 'heads'?",
    ),
    "wrong type": (f'{TINY}tp = "2"', "bad value in the layout", "tp: a whole number is expected, got '2'"),
    "not above zero": (f"{TINY}tp = 0", "bad value in the layout", "tp: a whole number >= 1 is expected, got 0"),
    "no such order": (f'{TINY}order = "ndh"', "bad value in the layout", "order: Invalid enum value 'ndh'"),
    "no such dtype": (f'{TINY}dtype = "bf16"', "bad value in the layout", "dtype: Invalid enum value 'bf16'"),
    "no table": ("layout = 3", "bad value in the file", "layout: a table is expected, got a whole number"),
    "section is no table": (
        f"{MODEL}layers = 1\nmamba = 3",
        "section 'mamba' of the model is not a mapping",
        "got int",
    ),
    "missing key": (f"{MODEL}", "bad value in the model", "layers is missing"),
    "no such preset": ('preset = "lama-3-8b"', "no preset named 'lama-3-8b'", "did you mean 'llama-3-8b'?"),
    "nothing like a preset": ('preset = "zzz"', "no preset named 'zzz'", "known presets: bamba-9b, "),
    "no model": ("[layout]\ntp = 1", "names its model once", "no 'preset', no 'config' and no 'model'"),
    "two models": (f'preset = "llama-3-8b"\n{TINY}', "names its model once", "it has 'preset' and 'model'"),
    "no section": (f"{MODEL}layers = 1", "has layers of kind 'full'", "no section"),
    "two sections": (
        f"{MODEL}layers = 1\nattention = {{ heads = 1, dim = 1 }}\nlatent = {{ width = 1 }}",
        "has layers of kind 'full'",
        "it has 'attention' and 'latent' for them",
    ),
    "needless section": (
        f'{MODEL}layers = 1\npattern = ["window"]\n'
        "window = { heads = 1, dim = 1, tokens = 1 }\nlatent = { width = 1 }",
        "has no layers of kind 'full'",
        "it has 'latent' for them",
    ),
    "ratios": (
        f'{MODEL}layers = 2\npattern = ["compressed"]\n'
        "compressed = { ratios = [4], width = 8, index_width = 8, window = 8 }",
        "needs a compression ratio for each layer",
        "2 layers and 1 ratios",
    ),
    "not TOML": ("a = = 1", "not TOML (file f.toml)", "line 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_wrong_says_where(case: str, files: Path) -> None:
    text, what, rest = BAD[case]
    (files / "f.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_side(files / "f.toml", "prefill")
    assert what in str(error.value)
    assert rest in str(error.value)
    assert "f.toml" in str(error.value)


def test_a_wrong_file_ends_the_command_with_the_error(files: Path) -> None:
    printed = run(f"{TINY}tpp = 2", TINY, expect=1)
    assert printed.startswith("Error [config.key]: unknown key 'tpp' in the layout (file prefill.toml): known keys: ")
    assert "hint: did you mean 'tp'?" in printed
    (files / "binary.toml").write_bytes(b"\xff\xfe")
    result = CliRunner().invoke(main, ["explain", "binary.toml", "prefill.toml"])
    assert (result.exit_code, "a file cannot be read (file binary.toml)" in result.output) == (1, True)


def test_names_and_stages_are_taken_from_the_file(files: Path) -> None:
    (files / "f.toml").write_text(f'instance = "left"\n{TINY}stages = [1, 1]')
    side = read_side(files / "f.toml", "prefill")
    assert (side.instance, side.layout.pp, side.page, side.window_page) == ("left", 2, 16, 16)


def test_presets_are_listed_with_their_source(files: Path) -> None:
    result = CliRunner().invoke(main, ["explain", "--presets"])
    assert result.exit_code == 0
    assert [line.partition(":")[0] for line in result.output.splitlines() if line[0] != " "] == list(presets())
    assert "  from: config.json of openai/gpt-oss-120b" in result.output


@pytest.mark.parametrize(("page", "count"), [("explain.md", 3), ("between-datacenters.md", 2)])
def test_the_document_shows_what_is_printed(
    files: Path, monkeypatch: pytest.MonkeyPatch, page: str, count: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = (ROOT / "docs" / page).read_text()
    tomls: list[Any] = re.findall(r"```toml\n# (\w+)\.toml\n(.*?)```", text, re.DOTALL)
    for name, content in tomls:
        Path(f"{name}.toml").write_text(content)
    shown = re.findall(r"```console\n\$ statelink (.*?)\n(.*?)```", text, re.DOTALL)
    assert len(shown) == count
    for command, output in shown:
        words, _, last = command.partition(" | tail -n ")
        lines = [line.rstrip() for line in CliRunner().invoke(main, words.split()).output.splitlines()]
        assert lines[-int(last or len(lines)) :] == output.splitlines()


def test_the_table_of_models_says_what_is_printed(files: Path) -> None:
    """Of prompts of two lengths, the bytes of each component; the time of the longer one; what is worth to move."""
    text = (ROOT / "docs" / "between-datacenters.md").read_text()
    rows: list[Any] = re.findall(r"^\| `([\w.-]+)` \| ([^|]+ \w*B) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 5
    options = ("--rate", "10gbit", "--rtt", "30ms", "--prefill-rate", "8000", "--tokens")
    for name, *said in rows:
        preset = f'preset = "{name}"'
        printed = [run(preset, preset, *given) for given in (("--tokens", "8192"), (*options, "131072"))]
        parts = [re.findall(r"^(\w+) {2,}\w+ {2,}([\d.]+ \w+) ", each, re.MULTILINE) for each in printed]
        short, long = (", ".join(f"{component} {nbytes}" for component, nbytes in each) for each in parts)
        (took,) = re.findall(r"at least (.*)\n", printed[1])
        (worth,) = re.findall(r"a second (?:from (.*) tokens on|for no prompt)\n", printed[1])
        assert said == [short, f"{long} | {took} | {worth or 'never'}"]


def test_the_models_of_the_document_are_read(files: Path) -> None:
    text = (ROOT / "docs" / "explain.md").read_text()
    folder = Path("models/Qwen3-Next-80B-A3B-Instruct")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED["qwen3-next-80b"]))
    for name, said in (
        ("mine", "4 ranks of prefill can serve 4 ranks"),
        ("hybrid", "1 rank of prefill can serve 1 rank"),
    ):
        (content,) = re.findall(rf"```toml\n# {name}\.toml\n(.*?)```", text, re.DOTALL)
        assert said in run(content, content)


def test_the_time_is_that_of_the_slowest_rank(files: Path) -> None:
    printed = run(TINY + "tp = 2", TINY, "--tokens", "1024", "--rate", "8gbit")
    assert "at 8 Gbit/s for each rank: at least 1.0 ms" in printed
    found = json.loads(run(TINY + "tp = 2", TINY, "--tokens", "1024", "--rate", "8gbit", "--json"))["estimate"]
    assert found == {
        "bytes": 2**20 / 1e9,
        "shared": 2**20 / 1e9,
        "consecutive": 2**20 / 1e9,
        "scattered": 2**20 / 1e9,
        "slowest": ["decode", 0],
    }
    assert json.loads(run(TINY + "tp = 2", TINY, "--json"))["estimate"] is None


def test_blocks_bound_the_time_if_they_are_small(files: Path) -> None:
    sides = [side(files, name, text) for name, text in (("prefill", TINY + "tp = 2"), ("decode", TINY))]
    report = explain(*sides, tokens=1024)
    took = estimate(report, 1e9, block_seconds=1e-6)
    assert took.bytes == 2**20 / 1e9
    assert took.scattered == took.consecutive == pytest.approx(4096e-6), "each rank of prefill posts 4,096 blocks"
    assert took.slowest == ("prefill", 0)
    with pytest.raises(ConfigError):
        estimate(report, 0.0)
    printed = run(TINY + "tp = 2", TINY, "--tokens", "1024", "--rate", "8gbit", "--backend", "tcp")
    cost = load_backend("tcp").capabilities.block_seconds
    assert ("a block:" in printed) is (cost > 0)


@pytest.mark.parametrize("option", [("--backend", "tcp"), ("--rtt", "30ms"), ("--prefill-rate", "100")], ids=str)
def test_what_estimates_a_time_needs_a_rate(files: Path, option: tuple[str, str]) -> None:
    assert f"{option[0]} needs --rate" in run(TINY, TINY, *option, expect=2)


@pytest.mark.parametrize("rate", ["10", "gbit", "-1gbit", "0gbit", "10 parsec", "nangbit", "1e99gbit"])
def test_a_rate_that_is_none_is_refused(files: Path, rate: str) -> None:
    assert "with one of the units kbit, mbit, gbit, tbit" in run(TINY, TINY, "--rate", rate, expect=2)


def test_a_round_trip_counts_and_a_shared_line_for_all(files: Path) -> None:
    both = TINY + "tp = 2"
    printed = run(both, both, "--tokens", "1024", "--rate", "8 Gbit/s", "--rtt", "30ms")
    apart, shared = 2**19 / 1e9 + 0.03, 2**20 / 1e9 + 0.03
    assert "at 8 Gbit/s for each rank and a round trip of 30.0 ms: at least" in printed
    assert "over one line that all ranks share: at least" in printed
    found = json.loads(run(both, both, "--tokens", "1024", "--rate", "8000mbit", "--rtt", "0.03s", "--json"))
    assert found["estimate"]["bytes"] == pytest.approx(apart)
    assert found["estimate"]["shared"] == pytest.approx(shared)


def test_from_which_prompt_on_moving_takes_less_time(files: Path) -> None:
    """TINY has 1 KiB for each token: 1 us at 8 Gbit/s."""
    sides = [side(files, name, TINY) for name in ("prefill", "decode")]
    page, each = 16, 1024e-9
    found = worth(*sides, tokens_per_second=10_000, bytes_per_second=1e9, round_trip=0.05)
    exact = 0.05 / (1e-4 - each)
    assert found.apart is not None
    assert found.apart == found.shared
    assert exact <= found.apart <= exact * 1.02 + page
    assert worth(*sides, tokens_per_second=10_000, bytes_per_second=1e6).apart is None, "a token takes 1 ms to move"
    assert worth(*sides, tokens_per_second=1, bytes_per_second=1e9).apart == 1
    printed = run(TINY, TINY, "--rate", "8gbit", "--rtt", "50ms", "--prefill-rate", "10000")
    assert f"moving takes less time than computing 10,000 tokens a second from {found.apart:,} tokens on" in printed
    assert "for no prompt" in run(TINY, TINY, "--rate", "8mbit", "--prefill-rate", "10000")


def side(folder: Path, name: str, text: str) -> Side:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return read_side(path, name)


def test_ribbons_fill_the_boxes_of_the_ranks_on_both_sides(files: Path) -> None:
    hybrid = 'preset = "qwen3-next-80b"\nlayout = { tp = %d }'
    report = explain(side(files, "prefill", hybrid % 4), side(files, "decode", hybrid % 2), tokens=4096)
    run(hybrid % 4, hybrid % 2, "--tokens", "4096", "--plot", "plan.svg")
    shapes = [
        (np.array(re.findall(r"[\d.]+", path), float).reshape(-1, 2), "C" in path, "fill: #404040" in style)
        for path, style in re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', Path("plan.svg").read_text())
    ]
    boxes = [(corners.min(axis=0), corners.max(axis=0)) for corners, _, grey in shapes if grey]
    middle = np.mean([low[0] for low, _ in boxes])
    # A ribbon's outline: two points of its upper edge, each on one side, then two of its lower one.
    ribbons = [points[[0, 3, 7, 4], 1].reshape(2, 2) for points, curved, _ in shapes if curved]
    tall = sum(high[1] - low[1] for low, high in boxes if low[0] < middle) / report.nbytes
    found: list[list[int]] = [[0, 0] for _ in ribbons]
    for at, ranks in enumerate((report.prefill, report.decode)):
        held = sorted((low[1], high[1]) for low, high in boxes if (low[0] > middle) == at)
        for rank, (top, bottom) in zip(ranks, held, strict=True):
            assert bottom - top == pytest.approx(rank.nbytes * tall, abs=0.01)
            edges = sorted((*ribbon[:, at], number) for number, ribbon in enumerate(ribbons))
            for upper, lower, number in edges:
                if top - 0.01 < upper < bottom - 0.01:
                    assert upper == pytest.approx(top, abs=0.01), "no gap, and no overlap"
                    top, found[number][at] = lower, rank.rank
            assert top == pytest.approx(bottom, abs=0.01)
    heights = [(ribbon[1] - ribbon[0]) / tall for ribbon in ribbons]
    assert all(left == pytest.approx(right, rel=0.01) for left, right in heights)
    drawn = sorted((*pair, round(height[0])) for pair, height in zip(found, heights, strict=True))
    expected = sorted((flow.source, flow.target, flow.nbytes) for flow in report.flows)
    assert len(expected) > 4
    assert drawn == [(source, target, pytest.approx(nbytes, rel=0.01)) for source, target, nbytes in expected]


def test_the_picture_names_ranks_components_and_small_blocks(files: Path) -> None:
    run(TINY + "tp = 2", TINY, "--tokens", "1024", "--plot", "plan.svg")
    drawn = Path("plan.svg").read_text()
    for text in ("tiny: 1,024 tokens, 1.0 MiB", "1 (tp1)  512.0 KiB", "0  1.0 MiB", "kv  1.0 MiB", "small blocks"):
        assert f">{text}<" in drawn, text
    run(TINY, TINY, "--tokens", "1024", "--plot", "plan.png")
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    run(TINY, TINY, "--tokens", "1024", "--plot", "whole.svg")
    assert ">small blocks<" not in Path("whole.svg").read_text()
    assert "cannot be written" in run(TINY, TINY, "--plot", "no/folder.svg", expect=1)
    Path("full.svg").symlink_to("/dev/full")
    assert "full.svg cannot be written: No space left" in run(TINY, TINY, "--plot", "full.svg", expect=1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_width_that_fits_no_heads_names_the_file_and_its_key(files: Path, side: str) -> None:
    texts = {"prefill": TINY, "decode": TINY, side: f"{TINY}tp = 3"}
    said = run(texts["prefill"], texts["decode"], expect=1)
    assert "2 heads" in said
    assert f"instance {side}, file {side}.toml" in said
    assert "hint: 'tp' in [layout] is 3: choose one that divides these numbers, or one that they divide" in said
