"""Messages between Blockyard's processes.

message      a kind, fields, arrays of integers, and a digest of all of it; numbered chains of messages
connection   whole messages in order over a socket, with time limits
plans        the plan of each step, from the process with the cache to its ranks

A message is checked as a whole before any of it is used. Rejections:

    reader                     rejects                                      raises           remains valid
    SocketConnection           a length above 4 GiB, a truncated message    ConnectionLost   nothing: it is closed
    Message.of                 invalid or damaged bytes                     InvalidArgument  all
    Message.of                 another version of the protocol              PeerMismatch     all
    Chain.require_next         a skipped, repeated or diverging message     DivergedRank     all
    PlanReceiver.from_bytes    a plan of another shape, unknown blocks      InvalidArgument  all, tables included
    blockyard_engine.ranks     any of these                                 RankError        nothing: the rank ends
    blockyard_engine.parallel  any of the first three, a timeout            HandoffError     the cache, no transfer
    blockyard_engine.parallel  an unknown peer's offer, an ended offer      PeerMismatch,    all: no block was taken
                                                                            StaleOffer
"""

from .connection import Connection, ConnectionLost, SocketConnection
from .message import VERSION, Message, pack, read

__all__ = [
    "VERSION",
    "Connection",
    "ConnectionLost",
    "Message",
    "SocketConnection",
    "pack",
    "read",
]
