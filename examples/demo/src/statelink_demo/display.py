"""What the user sees while the demo works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

__all__ = ["Bars", "Display", "Lines", "Silent"]


class Display(Protocol):
    """How each process and the transfer stand. A context manager."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, row: str, state: str, done: int = 0, total: int = 0) -> None:
        """Show what `row` is at; `total` is 0 while there is nothing to count."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, row: str, state: str, done: int = 0, total: int = 0) -> None:
        """See `Display.show`."""


class Lines(Silent):
    """A line whenever a row begins or ends something: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}

    def show(self, row: str, state: str, done: int = 0, total: int = 0) -> None:
        """See `Display.show`."""
        line = f"{state}: {total} of {total}" if total and done >= total else state
        if self._said.get(row) != line:
            self._said[row] = line
            self._console.print(f"{row:9} {line}", markup=False, highlight=False, soft_wrap=True)


class Bars(Silent):
    """A progress bar a row, gone when the work is done."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[row]:9}", markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._rows: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, row: str, state: str, done: int = 0, total: int = 0) -> None:
        """See `Display.show`."""
        if row not in self._rows:
            self._rows[row] = self._progress.add_task(state, total=total or None, row=row)
        self._progress.update(self._rows[row], description=state, completed=done, total=total or None)
