"""Independent runs on several processes of this machine, or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from blockyard.arguments import require_int
from blockyard.errors import BlockyardError, InvalidArgument, MissingExtra

Result = TypeVar("Result")
MAX_JOBS = 4096
#: Where runs may execute; "ray" and "dask" are joblib backends.
BACKENDS = ("processes", "ray", "dask")


class WorkerDied(BlockyardError):
    """A worker process ended before it had a result."""


def run_all(
    function: Callable[..., Result],
    cells: Sequence[tuple[Any, ...]],
    *,
    jobs: int = 1,
    backend: str = "processes",
    on_done: Callable[[int], None] | None = None,
) -> list[Result]:
    """Return `function(*cell)` for every cell, in order.

    Args:
        function: a function that can be pickled.
        cells: its arguments. Large arrays are shared between processes through the file system.
        jobs: number of processes; 1 runs everything here, without joblib.
        backend: "processes", or the cluster that joblib uses: "ray" starts a local Ray if none runs, "dask" needs a
            connected client.
        on_done: called with the number of results so far.

    Raises:
        MissingExtra: if joblib, ray or dask is not installed.
        WorkerDied: if a process ends early.
    """
    require_int("jobs", jobs, 1, MAX_JOBS)
    require_backend(backend)
    if backend == "processes" and jobs == 1:
        return list(_counted((function(*cell) for cell in cells), on_done))
    try:
        import joblib
    except ImportError as error:
        raise MissingExtra("jobs above 1 need joblib: pip install 'blockyard[lab]', or use --jobs 1") from error
    with _configured(joblib, backend, jobs):
        # As a generator where possible, so that progress shows while the others run.
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator" if backend == "processes" else "list")
        with _deaths_as_errors():
            return list(_counted(parallel(joblib.delayed(function)(*cell) for cell in cells), on_done))


def require_backend(backend: str) -> None:
    """Raise `InvalidArgument` unless `backend` is one of `BACKENDS`."""
    if backend not in BACKENDS:
        raise InvalidArgument(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")


def _counted(results: Iterable[Result], on_done: Callable[[int], None] | None) -> Iterator[Result]:
    for number, result in enumerate(results, 1):
        if on_done is not None:
            on_done(number)
        yield result


def _configured(joblib: Any, backend: str, jobs: int) -> AbstractContextManager[Any]:
    if backend == "processes":
        return nullcontext()
    if backend == "ray":
        try:
            from ray.util.joblib import register_ray
        except ImportError as error:
            raise MissingExtra(f"backend ray needs {error.name}: pip install ray") from error
        register_ray()
    try:
        config: AbstractContextManager[Any] = joblib.parallel_config(backend=backend, n_jobs=jobs)
    except ValueError as error:  # from joblib, for dask without its package or a client
        raise MissingExtra(f"backend {backend} cannot be used: {error}") from error
    return config


@contextmanager
def _deaths_as_errors() -> Iterator[None]:
    """Turn the death of a worker (killed for its memory, or by a policy's code) into `WorkerDied`."""
    try:
        yield
    except BrokenExecutor as error:
        raise WorkerDied("a worker process was killed, for its memory or by a policy's code: try fewer jobs") from error
