"""What the part on the conformance kit says of a clause that failed."""

from __future__ import annotations

from tools.card.reasons import telling


def test_the_cause_is_said_wherever_it_stands_in_the_log() -> None:
    """A process that ends prints its log first, then the cause, and then long stacks of Python."""
    log = "\n".join(f"[12.5] [host:1 :0] ucp_worker.c:1997 UCX  INFO  cfg#{number}" for number in range(30))
    cause = "[host:1 :7] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout"
    stacks = "\n".join(f'  File "threading.py", line {number} in run' for number in range(30))
    said = telling(f"the process ended with status -6\n{log}\n{cause}\n{stacks}")
    assert said == f"the process ended with status -6\n{cause}"


def test_a_reason_without_a_cause_is_said_from_its_beginning() -> None:
    assert telling("2 bytes differ\nat 17") == "2 bytes differ\nat 17"
    assert telling("") == ""
    assert len(telling("error\n" * 1000)) == len(telling("x" * 1000)) == 600
