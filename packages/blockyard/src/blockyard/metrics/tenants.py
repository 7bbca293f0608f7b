"""Whose prompts hit: tokens by tenant, the largest few by name and all others together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ..answers import MissCauses
from ..arguments import require_int, require_str, require_unicode
from ..keys import CacheSalt, ExtraKey, LoRA

#: Largest number of tenants that are shown by name.
MAX_SHOWN = 100
#: Candidates that are followed for each tenant that is shown.
_FOLLOWED_EACH = 8
#: How much larger a tenant must be than the smallest that is shown, to take its place.
_MARGIN = 2
OTHER = "other"
#: Prompt tokens, and those of them that the cache had.
Tokens = tuple[int, int]


def tenant_of(extra_keys: Iterable[ExtraKey]) -> str:
    """Return a name for those who share blocks: of the adapter and the salt; "none" without them. O(keys).

    A salt is a secret, so its name is a BLAKE2b digest of it, of 6 bytes. A reader who has the salt, or
    guesses it, can tell which it is.
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
    """Counts prompt tokens by tenant and shows them to a registry; register it beside a `CacheCollector`.

    most: tenants that are shown by name, 1 to 100; the others are one, "other". labels: of all samples, by name.

    The first tenants are shown at once. A later one takes the place of the smallest when it has come to more than twice
    its tokens, and is counted from then on. However many names clients make up, a place changes hands at most 63 times,
    memory is bounded, and no counter goes back. Candidates are followed by the space-saving algorithm (Metwally et al.,
    2005). Raises `InvalidArgument` for a number outside its limits.
    """

    def __init__(self, most: int = 20, labels: Mapping[str, str] | None = None) -> None:
        self._most = require_int("most", most, 1, MAX_SHOWN)
        self._labels = {
            require_str("labels", name): require_unicode(f"labels[{name!r}]", require_str(f"labels[{name!r}]", text))
            for name, text in (labels or {}).items()
        }
        self._shown: dict[str, Tokens] = {}
        #: Tokens not found of those shown and of the others, by cause; empty where no causes are told.
        self._missed: dict[str, Counter[str]] = {}
        #: Tokens of those shown, what they had before included.
        self._weight: dict[str, int] = {}
        self._others: Tokens = (0, 0)
        #: Tokens of a tenant that is not shown, and how many of them may have been another's.
        self._candidates: dict[str, Tokens] = {}

    def count(self, tenant: str, num_prompt_tokens: int, num_hit_tokens: int, misses: MissCauses | None = None) -> None:
        """Count a prompt of a tenant. misses: why it had no more, where that is known (`miss_causes`).

        O(1) for one that is shown, O(most) for others.
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
        """(prompt tokens, hit tokens) of each tenant that is shown, and of the others if there are any. O(most)."""
        found = dict(self._shown)
        return {**found, OTHER: self._others} if any(self._others) else found

    def missed(self) -> dict[str, dict[str, int]]:
        """Tokens not found of each tenant that is shown, and of the others, by cause; {} where no causes were told.

        The causes are those of `MissCauses.missed`. O(most).
        """
        return {tenant: dict(causes) for tenant, causes in dict(self._missed).items()}

    def collect(self) -> Iterable[Metric]:
        """Yield two counters, and a third one by cause where causes were told."""
        names = [*self._labels, "tenant"]
        asked = CounterMetricFamily("blockyard:tenant_prompt_tokens", "Prompt tokens by tenant.", labels=names)
        found = CounterMetricFamily("blockyard:tenant_hit_tokens", "Those that the cache had.", labels=names)
        for tenant, (num_prompt, num_hit) in self.tokens().items():
            asked.add_metric([*self._labels.values(), tenant], num_prompt)
            found.add_metric([*self._labels.values(), tenant], num_hit)
        return [asked, found, *self._by_cause()]

    def _by_cause(self) -> list[Metric]:
        names = [*self._labels, "cause", "tenant"]
        missed = CounterMetricFamily("blockyard:tenant_missed_tokens", "Those that it had not, by cause.", labels=names)
        for tenant, causes in self.missed().items():
            for cause, number in causes.items():
                missed.add_metric([*self._labels.values(), cause, tenant], number)
        return [missed] if missed.samples else []

    def _show(self, tenant: str, weight: int) -> None:
        self._shown[tenant] = (0, 0)
        self._weight[tenant] = weight

    def _follow(self, tenant: str, num_tokens: int) -> None:
        """Count a candidate; where it has certainly twice the tokens of the smallest that is shown, they change."""
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
