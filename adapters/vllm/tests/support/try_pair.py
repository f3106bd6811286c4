"""``make try-vllm``: a tiny pair on a CPU, asked as a router asks it, and one server. Prints an answer of each."""

from __future__ import annotations

import try_it
from engine_processes import running

from .engines import PREFILL
from .models import add_tokenizer, make_llama
from .servers import ServerPair

PAGE, CURL = "vllm.md", "--kv-connector nixl"
TEXTS = ["--no-skip-tokenizer-init"]


def main() -> None:
    """Start them, ask, print, and end them. This hands prefill's answer to decode, as a router does."""
    with try_it.folder() as folder:
        model = add_tokenizer(make_llama(folder / "model"))
        body = try_it.request(PAGE, CURL, str(model))
        print("starting a prefill server and a decode server, which takes a minute …", flush=True)
        config = {"backend": "tcp", "verify": "digest"}
        with running(ServerPair(folder, model, config, prefill=TEXTS, decode=TEXTS)) as pair:
            asked = {**body, "max_tokens": 1, "kv_transfer_params": dict(PREFILL)}
            said = pair.prefill.ask("/v1/completions", asked).body["kv_transfer_params"]
            answers = [
                pair.decode.ask("/v1/completions", {**body, "kv_transfer_params": said}),
                pair.prefill.ask("/v1/completions", body),  # without a transfer, it is an ordinary server
            ]
            pair.decode.wait_logged("KV Transfer metrics: ")
            print(*(line for line in pair.decode.logged().splitlines() if "KV Transfer metrics: " in line), sep="\n")
            try_it.report(*(answer.body["choices"][0]["text"] for answer in answers))


if __name__ == "__main__":
    main()
