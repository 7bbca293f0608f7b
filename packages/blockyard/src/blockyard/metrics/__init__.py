"""Prometheus metrics of a cache: `CacheCollector`, for any registry of prometheus_client.

    from blockyard.metrics import CacheCollector

    prometheus_client.REGISTRY.register(CacheCollector(cache))

Read it in this order:

    reading      the numbers of a cache at one moment
    families     names and help texts of the metrics
    collector    collectors for a cache and for a publisher of KV events
    tenants      tokens by tenant, the largest ones by name
    data         a dashboard for Grafana and alert rules for Prometheus

Needs prometheus_client: `pip install 'blockyard[metrics]'`.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import MissingExtra

try:
    import prometheus_client as _prometheus_client  # noqa: F401  # so that a missing package is one clear error
except ImportError as error:
    raise MissingExtra("blockyard.metrics needs prometheus_client: pip install 'blockyard[metrics]'") from error

from .collector import CacheCollector, KVEventCollector
from .families import share_metrics
from .reading import BlockStates, CacheReading, PoolCounts
from .tenants import MAX_SHOWN, TenantTokens, tenant_of

__all__ = [
    "MAX_SHOWN",
    "BlockStates",
    "CacheCollector",
    "CacheReading",
    "KVEventCollector",
    "PoolCounts",
    "TenantTokens",
    "alert_rules_path",
    "dashboard_path",
    "share_metrics",
    "tenant_of",
]


_DATA = Path(__file__).parent / "data"


def dashboard_path() -> Path:
    """Return the path of a Grafana dashboard for a cache and the requests of a server. O(1)."""
    return _DATA / "dashboard.json"


def alert_rules_path() -> Path:
    """Return the path of the alert rules, for `rule_files` in Prometheus' config. O(1)."""
    return _DATA / "alerts.yml"
