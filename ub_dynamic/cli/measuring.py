# SPDX-License-Identifier: Apache-2.0
"""What `bench` and `tune` share: their options, a progress bar fed by the ranks, and how a run that fails ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..bench.asked import check_asked
from ..bench.benches import BENCHES
from ..bench.operations import GEMMS, any_method_multiple, buckets
from ..bench.start import Ended, mode_of, run
from ..bench.worlds import BackendName
from ..errors import UBDynamicError
from ..groups import default_timeout_s
from ..seconds import environment_seconds
from ..testing.one_gpu import TIMED_OUT, exit_status, signals_as_exit
from .files import refuse

START_S = 150.0  # what starting ranks, imports and one cell more than planned may take

Backend = Annotated[str, typer.Option(help="host: CPU ranks over MPI; te: Transformer Engine on GPUs")]
Ranks = Annotated[int, typer.Option(min=2, help="Ranks, one TP group: tp")]
Hidden = Annotated[int | None, typer.Option(min=8, help="H; default 4096 on GPUs, 256 on the host")]
Ffn = Annotated[int | None, typer.Option(min=8, help="Features between fc1 and fc2; default 4 H")]
TOKENS = "T: 512:16384 (powers of two between, and both ends) or 512,1024,4096, each rounded to a valid T"
Tokens = Annotated[str | None, typer.Option(help=f"{TOKENS}; default 512:16384 on GPUs, 64:512 on the host")]
_WHOLE = re.compile("[0-9]{1,18}")  # str.isdigit takes digits that int does not
SECONDS = (
    "Time to measure in, without starting the ranks; every arm takes its least number of turns in any case. "
    f"The ranks are ended {START_S:g} s later (UB_DYNAMIC_BENCH_START_S)."
)
Seconds = Annotated[float, typer.Option(min=1, help=SECONDS)]


def check_backend(name: str) -> BackendName:
    """``name`` as a backend, or a usage error."""
    if name not in ("host", "te"):
        refuse("--backend", f"{name!r} is neither host nor te")
    return cast(BackendName, name)


def checked(title: str, name: str, options: Mapping[str, Any], backend: BackendName, ranks: int) -> None:
    """Refuse, before any rank is started, what the measurement ``name`` could not do with these options."""
    try:
        check_asked(name, options, backend, ranks)
    except (UBDynamicError, OSError) as error:
        refuse(title, error)


def sizes(backend: str, hidden: int | None, ffn: int | None) -> tuple[int, int]:
    """H and ffn, with the defaults of the backend."""
    chosen = hidden or (4096 if backend == "te" else 256)
    return chosen, ffn or 4 * chosen


def token_range(text: str | None, backend: str) -> tuple[int, int]:
    """The ends of ``FIRST:LAST``."""
    words = (text or ("512:16384" if backend == "te" else "64:512")).split(":")
    if len(words) != 2 or not all(_WHOLE.fullmatch(word.strip()) for word in words):
        refuse("--tokens", f"{text!r} is not FIRST:LAST in the digits 0 to 9, as in 512:16384")
    return int(words[0]), int(words[1])


def token_list(text: str | None, backend: str, tp: int, hidden: int) -> list[int]:
    """Every T of ``FIRST:LAST`` or of a list, each rounded up (``LAST`` down) to a T that every method takes."""
    multiple = any_method_multiple(hidden, tp)
    if text is None or ":" in text:
        try:
            return list(buckets(*token_range(text, backend), multiple))
        except UBDynamicError as error:
            refuse("--tokens", error)
    words = [word for word in text.replace(",", " ").split() if word]
    if not words:
        refuse("--tokens", f"{text!r} holds no T: it is a list, as in 512,1024")
    for word in words:
        if not _WHOLE.fullmatch(word):
            refuse("--tokens", f"{word!r} of {text!r} is not a T in the digits 0 to 9, as in 512,1024")
        if int(word) < 1:
            refuse("--tokens", f"T = {word} must be positive; the next valid value is {multiple}")
    return sorted({-(-int(word) // multiple) * multiple for word in words})


def names(text: str | None, known: Mapping[str, Any] | tuple[str, ...], option: str) -> list[str]:
    """A list of words, each of which is known; all of them without one."""
    chosen = [word for word in (",".join(known) if text is None else text).replace(",", " ").split() if word]
    for word in chosen:
        one_of(word, known, option)
    if not chosen:
        refuse(option, f"{text!r} names nothing; it takes {', '.join(known)}")
    return list(dict.fromkeys(chosen))


def one_of(word: str, known: Mapping[str, Any] | tuple[str, ...], option: str) -> str:
    """``word``, which has to be known."""
    if word not in known:
        refuse(option, f"{word!r} is not one of {', '.join(known)}")
    return word


def gemm_names(text: str | None) -> list[str]:
    """Names of GEMMs; all of them without one."""
    return names(text, GEMMS, "--gemms")


def _ending(status: int, seconds: float, limit: float) -> str:
    if status != TIMED_OUT:
        return f"the ranks ended with status {status}"
    return (
        f"the ranks were ended after {limit:g} s: {seconds:g} s to measure in (--seconds, where the command has it), "
        f"{limit - seconds:g} s to start in (UB_DYNAMIC_BENCH_START_S)"
    )


class Watched:
    """A run with a progress bar; what cannot be compared here is said above it, each row goes to ``on_row``."""

    def __init__(self, title: str, on_row: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self.console, self._title, self._on_row = Console(), title, on_row
        self.refused: list[str] = []
        self.exit_status = 0
        self.interrupted = False
        self._events: list[Mapping[str, Any]] = []

    def run(self, name: str, options: Mapping[str, Any], backend: BackendName, ranks: int, seconds: float) -> Ended:
        """Measure, or exit: 2 for what cannot be measured here; without any row 130 after Ctrl-C, 128 + N after signal
        N, 1 if a rank failed. With rows the caller keeps them, and ends with ``exit_status``."""
        try:
            limit = seconds + environment_seconds("UB_DYNAMIC_BENCH_START_S", START_S)
            default_timeout_s()  # which every rank reads
            mode = mode_of(backend, ranks)
            self.console.print(f"[bold]{self._title}[/] on {mode}", highlight=False)
            with self._progress() as progress:
                self._task = progress.add_task("starting the ranks", total=None)
                self._bar = progress
                job = {"bench": name, "options": dict(options)}
                with signals_as_exit():  # the ranks end with this process, as with Ctrl-C
                    ended = run(job, backend, ranks, limit, self._take, env=BENCHES[name].env)
        except UBDynamicError as error:
            typer.echo(f"{self._title}: {error}", err=True)
            raise typer.Exit(2) from error
        except (KeyboardInterrupt, SystemExit) as signalled:
            return self._ended_by_signal(exit_status(signalled))
        except OSError as error:
            typer.echo(f"{self._title}: {error}", err=True)
            raise typer.Exit(1) from error
        if ended.status:
            typer.echo(f"{self._title}: {_ending(ended.status, seconds, limit)}\n{ended.output}", err=True)
            self.exit_status = 1
            if not ended.rows:
                raise typer.Exit(1)
        return ended

    def _ended_by_signal(self, status: int) -> Ended:
        """What the ranks said until then: the reader has passed all of it on when the signal gets here."""
        ended = Ended(status, tuple(self._events), "")
        kept = f"; rows that were measured: {len(ended.rows)}" if ended.rows else ""
        typer.echo(f"{self._title}: ended early; nothing is left running{kept}", err=True)
        self.exit_status, self.interrupted = status, True
        if not ended.rows:
            raise typer.Exit(status)
        return ended

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )

    def _take(self, event: Mapping[str, Any]) -> None:
        self._events.append(event)
        if "progress" in event:
            said = event["progress"]
            self._bar.update(self._task, completed=said["done"], total=said["total"], description=said["text"])
        elif "refused" in event:
            self.refused.append(event["refused"])
            self.console.print(f"[yellow]left out:[/] {event['refused']}", highlight=False)
        elif "row" in event and self._on_row is not None:
            self._on_row(event["row"])
