"""What ships to graph and watch the metrics: files to hand to Grafana and Prometheus."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data"


def dashboard_path() -> Path:
    """Where the Grafana dashboard is, to import: of the cache, and of the requests of a server. O(1)."""
    return _DATA / "dashboard.json"


def alert_rules_path() -> Path:
    """Where the alert rules are, for `rule_files` in the config of Prometheus. O(1)."""
    return _DATA / "alerts.yml"
