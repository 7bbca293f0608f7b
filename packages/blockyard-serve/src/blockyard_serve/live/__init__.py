"""A page that shows the blocks of a running cache as it works: a map of the pool, requests, a time line, a tree.

    from blockyard_serve.live import Desk, LivePage

    desk = Desk(cache)         # the thread that owns the cache calls desk.answer() between two steps
    app = LivePage(desk)       # an ASGI application, for any server in any other thread

`blockyard serve` has it under /ui (docs/page.md). Read it in this order; a file needs only those before it:

    desk          how another thread asks something of a cache between two steps
    snapshot      what is copied there: counts and block tables, nothing is formatted
    cells         what each block is; blocks to cells, at most a few thousand however large the pool is
    frames        one moment on the wire with its sequences, whole or as what changed since the moment before
    prompts       the latest prompts that were answered
    forest        what is cached, as branches, from who follows whom
    tree          the heaviest of them, and what of them the latest prompts hit
    hits          which of the latest prompts hit a block
    details       one block, one run of blocks: asked for when the reader points at it
    feed          one sampler for all who watch, at a bounded rate
    page          the paths, and what a browser is told that it may do
"""

from .desk import Desk, Source, Surroundings
from .page import LivePage

__all__ = ["Desk", "LivePage", "Source", "Surroundings"]
