"""One vLLM engine in this process, its workers included, driven by lines of JSON. Run as a script by `engines.Engine`.

What comes in: ``{"add": [{...}]}``, ``{"abort": [...]}``, ``{"ask": n}``, ``{"blind": true}``, ``{"whole": true}``.
What goes out: a line for each request that ended, and an answer to each question: whether anything is left to do, and
how many blocks are free.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import sys
import threading
import time
from collections import deque
from typing import Any


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    commands: queue.Queue[Any] = queue.Queue()
    # A worker that is forked closes its standard input, and would wait for the thread that reads it.
    given, sys.stdin = sys.stdin, io.StringIO()

    def listen() -> None:
        for line in given:
            commands.put(json.loads(line))
        os._exit(0)  # whoever started this process has ended

    threading.Thread(target=listen, daemon=True).start()

    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    import statelink
    from statelink.backend import hookimpl
    from statelink.registry import plugin_manager

    chunks: list[int] = []

    class Ended:
        @hookimpl
        def statelink_room_ended(self, report: Any) -> None:
            chunks.append(report.chunks)

    plugin_manager().register(Ended())
    content_of = statelink.content_of

    cores = os.sched_getaffinity(0)
    engine: Any = LLM(**json.loads(sys.argv[1])).llm_engine
    if os.sched_getaffinity(0) != cores:
        # vLLM's own NIXL connector binds this thread, and those that it starts, to one core, the same for every engine.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), cores)
    core = engine.engine_core.engine_core

    preempted: list[str] = []
    preempt = core.scheduler._preempt_request

    def count(request: Any, *given: Any, **more: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *given, **more)

    core.scheduler._preempt_request = count

    drafts = [0, 0]
    count_drafts = core.scheduler.make_spec_decoding_stats

    def tell_drafts(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *given: Any, **more: Any) -> Any:
        drafts[0] += num_draft_tokens
        drafts[1] += num_accepted_tokens
        return count_drafts(stats, num_draft_tokens, num_accepted_tokens, *given, **more)

    core.scheduler.make_spec_decoding_stats = tell_drafts

    drafted: list[list[int]] = []
    worker: Any = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    speculator = getattr(getattr(worker, "model_runner", None), "speculator", None)
    if speculator is not None:
        propose = speculator.propose

        def note_drafts(*given: Any, **more: Any) -> Any:
            made = propose(*given, **more)
            drafted.append(made[0].tolist())
            return made

        speculator.propose = note_drafts

    executed: list[bool] = []
    post_step = core.post_step

    def note(model_executed: bool) -> None:
        executed[:] = [model_executed]
        post_step(model_executed)

    core.post_step = note

    bound = 0.0
    forwards = deque[tuple[float, float]](maxlen=64)
    watched: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
    if watched is not None:
        bind, start, save = watched.bind_connector_metadata, watched.start_load_kv, watched.save_kv_layer

        def note_begin(metadata: Any) -> None:
            nonlocal bound
            bind(metadata)
            bound = time.perf_counter()

        def note_end(context: Any, **more: Any) -> None:
            if context.attn_metadata is not None:  # a model has run
                forwards.append((bound, time.perf_counter()))
            start(context, **more)

        watched.bind_connector_metadata, watched.start_load_kv = note_begin, note_end

    began: dict[str, float] = {}
    loaded: dict[str, float] = {}
    first: dict[str, float] = {}

    def obey(command: Any) -> None:
        if "add" in command:
            for given in command["add"]:
                began[given["id"]] = time.perf_counter()
                extra = {"kv_transfer_params": given["params"]} if given["params"] else None
                params = SamplingParams(
                    max_tokens=given["count"],
                    temperature=0,
                    detokenize=False,
                    ignore_eos=True,
                    extra_args=extra,
                    logprobs=0 if given["logprobs"] else None,
                )
                engine.add_request(given["id"], TokensPrompt(prompt_token_ids=given["prompt"]), params)
        elif "blind" in command:
            statelink.content_of = (lambda *_, **__: b"any request") if command["blind"] else content_of
        elif "whole" in command:
            watched.save_kv_layer = (lambda *_, **__: None) if command["whole"] else save
        elif "abort" in command:
            engine.abort_request(command["abort"])
        else:
            pool = core.scheduler.kv_cache_manager.block_pool
            left = core.scheduler.has_requests() or engine.has_unfinished_requests()
            # With more than one rank, the workers are processes of their own. vLLM's own connectors have no link.
            worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
            link = None if worker is None else worker.link
            seen: Any = {"totals": {"rooms": {}, "bytes": {}}, "rooms": {}} if link is None else link.snapshot()
            say(
                answer=command["ask"],
                busy=left,
                free=pool.get_num_free_blocks(),
                preempted=len(preempted),
                drafts=drafts,
                lengths={each.request_id.rsplit("-", 1)[0]: each.num_tokens for each in core.scheduler.running},
                waiting=seen["rooms"].get("waiting", 0),
                rooms=seen["totals"]["rooms"],
                bytes=seen["totals"]["bytes"],
                chunks=chunks,
                forwards=list(forwards),
                drafted=drafted,
            )
            drafted.clear()

    pool = core.scheduler.kv_cache_manager.block_pool
    groups = [type(each.kv_cache_spec).__name__ for each in core.scheduler.kv_cache_config.kv_cache_groups]
    say(ready=True, free=pool.get_num_free_blocks(), groups=groups)
    while True:
        working = core.scheduler.has_requests() or engine.has_unfinished_requests()
        try:
            command = commands.get(block=not working)
        except queue.Empty:
            pass
        else:
            obey(command)
            continue
        if working:
            made = engine.step()
            now = time.perf_counter()
            # As vLLM's engine core does in its own process, so that other threads get the interpreter.
            if executed == [False] and core.scheduler.has_requests():
                time.sleep(0.001)
            for name in core.scheduler.finished_recving_kv_req_ids:
                loaded.setdefault(name.rsplit("-", 1)[0], now)
            for each in made:
                end, given = each.outputs[0], each.request_id.rsplit("-", 1)[0]
                if end.token_ids:
                    first.setdefault(given, now)
                if each.finished:
                    say(
                        ended=each.request_id,
                        tokens=list(end.token_ids),
                        logprobs=[
                            likely[token].logprob
                            for likely, token in zip(end.logprobs or (), end.token_ids, strict=bool(end.logprobs))
                        ],
                        why=end.finish_reason,
                        params=each.kv_transfer_params,
                        cached=each.num_cached_tokens,
                        began=began[given],
                        loaded=loaded.pop(given, None),
                        first=first.pop(given, None),
                        ended_at=now,
                    )


if __name__ == "__main__":
    main()
