"""What vLLM does around a draft model on a device: it takes drafts that the model would have taken, and goes on there.

The oracle is vLLM itself: the tokens are those of the same model without drafts.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["define"]


def take(out: Any, ends: Any, drafts: Any, targets: Any, bonus: Any, greedy: Any, most: int) -> None:
    """Per request the targets up to the first draft that differs; the bonus behind them, if none does."""
    first = 0
    for row, last in enumerate(ends.tolist()):
        if greedy is None or bool(greedy[row]):
            for place in range(last - first):
                out[row, place] = targets[first + place]
                if drafts[first + place] != targets[first + place]:
                    break
            else:
                out[row, last - first] = bonus.flatten()[row]
        first = last


def expand(out: Any, given: Any, ends: Any, old: Any, new: Any) -> None:
    """A value of each request, for each of its drafts."""
    first = 0
    for row, last in enumerate(ends.tolist()):
        out[first:last] = new if given[row] == old else given[row]
        first = last


def inputs(ends: Any, valid: Any, starts: Any, at: Any, rejected: Any, count: int) -> None:
    """Where in a request's tokens the draft model goes on, and how many drafts were not taken."""
    drafts = torch.diff(ends, prepend=ends.new_zeros(1))[:count]
    lost = torch.where(drafts > 0, drafts + 1 - valid[:count], torch.zeros_like(drafts))
    at[:count] = (starts[1 : count + 1] - 1 - lost).to(at.dtype)
    rejected[:count] = lost.to(rejected.dtype)


def following(
    sampled: Any, discarded: Any, backup: Any, after: Any, valid: Any, vocabulary: int, width: int, count: int
) -> None:
    """The last token that was taken of each request, and how many were."""
    for row in range(count):
        taken = [] if bool(discarded[row]) else [each for each in sampled[row].tolist() if 0 <= each < vocabulary]
        after[row], valid[row] = (taken[-1] if taken else backup[row]), len(taken)


def slots(
    positions: Any, table: Any, lengths: Any, out: Any, out_slots: Any, page: int, longest: int, null: int
) -> None:
    """The place of each request's next draft."""
    count = positions.shape[0]
    after = positions + 1
    over = after >= longest
    after = torch.where(over, torch.zeros_like(after), after)
    block = (after // page).clamp(max=table.shape[1] - 1)
    slot = table[torch.arange(count), block].long() * page + after % page
    out_slots[:count] = torch.where(over, torch.full_like(slot, null), slot).to(out_slots.dtype)
    out_slots[count:] = null
    out[:count] = after.to(out.dtype)
    lengths[:count] = torch.where(over, torch.ones_like(lengths[:count]), lengths[:count] + 1).clamp(max=longest)


def spread(
    tokens: Any,
    positions: Any,
    after: Any,
    out: Any,
    out_positions: Any,
    out_rejected: Any,
    out_masked: Any,
    out_new: Any,
    out_hidden: Any,
    starts: Any,
    ends: Any,
    padding: int,
    parallel: int,
    total: int,
    added: int,
    shifted: bool,
) -> None:
    """Copies requests' tokens to where their drafts follow: one token is added to each, or several in parallel."""
    for row in range(ends.shape[0]):
        first, last, behind = int(starts[row]), int(ends[row]), int(starts[row + 1])
        if shifted:
            valid, offset, base = last - first, 1, first + row * (added - 1)
        else:
            valid, offset, base = last - first + 1, 0, first + row * added
        for place in range(valid + added + behind - last - 1):
            lost, masked = place >= valid + added, valid < place < valid + added
            if place < valid:
                token = tokens[min(first + offset + place, total - 1)]
            else:
                token = after[row] if place == valid else parallel if masked else padding
            out[base + place] = token
            out_positions[base + place] = 0 if lost else int(positions[first]) + place
            out_rejected[base + place], out_masked[base + place] = lost, masked
            if valid <= place < valid + added:
                out_new[row * added + place - valid] = base + place
        if shifted:
            for place in range(behind - first):
                out_hidden[first + place] = base + place


def define(kernel: Any) -> None:
    """Register them."""
    kernel(
        "rejection_greedy_sample_kernel_impl(Tensor(a!) out, Tensor ends, Tensor drafts, Tensor targets, Tensor bonus, "
        "Tensor? greedy, int most) -> ()",
        take,
    )
    kernel("expand_kernel_impl(Tensor(a!) out, Tensor given, Tensor ends, Scalar old, Scalar new) -> ()", expand)
    kernel(
        "eagle_prepare_inputs_padded_kernel_impl(Tensor ends, Tensor valid, Tensor starts, Tensor(a!) at, "
        "Tensor(b!) rejected, int count) -> ()",
        inputs,
    )
    kernel(
        "eagle_prepare_next_token_padded_kernel_impl(Tensor sampled, Tensor discarded, Tensor backup, "
        "Tensor(a!) after, Tensor(b!) valid, int vocabulary, int width, int count) -> ()",
        following,
    )
    kernel(
        "eagle_step_slot_mapping_metadata_kernel_impl(Tensor positions, Tensor table, Tensor(a!) lengths, "
        "Tensor(b!) out, Tensor(c!) out_slots, int page, int longest, int null) -> ()",
        slots,
    )
    kernel(
        "copy_and_expand_eagle_inputs_kernel_impl(Tensor tokens, Tensor positions, Tensor after, Tensor(a!) out, "
        "Tensor(b!) out_positions, Tensor(c!) out_rejected, Tensor(d!) out_masked, Tensor(e!) out_new, "
        "Tensor(f!) out_hidden, Tensor starts, Tensor ends, int padding, int parallel, int total, int added, "
        "bool shifted) -> ()",
        spread,
    )
