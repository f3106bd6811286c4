"""What the adapter refuses at the start of a server: what it cannot do, and what no test with an engine reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from statelink.errors import ConfigError

from ._behaviour import BEHAVIOUR
from ._options import ALLOWED, WHERE

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["check_server"]


def check_server(config: Any, options: Options) -> None:
    """Refuse what does not work, by name.

    Args:
        config: vLLM's ``VllmConfig``.
        options: What the operator configured.

    Raises:
        ConfigError: Names all that must be changed.
    """
    refused = [*_impossible(config, sends=options.link.role != "decode"), *_untested(config, options.allow)]
    if refused:
        raise ConfigError(
            "this vLLM server cannot use StatelinkConnector",
            cause="; ".join(refused),
            hint="change these options, or use another kv_connector",
        )


def _impossible(config: Any, *, sends: bool) -> Iterator[str]:
    size = config.parallel_config.prefill_context_parallel_size
    if size > 1:
        yield f"prefill_context_parallel_size is {size}, and only 1 is supported"
    if sends and config.scheduler_config.policy == "priority" and config.cache_config.enable_prefix_caching:
        yield (
            "--scheduling-policy is priority, and prefix caching is on: vLLM then keeps blocks for other requests that "
            "a preempted step has not computed, and prefill would send them; add --no-enable-prefix-caching, or leave "
            "the policy at fcfs"
        )
    if config.model_config.enable_sleep_mode and not BEHAVIOUR.sleeps:
        yield (
            "--enable-sleep-mode: this release of vLLM takes memory away from connectors without telling them; "
            "vLLM 0.33 tells them"
        )
    multimodal = config.model_config.multimodal_config
    if multimodal and multimodal.mm_processor_cache_gb == 0 and not config.cache_config.enable_prefix_caching:
        yield (
            "--mm-processor-cache-gb is 0 and prefix caching is off, so that vLLM makes no hashes of images, and "
            "nobody can say which image a request has: change one of the two"
        )


def _untested(config: Any, allow: frozenset[str]) -> Iterator[str]:
    found = {"cuda": config.device_config.device_type != "cpu"}
    for word, there in found.items():
        if there and word not in allow:
            yield (
                f"{ALLOWED[word]} was not tested in an engine with Statelink; "
                f'{{"vllm": {{"allow": ["{word}"]}}}} in {WHERE} allows it'
            )
