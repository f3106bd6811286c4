"""Kernels of speculative decoding: the tree of drafted tokens, which of them are right, and where their pages are."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["after_imports"]


def after_imports() -> None:
    """Put the kernels where SGLang looks for them, and let it use its backend for newer CPUs.

    Some releases have a kernel's name in several modules, so it is changed in each that has it.
    """
    import importlib
    import sys

    import sglang.kernels.ops.speculative.cache_locs
    import sglang.kernels.ops.speculative.eagle
    import sglang.kernels.ops.speculative.spec_tree
    import sglang.srt.arg_groups.overrides as overrides
    import sglang.srt.arg_groups.speculative_hook as arguments
    import sglang.srt.managers.overlap_utils as overlap
    import sglang.srt.mem_cache.allocation  # noqa: F401 - it has kernels' names, as the first three have

    kernels = {
        "assign_draft_cache_locs_contiguous_cpu": assign_draft_cache_locs,
        "assign_extend_cache_locs_cpu": assign_extend_cache_locs,
        "assign_req_to_token_pool_cpu": assign_req_to_token_pool,
        "build_draft_decode_metadata_cpu": build_draft_decode_metadata,
        "build_tree_kernel_efficient_cpu": build_tree,
        "fill_accept_out_cache_loc_cpu": fill_accept_out_cache_loc,
        "fill_bonus_tokens_cpu": fill_bonus_tokens,
        "sgl_build_tree_kernel_efficient_cpu": build_tree,
        "sgl_verify_tree_greedy_cpu": verify_tree_greedy,
        "verify_tree_greedy_cpu": verify_tree_greedy,
    }
    vars(importlib.import_module("sgl_kernel")).update(kernels)
    import sglang.srt.speculative.draft_utils as drafts

    for name, module in list(sys.modules.items()):
        if name.startswith("sglang."):
            vars(module).update({each: kernels[each] for each in kernels.keys() & vars(module).keys()})
    overlap.gather_spec_extras = gather_spec_extras
    drafts.cpu_has_amx_support = lambda: True
    # On a CPU, SGLang switches the overlap schedule off for want of these kernels. A test does so by an option.
    vars(arguments)["_disable_overlap_schedule_for_cpu"] = lambda server_args: None
    real = overrides.get_platform

    class WithNewerCpu:
        """SGLang's platform, with the instructions that its backend for newer CPUs needs."""

        has_amx = True

        def __getattr__(self, name: str) -> Any:
            return getattr(real(), name)

    anything: Any = overrides
    anything.get_platform = lambda: WithNewerCpu()
    cpu: Any = torch.cpu
    cpu.empty_cache = lambda: None
    card: Any = torch.cuda
    card.synchronize = card.empty_cache = lambda *given, **named: None
    card.get_device_capability = lambda *given, **named: (9, 0)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None  # SGLang 0.5.21 says so of tensors that no device's allocator has


def build_draft_decode_metadata(
    req_to_token: torch.Tensor, pool: torch.Tensor, seq_lens: torch.Tensor, topk: int, steps: int, width: int
) -> torch.Tensor:
    """Slots that each drafted branch sees: those of its sequence, and then its own for the next steps."""
    out = torch.zeros(len(seq_lens) * topk, width, dtype=req_to_token.dtype)
    for number in range(len(seq_lens)):
        length, row = int(seq_lens[number]), req_to_token[int(pool[number])]
        for branch in range(topk):
            out[number * topk + branch, :length] = row[:length]
            own = row[length + branch * steps : length + (branch + 1) * steps]
            out[number * topk + branch, length : length + steps] = own
    return out


