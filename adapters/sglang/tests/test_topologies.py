"""Two real SGLang servers in other shapes: pages of one token, a sliding window, and unequal tensor parallelism."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.models import generate, make_windowed
from support.servers import Pair, Server, free_port, running

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest"}
"""With digests, a request succeeds only if the same bytes are on both sides."""


def test_pages_of_one_token(llama: Path, tmp_path: Path) -> None:
    with running(Pair(tmp_path, llama, CONFIG, common=["--page-size", "1", "--chunked-prefill-size", "32"])) as pair:
        for length in (1, 40, 100):
            prompt = list(range(5, 5 + length))
            assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)


def test_a_sliding_window(tmp_path: Path) -> None:
    model = make_windowed(tmp_path / "windowed", window=32)
    with running(Pair(tmp_path, model, CONFIG, common=["--page-size", "16", "--chunked-prefill-size", "32"])) as pair:
        prompt = list(range(5, 29))
        assert pair.generate(prompt)[1].tokens == generate(model, prompt, 8)
        # Beyond the window SGLang's forward on a CPU has other tokens than transformers: only the digests count there.
        for length in (40, 100):
            assert pair.generate(list(range(5, 5 + length)))[1].status == 200
        assert "moves kv, swa, aux of this" in pair.decode.logged()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_unequal_tensor_parallelism(llama: Path, tmp_path: Path, prefill: int, decode: int) -> None:
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with running(
        Pair(
            tmp_path,
            llama,
            CONFIG,
            common=["--page-size", "16", "--chunked-prefill-size", "32"],
            prefill=["--tp", str(prefill)],
            decode=["--tp", str(decode)],
            environment=bind,
        )
    ) as pair:
        for length in (40, 100):
            prompt = list(range(5, 5 + length))
            assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"backend": "tpc"}, "no backend named 'tpc'"),
        ({"backends": "tcp"}, "unknown key 'backends'"),
    ],
)
def test_a_wrong_configuration_ends_the_server_with_the_reason(
    llama: Path, tmp_path: Path, config: dict[str, str], said: str
) -> None:
    arguments = ["--model-path", str(llama), "--disaggregation-mode", "decode", "--max-total-tokens", "2048"]
    arguments += ["--disaggregation-transfer-backend", "statelink"]
    arguments += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    server = Server("wrong", tmp_path, arguments, {"STATELINK_SGLANG_CONFIG": json.dumps(config)})
    try:
        assert said in server.wait_end()
    finally:
        server.kill()


def test_a_bootstrap_port_in_use_is_said(llama: Path, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ["--model-path", str(llama), "--disaggregation-mode", "prefill", "--max-total-tokens", "2048"]
        arguments += ["--disaggregation-transfer-backend", "statelink", "--disaggregation-bootstrap-port", port]
        server = Server("taken", tmp_path, arguments, {"STATELINK_SGLANG_CONFIG": '{"backend": "tcp"}'})
        try:
            server.wait_logged("choose another --disaggregation-bootstrap-port", 420)
        finally:
            server.kill()
