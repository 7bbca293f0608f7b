"""What a cache tells Prometheus: `CacheCollector`, for any registry of prometheus_client.

    from blockyard.metrics import CacheCollector

    prometheus_client.REGISTRY.register(CacheCollector(cache))

Read it in this order:

    reading      the numbers of one cache at one moment
    families     what each is called, and what it means
    collector    what a registry asks
    tenants      tokens by tenant, the largest few by name
    publishing   a publisher of KV events
    shipped      a dashboard for Grafana and alerts for Prometheus

Needs prometheus_client: `pip install 'blockyard[metrics]'`.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import MissingExtra

try:
    import prometheus_client as _prometheus_client  # noqa: F401  # asked for here, so that its absence is one sentence
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
    """Return where the Grafana dashboard is, to import: of the cache, and of the requests of a server. O(1)."""
    return _DATA / "dashboard.json"


def alert_rules_path() -> Path:
    """Return where the alert rules are, for `rule_files` in the config of Prometheus. O(1)."""
    return _DATA / "alerts.yml"
