"""Prompt tokens and hits by tenant: the largest tenants by name, the others together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ..answers import MissCauses
from ..arguments import require_int, require_str, require_unicode
from ..keys import CacheSalt, ExtraKey, LoRA

#: Most tenants shown by name.
MAX_SHOWN = 100
#: Candidates tracked per tenant shown.
_FOLLOWED_EACH = 8
#: How many times the tokens of the smallest tenant shown a candidate needs to replace it.
_MARGIN = 2
OTHER = "other"
#: Prompt tokens, and how many of them were cached.
Tokens = tuple[int, int]


def tenant_of(extra_keys: Iterable[ExtraKey]) -> str:
    """Return a label for requests that share blocks, from their adapter and salt; "none" without them. O(keys).

    A salt is a secret, so a 6-byte BLAKE2b digest of it is shown. Whoever knows or guesses the salt can recognise it.
    """
    names = []
    for key in extra_keys:
        if isinstance(key, LoRA):
            names.append(f"lora:{key.name}")
        elif isinstance(key, CacheSalt):
            names.append(f"salt:{_digest(key.value)}")
    return " ".join(names) or "none"


def _digest(secret: str) -> str:
    return hashlib.blake2b(secret.encode(), digest_size=6).hexdigest()


class TenantTokens(Collector):
    """Counts prompt tokens by tenant. Register it besides a `CacheCollector`.

    The first tenants are shown at once. A later one replaces the smallest when it has reached more than twice that
    one's tokens, and is counted from then on. However many names clients invent, a slot changes hands at most 63 times,
    memory is bounded, and no counter decreases. Candidates are tracked by the space-saving algorithm (Metwally et al.,
    2005).

    Args:
        most: tenants shown by name, 1 to 100; the others are summed as "other".
        labels: labels of all samples.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    def __init__(self, most: int = 20, labels: Mapping[str, str] | None = None) -> None:
        self._most = require_int("most", most, 1, MAX_SHOWN)
        self._labels = {
            require_str("labels", name): require_unicode(f"labels[{name!r}]", require_str(f"labels[{name!r}]", text))
            for name, text in (labels or {}).items()
        }
        self._shown: dict[str, Tokens] = {}
        #: Missed tokens by cause, of the tenants shown and of the others; empty if causes are unknown.
        self._missed: dict[str, Counter[str]] = {}
        #: Tokens of the tenants shown, including those before they were shown.
        self._weight: dict[str, int] = {}
        self._others: Tokens = (0, 0)
        #: Tokens of the tenants tracked but not shown, and how many of them may be another tenant's.
        self._candidates: dict[str, Tokens] = {}

    def count(self, tenant: str, num_prompt_tokens: int, num_hit_tokens: int, misses: MissCauses | None = None) -> None:
        """Count a prompt. O(1) for a tenant that is shown, O(most) for others.

        Args:
            tenant: label of the tenant.
            num_prompt_tokens: tokens of the prompt.
            num_hit_tokens: tokens of it that were cached.
            misses: causes of the misses, if known (`miss_causes`).
        """
        if tenant not in self._shown and len(self._shown) < self._most:
            self._show(tenant, 0)
        if misses is not None:
            self._missed.setdefault(tenant if tenant in self._shown else OTHER, Counter()).update(misses.missed)
        if tenant in self._shown:
            self._shown[tenant] = _sum(self._shown[tenant], (num_prompt_tokens, num_hit_tokens))
            self._weight[tenant] += num_prompt_tokens
        else:
            self._others = _sum(self._others, (num_prompt_tokens, num_hit_tokens))
            self._follow(tenant, num_prompt_tokens)

    def tokens(self) -> dict[str, Tokens]:
        """Return (prompt tokens, hit tokens) of each tenant shown, and of the others if there are any. O(most)."""
        found = dict(self._shown)
        return {**found, OTHER: self._others} if any(self._others) else found

    def missed(self) -> dict[str, dict[str, int]]:
        """Return the missed tokens by tenant and cause (`MissCauses.missed`); {} if causes are unknown. O(most)."""
        return {tenant: dict(causes) for tenant, causes in dict(self._missed).items()}

    def collect(self) -> Iterable[Metric]:
        """Return two counters, and a third by cause if causes are known."""
        names = [*self._labels, "tenant"]
        asked = CounterMetricFamily("blockyard:tenant_prompt_tokens", "Prompt tokens by tenant.", labels=names)
        found = CounterMetricFamily("blockyard:tenant_hit_tokens", "Prompt tokens found, by tenant.", labels=names)
        for tenant, (num_prompt, num_hit) in self.tokens().items():
            asked.add_metric([*self._labels.values(), tenant], num_prompt)
            found.add_metric([*self._labels.values(), tenant], num_hit)
        return [asked, found, *self._by_cause()]

    def _by_cause(self) -> list[Metric]:
        names = [*self._labels, "cause", "tenant"]
        missed = CounterMetricFamily("blockyard:tenant_missed_tokens", "Prompt tokens missed, by cause.", labels=names)
        for tenant, causes in self.missed().items():
            for cause, number in causes.items():
                missed.add_metric([*self._labels.values(), cause, tenant], number)
        return [missed] if missed.samples else []

    def _show(self, tenant: str, weight: int) -> None:
        self._shown[tenant] = (0, 0)
        self._weight[tenant] = weight

    def _follow(self, tenant: str, num_tokens: int) -> None:
        """Count a candidate. It replaces the smallest tenant shown once it certainly has twice its tokens."""
        candidates = self._candidates
        if tenant not in candidates:
            least = 0
            if len(candidates) >= _FOLLOWED_EACH * self._most:
                least = candidates.pop(min(candidates, key=lambda name: candidates[name][0]))[0]
            candidates[tenant] = (least, least)
        total, error = candidates[tenant] = _sum(candidates[tenant], (num_tokens, 0))
        smallest = min(self._weight, key=self._weight.__getitem__)
        if total - error > _MARGIN * self._weight[smallest]:
            del candidates[tenant], self._shown[smallest], self._weight[smallest]
            self._missed.pop(smallest, None)
            self._show(tenant, total - error)


def _sum(one: Tokens, other: Tokens) -> Tokens:
    return one[0] + other[0], one[1] + other[1]
