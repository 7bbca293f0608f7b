"""A page that shows the blocks of a running cache: a map of the pool, requests, a timeline, a tree of prompts.

    from blockyard_serve.live import CallQueue, LivePage

    calls = CallQueue(cache)   # the thread that owns the cache calls calls.run() between two steps
    app = LivePage(calls)      # an ASGI application, for a server in another thread

`blockyard serve` has it under /ui (docs/page.md). Reading order; a file needs only those above it:

    call_queue    calls from other threads, run by the cache's owner between two steps
    snapshot      a copy of the cache's counts and block tables
    cells         states of blocks; at most a few thousand cells for a pool of any size
    frames        one moment on the wire, whole or as a change since the previous one
    prompt_log    the latest prompts, and their hits of a block
    tree          the tree of cached prompts, and the latest prompts' hits
    details       one block, or a run of blocks, on request
    feed          one sampler for all readers, at a bounded rate
    live_page     the ASGI application
"""

from .call_queue import CacheSource, CallQueue, EngineStatus
from .live_page import LivePage

__all__ = ["CacheSource", "CallQueue", "EngineStatus", "LivePage"]
