"""A trace through the real manager.

Read it in this order:

    expansion        from a request to tokens that the manager can hash
    result           what a replay found, and why prompt tokens did not hit
    timeline         what happened when
    timed            requests by their timestamps, in batches, under a model of an engine's speed
    run              one request after another, or timed
    reservation      the same requests with memory reserved in one piece, and paged
"""

from .reservation import Reservation, compare_reservations
from .result import ReplayResult
from .run import ReplayOptions, replay
from .timed import ServiceModel
from .timeline import Timeline

__all__ = ["ReplayOptions", "ReplayResult", "Reservation", "ServiceModel", "Timeline", "compare_reservations", "replay"]
