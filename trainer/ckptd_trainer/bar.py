"""The progress bar of local rank 0; plain lines now and then where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_SECONDS = 10.0


class Bar:
    """A context manager. Ranks that are not the first of their host show nothing."""

    def __init__(self, total_steps: int, *, step: int, shown: bool, console: Console | None = None) -> None:
        self._console = console or Console()
        self._total, self._shown, self._last_line = total_steps, shown, float("-inf")
        self._bar: Progress | None = None
        if shown and self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=total_steps, completed=step)

    def __enter__(self) -> Bar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, epoch: int, loss: float) -> None:
        text = f"epoch {epoch} loss {loss:.4f}"
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        elif self._shown and (time.monotonic() - self._last_line >= PLAIN_LINE_EVERY_SECONDS or step == self._total):
            self._last_line = time.monotonic()
            self.say(f"step {step}/{self._total} {text}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._shown:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
