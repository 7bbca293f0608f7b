"""Traces that are made: endless variety from a seed, in bounded memory.

Read it in this order:

    options        a generator's options, with limits and units
    draws          random lengths, popularities and arrivals, a batch at a time; texts that many prompts begin with
    talks          conversations whose prompts grow by what was said: Chat, Agents
    system         questions under shared prompts: System, Bursts
    coding, rag, scan, mix
                   one kind of load each
    hostile        trap, memoryless, turns: loads that policies which learn are wrong on
"""

from __future__ import annotations

from .coding import Coding
from .hostile import Memoryless, Trap, Turns
from .mix import Mix
from .options import Generator
from .rag import Rag
from .scan import Scan
from .system import Bursts, System
from .talks import Agents, Chat

__all__ = [
    "Agents",
    "Bursts",
    "Chat",
    "Coding",
    "Generator",
    "Memoryless",
    "Mix",
    "Rag",
    "Scan",
    "System",
    "Trap",
    "Turns",
]

#: Every generator by its name.
GENERATORS: dict[str, type[Generator]] = {
    "chat": Chat,
    "system": System,
    "agents": Agents,
    "rag": Rag,
    "scan": Scan,
    "bursts": Bursts,
    "mix": Mix,
    "coding": Coding,
    "trap": Trap,
    "memoryless": Memoryless,
    "turns": Turns,
}
