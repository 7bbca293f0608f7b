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

from ..errors import MissingExtra

try:
    import prometheus_client as _prometheus_client  # noqa: F401  # asked for here, so that its absence is one sentence
except ImportError as error:
    raise MissingExtra("blockyard.metrics needs prometheus_client: pip install 'blockyard[metrics]'") from error

from .collector import CacheCollector
from .publishing import KVEventCollector
from .reading import BlockStates, CacheReading, PoolCounts
from .shipped import alert_rules_path, dashboard_path
from .tenants import TenantTokens, tenant_of

__all__ = [
    "BlockStates",
    "CacheCollector",
    "CacheReading",
    "KVEventCollector",
    "PoolCounts",
    "TenantTokens",
    "alert_rules_path",
    "dashboard_path",
    "tenant_of",
]