def assign_req_to_token_pool(
    pool: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    *more: Any,
) -> None:
    """Write the slots of each sequence's new tokens into its row."""
    at = 0
    for number in range(len(pool)):
        first, last = int(start[number]), int(end[number])
        req_to_token[int(pool[number]), first:last] = slots[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def build_tree(
    parent_list: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    count: int,
    mode: Any,
) -> None:
    """The tree of drafted tokens of each sequence, as lists of first children and next siblings, and its mask."""
    batch = len(seq_lens)
    assert int(mode) != 0
    assert tree_mask.numel() == batch * count * count, "the mask is of the drafted tokens alone"
    masks, places = tree_mask.view(batch, count, count), positions.view(batch, count)
    children, siblings = retrieve_next_token.view(batch, count), retrieve_next_sibling.view(batch, count)
    retrieve_index.view(-1)[:] = torch.arange(batch * count)
    for number in range(batch):
        parents = [-1, *(_parent(parent_list[number], selected[number], node, topk) for node in range(1, count))]
        children[number].fill_(-1)
        siblings[number].fill_(-1)
        for node in range(count - 1, 0, -1):
            siblings[number, node] = children[number, parents[node]]
            children[number, parents[node]] = node
        masks[number].zero_()
        for node in range(count):
            up, height = node, 0
            masks[number, node, 0] = True
            while up:
                masks[number, node, up] = True
                up, height = parents[up], height + 1
            places[number, node] = int(seq_lens[number]) + height


def _parent(parent_list: torch.Tensor, selected: torch.Tensor, node: int, topk: int) -> int:
    """The node from which a drafted token was drawn; 0 for the last token that is sure."""
    row = int(selected[node - 1]) // topk
    if not row:
        return 0
    return 1 + selected.tolist().index(int(parent_list[row]))


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Go down the tree for as long as a drafted token is the one that the model itself says.

    SGLang spells the arguments so.
    """
    batch, count = candidates.shape
    said = target_predict.view(batch, count)
    for number in range(batch):
        node = accepted = 0
        accept_index[number, 0] = retrive_index[number, 0]
        while accepted + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[number, node])
            while child != -1 and int(candidates[number, child]) != int(said[number, node]):
                child = int(retrive_next_sibling[number, child])
            if child == -1:
                break
            predicts[int(retrive_index[number, node])] = said[number, node]
            accepted += 1
            accept_index[number, accepted] = retrive_index[number, child]
            node = child
        accept_token_num[number] = accepted
        predicts[int(retrive_index[number, node])] = said[number, node]


def assign_draft_cache_locs(
    pool: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    width: int,
    topk: int,
    steps: int,
) -> None:
    """The slots of the tokens that will be drafted, in the order of sequences."""
    count = topk * steps
    for number in range(len(seq_lens)):
        first = int(seq_lens[number])
        out[number * count : (number + 1) * count] = req_to_token[int(pool[number]), first : first + count].to(
            out.dtype
        )


def assign_extend_cache_locs(
    pool: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out: torch.Tensor,
    *more: Any,
) -> None:
    """The slots of the tokens from ``start`` to ``end`` of each sequence."""
    at = 0
    for number in range(len(pool)):
        first, last = int(start[number]), int(end[number])
        out[at : at + last - first] = req_to_token[int(pool[number]), first:last].to(out.dtype)
        at += last - first


def fill_bonus_tokens(accepted: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, stride: int) -> None:
    """The last accepted token of each sequence."""
    flat = accepted.reshape(-1)
    for number in range(len(lengths)):
        out[number] = flat[stride * number + int(lengths[number]) - 1]


def gather_spec_extras(
    indices: torch.Tensor, topk_p: torch.Tensor, topk_index: torch.Tensor, tokens: torch.Tensor, hidden: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """What the last forward left for some requests, from the buffers of all."""
    return topk_p[indices], topk_index[indices], tokens[indices], None if hidden is None else hidden[indices]


def fill_accept_out_cache_loc(accepted: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """The slots of the accepted tokens, one after the other."""
    flat = accepted.reshape(-1)
    chosen = flat[flat > -1].long()
    out[: len(chosen)] = slots[chosen]
