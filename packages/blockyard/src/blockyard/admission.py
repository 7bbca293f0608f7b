"""Waiting requests and the order of admission: `from blockyard.admission import AdmissionRule`.

`KVCacheManager.waiting` and `BlockPool.waiting` make the queue. docs/admission.md explains when to use it.
"""

from .core.waiting.queue import WaitingQueue
from .core.waiting.rule import AdmissionRule

__all__ = ["AdmissionRule", "WaitingQueue"]
