"""Deploys a fleet on Ray Serve, on a local Ray whose processes all stop with the command."""

from __future__ import annotations

import http.client
import logging
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.errors import MissingExtra, ModelError

from ..jobs.served_model import ServedModel
from .leftovers import MARK, CleanupProcess
from .replica import EngineReplica, ReplicaPlan

if TYPE_CHECKING:
    from .app import IngressPlan
    from .dispatcher import RoutingPolicy

APPLICATION, ENGINE, INGRESS = "blockyard", "engine", "ingress"
#: Size of Ray's object store, which we do not use: the minimum.
_STORE_BYTES = 80 * 2**20
#: Seconds between two health checks of a replica, and until one fails without an answer. Ray replaces a replica after
#: three failures in a row.
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 2.0, 8.0
#: Seconds over which the load is averaged, and between two reports of it.
_LOOK_BACK, _REPORT = 10.0, 2.0
#: Seconds for Ray's proxy to find the ingresses.
_PROXY_SECONDS = 60.0
#: Ray's limit of requests per ingress; `ServerLimits` has the effective one.
_MAX_ONGOING = 10_000


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Number of engines.

    Attributes:
        least: minimum.
        most: maximum; above the minimum, the number follows the load in tokens.
        token_load: target load of a replica (`TokenLoad`).
        idle_seconds: seconds of less load after which a replica is stopped.
    """

    least: int
    most: int
    token_load: float = 0.8
    idle_seconds: float = 120.0

    def options(self) -> dict[str, Any]:
        """Return the options of Ray Serve's deployment."""
        if self.most == self.least:
            return {"num_replicas": self.least}
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

        policy = AutoscalingPolicy(
            policy_function="blockyard_serve.fleet.token_load:TokenLoad", policy_kwargs={"target": self.token_load}
        )
        scaling = AutoscalingConfig(
            min_replicas=self.least,
            max_replicas=self.most,
            upscale_delay_s=_REPORT,
            downscale_delay_s=self.idle_seconds,
            look_back_period_s=_LOOK_BACK,
            metrics_interval_s=_REPORT,
            policy=policy,
        )
        return {"autoscaling_config": scaling}


