"""Replays a trace through the real manager.

Read it in this order:

    expansion                     turns a request into tokens that the manager can hash
    timeline                      counts per span of time, in bounded memory
    result                        the result of a replay, and the causes of its misses
    timed                         requests by their timestamps, batched, with modelled step times
    runner                        options, and replays one request after another or timed
    reservation                   the same requests with contiguous memory and with paged memory
    timeline_page                 timed replays as a page
    tier_result, tiers            replays with tiers below the pool
"""

from .reservation import Reservation, compare_reservations
from .result import ReplayResult
from .runner import ReplayOptions, replay
from .timed import ServiceModel
from .timeline import Timeline

__all__ = ["ReplayOptions", "ReplayResult", "Reservation", "ServiceModel", "Timeline", "compare_reservations", "replay"]
