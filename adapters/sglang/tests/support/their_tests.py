"""SGLang's own tests of prefill/decode disaggregation, with the tiny model and Statelink. Run by `test_their_tests.py`.

    python -m unittest support.their_tests.CLASS

SGLang ships them in its wheel, with fixtures that start two servers and its mini balancer. Replaced here: the model,
the servers' options (it is a CPU), and ports. `STATELINK_TINY_MODEL` names the model's folder.
"""

from __future__ import annotations

import os
import socket
from typing import Any, ClassVar

from sglang.test.kits.pd_parity_kit import PDLogprobParityMixin
from sglang.test.manual.disaggregation import test_disaggregation_chunked_prefill_abort as abort
from sglang.test.manual.disaggregation import test_disaggregation_peer_liveness_abort as liveness
from sglang.test.server_fixtures import disaggregation_fixture as fixture

MODEL = os.environ["STATELINK_TINY_MODEL"]
CPU = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-overlap-schedule"),
    *("--skip-server-warmup", "--page-size", "16", "--max-total-tokens", "98304"),
]
DECODE = ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
OFFSETS = (0, 100, 200, 300, 400, 500)
"""The fixture's ports lie so far from the first."""
SHORTER = 8
"""How much shorter the prompt is whose requests are to end in two minutes, on two cores."""
FAILED_POLLS = 0.0005
"""The share of polls that fail. SGLang's test has one in eight. A scheduler on a CPU polls a request thousands of times
while its prompt is computed, so that with one in eight no request would ever end well."""


def _free_base() -> int:
    """A port of which the fixture's others are free, too."""
    for base in range(21000, 31000, 7):
        try:
            for offset in OFFSETS:
                with socket.socket() as found:
                    found.bind(("127.0.0.1", base + offset))
        except OSError:
            continue
        return base
    raise RuntimeError("no ports are free")


class _OnCpu(fixture.PDDisaggregationServerBase):  # type: ignore[misc]
    """The fixture, with the tiny model on a CPU."""

    decode_base_gpu_id = 0

    @classmethod
    def setUpClass(cls) -> None:
        fixture.DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{_free_base()}"
        super().setUpClass()
        cls.model = MODEL

    @classmethod
    def start_decode(cls) -> None:
        cls.extra_decode_args = [*cls.extra_decode_args, *DECODE]
        super().start_decode()


class Parity(PDLogprobParityMixin, _OnCpu):  # type: ignore[misc]
    """Logprobs of the pair are those of one server, also with a prefix that prefill has in its cache."""

    extra_prefill_args: ClassVar = [*CPU, "--chunked-prefill-size", "64"]
    extra_decode_args: ClassVar = extra_prefill_args
    baseline_args: ClassVar = extra_prefill_args
    parity_prompts: ClassVar = [
        [1] + [100 + i % 400 for i in range(256)],
        [1] + [4 + (7 * i) % 500 for i in range(99)],
        [1, 5, 9],
    ]
    parity_logprob_delta = 0.001
    parity_cached_prefix_min_prompt_tokens = 64
    parity_max_new_tokens = 8


def _fits(module: Any, *sizes: str) -> None:
    """Let a module of SGLang's tests use the tiny model on a CPU."""
    module.PD_EXTRA_ARGS = [*CPU, *sizes]
    for name in ("DEFAULT_SMALL_MODEL_NAME_FOR_TEST", "DEFAULT_MODEL_NAME_FOR_TEST"):
        if hasattr(module, name):
            setattr(module, name, MODEL)


_fits(abort, "--max-running-requests", "4", "--chunked-prefill-size", "64")


class ChunkedPrefillAbort(abort.TestDisaggChunkedPrefillAbort, _OnCpu):  # type: ignore[misc]
    """A request is aborted by its id while its prompt is computed."""


_fits(liveness, "--max-running-requests", "4", "--chunked-prefill-size", "128")
liveness.FAILURE_PROB = FAILED_POLLS
liveness.PD_LONG_PROMPT = liveness.PD_LONG_PROMPT[: len(liveness.PD_LONG_PROMPT) // SHORTER]


class PeerLiveness(liveness.TestDisaggregationPeerLivenessAbort, _OnCpu):  # type: ignore[misc]
    """SGLang fails polls at random on both sides: requests are aborted, and nothing hangs or is left behind."""


class CleanRecovery(liveness.TestDisaggregationPeerLivenessCleanRecovery, _OnCpu):  # type: ignore[misc]
    """A request succeeds, and another one is aborted by its id on both servers."""