def engine_application(
    plan: ReplicaPlan,
    size: FleetSize,
    policy: RoutingPolicy,
    drain_seconds: float,
    num_cpus: float,
    **more: Any,
) -> Any:
    """Return the engines as an application of Ray Serve.

    A stopping engine has `drain_seconds` to finish its answers. Ray reserves `num_cpus` for each engine. `more` are
    further options of the deployment, which take precedence.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    router = RequestRouterConfig(
        request_router_class="blockyard_serve.fleet.ray_serve.ExactRouter",
        request_router_kwargs={"cost": policy.cost, "heartbeat_timeout": policy.heartbeat_timeout},
    )
    options: dict[str, Any] = {
        "name": ENGINE,
        "max_ongoing_requests": plan.capacity,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": int(plan.device.startswith("cuda"))},
        "health_check_period_s": _HEALTH_PERIOD,
        "health_check_timeout_s": _HEALTH_TIMEOUT,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": drain_seconds,
        "max_constructor_retry_count": size.most,
        "request_router_config": router,
        "logging_config": _quiet(),
    }
    return serve.deployment(**options | size.options() | more)(EngineReplica).bind(plan)


def ingress_application(engine: Any, plan: IngressPlan, count: int, num_cpus: float) -> Any:
    """Return ingresses in front of engines as an application of Ray Serve."""
    from ray import serve

    from .ingress import Ingress

    deployment = serve.deployment(
        name=INGRESS,
        num_replicas=count,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": num_cpus},
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=plan.options.limits.request_seconds,
        logging_config=_quiet(),
    )(Ingress)
    return deployment.bind(engine, plan)


def _quiet() -> dict[str, Any]:
    return {"log_level": "ERROR", "enable_access_log": False}


@contextmanager
def local_ray(num_gpus: int) -> Iterator[Callable[[], None]]:
    """Run Ray, with ports on loopback only, during the `with` block; then stop all of its processes.

    Yields a function to call once the fleet is ready: until then, a signal ends this process at once. `leftovers`
    cleans up after that, and if the process is killed. Raises `MissingExtra` if Ray is not installed.
    """
    mark, folder = secrets.token_hex(16), Path(tempfile.mkdtemp(prefix="blockyard-fleet-"))
    _set_environment(mark)
    cleanup = CleanupProcess(mark, folder)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def is_ready() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    try:
        _leave_on(handlers)
        ray = _ray()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address="local",
                num_cpus=1,  # replicas reserve none: on this machine, memory is the limit
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=str(folder),
            )
        _leave_on(handlers)  # Ray has replaced the handler
        try:
            yield is_ready
        finally:
            ray.shutdown()
    finally:
        cleanup.close()


@contextmanager
def local_engines(plan: ReplicaPlan, size: FleetSize, policy: RoutingPolicy, drain_seconds: float) -> Iterator[Any]:
    """Run Ray and engines for an ingress in this process. Yields Ray Serve's handle and the model's sizes.

    Raises:
        MissingExtra: if Ray is not installed.
        ModelError: if a replica does not become ready; with its error.
    """
    with local_ray(_num_gpus(plan, size)) as is_ready:
        from ray import serve

        serve.start(proxy_location="Disabled", logging_config=_quiet())
        handle = _run(engine_application(plan, size, policy, drain_seconds, 0), None)
        model: ServedModel = handle.model.remote().result(timeout_s=60)
        is_ready()
        yield handle, model


@contextmanager
def local_fleet(
    plan: ReplicaPlan, size: FleetSize, ingress: IngressPlan, num_ingresses: int, num_cpus: float = 0
) -> Iterator[None]:
    """Run Ray, engines, and ingresses with Ray's HTTP proxy in front, at the host and port of `ingress`.

    At the end running requests may continue for `drain_seconds`. Raises like `local_engines`.
    """
    with local_ray(_num_gpus(plan, size)) as is_ready:
        from ray import serve

        options = ingress.options
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": options.host, "port": options.port},
            logging_config=_quiet(),
        )
        engine = engine_application(plan, size, ingress.policy, options.limits.request_seconds, num_cpus)
        _run(ingress_application(engine, ingress, num_ingresses, num_cpus), "/")
        _require_answer(options.host, options.port)
        is_ready()
        try:
            yield
        finally:
            end = threading.Thread(target=serve.delete, args=(APPLICATION,), daemon=True)
            end.start()
            end.join(options.limits.drain_seconds)


def _num_gpus(plan: ReplicaPlan, size: FleetSize) -> int:
    return size.most if plan.device.startswith("cuda") else 0


def _require_answer(host: str, port: int) -> None:
    """Wait until the proxy forwards requests. Raises `ModelError` if it does not."""
    deadline = time.monotonic() + _PROXY_SECONDS
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    while time.monotonic() < deadline:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(local, port, timeout=_PROXY_SECONDS)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            finally:
                connection.close()
        time.sleep(0.2)
    raise ModelError(f"Ray's HTTP proxy did not answer at {host}:{port} within {_PROXY_SECONDS:g} seconds")


def _leave_on(numbers: Iterable[int]) -> None:
    """End this process at once on a signal that is not ignored: stopping a half-started Ray takes long."""

    def leave(number: int, _: Any) -> None:
        print("blockyard: interrupted", file=sys.stderr, flush=True)
        os._exit(128 + number)

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def _set_environment(mark: str) -> None:
    """Set the variables that Ray reads when it is imported and started."""
    os.environ.update(
        {
            MARK: mark,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 0 means loopback addresses
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",  # other programs on this machine must not submit work
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_enable_worker_prestart": "0",
            "RAY_worker_niceness": "0",  # Ray's default of 15 lets every other process go first
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # do not wait for unhealthy ones to drain
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(_REPORT),
        }
    )


def _ray() -> Any:
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise MissingExtra(f"a fleet needs {error.name}: pip install 'blockyard[fleet,serve]'") from error
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray


def _run(application: Any, route: str | None) -> Any:
    """Start the application; return Ray Serve's handle when it is ready. Raises `ModelError`."""
    from ray import serve

    try:
        return serve.run(application, name=APPLICATION, route_prefix=route, logging_config=_quiet())
    except RuntimeError as error:
        raise ModelError(f"the replicas did not become ready: {_reason(serve.status()) or error}") from None


def _reason(status: Any) -> str:
    """Return the last line of the error of a replica that could not start."""
    application = status.applications.get(APPLICATION)
    found = [] if application is None else [each.message for each in application.deployments.values()]
    lines = [line.strip() for line in "\n".join(found).splitlines() if line.strip()]
    return re.sub(r"^blockyard\.[\w.]+: ", "", lines[-1]) if lines else ""
