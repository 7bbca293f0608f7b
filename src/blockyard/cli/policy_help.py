"""The names of policies, as help texts list them."""

from __future__ import annotations

from ..core.policies import POLICIES

POLICY_NAMES = f"{', '.join(POLICIES)}; guarded: or strict: before a name puts a floor under it"
