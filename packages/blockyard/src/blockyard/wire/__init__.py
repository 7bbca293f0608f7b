"""What Blockyard's processes say to one another: one kind of message, one connection.

message      a kind, fields, arrays of integers, and a digest over all of it; a chain of them, with numbers
connection   whole messages in order over a socket, with time limits
plans        the plan of each step, from the process that decides to those that carry out

Who may refuse a message, and why. A message is checked as a whole before any of it is believed:

    reader                    refuses                                          raises            what stays
    SocketConnection          a length above 4 GiB; a message that breaks off  ConnectionLost    the connection is over
    Message.of                what is no message, or was changed on its way    InvalidArgument   all
    Message.of                another version of the protocol                  PeerMismatch      all
    Chain.require_next        one missed, doubled, or of another history       DivergedRank      all
    PlanReceiver.from_bytes   a plan of another shape, or of blocks not there  InvalidArgument   all, the tables too
    blockyard_engine.ranks    any of these                                     RankError         the rank ends
    blockyard_engine.parallel any of the first three; silence                  HandoffError      the cache; no transfer
    blockyard_engine.parallel an offer of a peer not known, or of before       PeerMismatch,     all: no block was taken
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
