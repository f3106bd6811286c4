"""`statelink.testing.process`: a process answers with what a function returns or raises, and says how it ended."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import pytest

from statelink.errors import StatelinkError
from statelink.testing.process import Process, ProcessError

if TYPE_CHECKING:
    from pathlib import Path


class Own:
    """Lives in the process.

    Args:
        said: File that says that it was closed.
    """

    def __init__(self, said: Path) -> None:
        self.said, self.many = said, 0

    def count(self, many: int = 1) -> tuple[int, int]:
        self.many += many
        return os.getpid(), self.many

    def close(self) -> None:
        self.said.write_text("closed")


class AwkwardError(Exception):
    """One that pickle does not carry over."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def fail(own: Own, kind: str) -> NoReturn:
    del own
    if kind == "link":
        raise StatelinkError("it failed", cause="on purpose", hint="none", code="mine")
    raise AwkwardError("a", "b") if kind == "awkward" else KeyError(kind)


def exit_with(own: Own, status: int) -> NoReturn:
    print("my last words", own.many, flush=True)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def rest(own: Own, seconds: float) -> None:
    del own
    time.sleep(seconds)


def interrupt(own: Own) -> str:
    del own
    os.kill(os.getpid(), signal.SIGINT)
    return "went on"


def unmade() -> Own:
    raise StatelinkError("it cannot be made", code="mine")


def test_it_answers_and_ends_by_itself(tmp_path: Path) -> None:
    with Process(partial(Own, tmp_path / "said"), environment={"HOME": None}) as process:
        assert process(Own.count) == (process.popen.pid, 1)
        process.start(Own.count, many=2)
        assert not process.idle
        assert process.returns(30)
        process.start(Own.count, many=3)
        with pytest.raises(AssertionError, match="still to be taken"):
            process(Own.count)
        assert [process.result()[1], process.result()[1]] == [3, 6]
        with pytest.raises(StatelinkError, match="it failed: on purpose") as failed:
            process(fail, "link")
        assert (failed.value.code, failed.value.hint) == ("mine", "none")
        assert "in fail" in str(failed.value.__cause__)
        with pytest.raises(KeyError, match="other"):
            process(fail, "other")
        with pytest.raises(RuntimeError, match="AwkwardError: ab"):
            process(fail, "awkward")
        assert process(interrupt) == "went on"
        process.stop()
        assert process.leave() == 0
        assert not process.alive
        assert (tmp_path / "said").read_text() == "closed"


def test_an_object_that_cannot_be_made_is_what_each_call_says() -> None:
    with Process(unmade) as process:
        for _ in range(2):
            with pytest.raises(StatelinkError, match="it cannot be made"):
                process(Own.count)
        assert process.leave() == 0


@pytest.mark.parametrize(("status", "how"), [(3, "exit status 3"), (-9, "signal SIGKILL")])
def test_one_that_ends_says_how(tmp_path: Path, status: int, how: str) -> None:
    said = f"the other has ended: {how}; it printed:\nmy last words 0"
    with Process(partial(Own, tmp_path / "said"), name="the other") as process:
        for ask in (True, False):
            with pytest.raises(ProcessError, match=said) as ended:
                process(exit_with, status) if ask else process(Own.count)
            assert (ended.value.code, ended.value.status) == ("process.ended", status)


def test_one_that_does_not_answer_is_aborted_and_says_where_it_was(tmp_path: Path) -> None:
    with Process(partial(Own, tmp_path / "said"), patience=0.1) as process:
        with pytest.raises(ProcessError, match=r"did not answer within 0\.1 s: it was aborted") as hung:
            process(rest, 600)
        assert (hung.value.code, hung.value.status) == ("process.silent", None)
        assert not process.alive
    with Process(partial(Own, tmp_path / "said")) as process:
        process(Own.count)
        process.start(rest, 600)
        assert not process.returns(1.2)
        with pytest.raises(ProcessError, match=r"(?s)did not end within 0\.1 s.*in rest"):
            process.leave(0.1)
