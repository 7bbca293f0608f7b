"""Synthetic traces of any length, determined by a seed, in bounded memory.

Read it in this order:

    generator           the base class; options with limits
    draws               random lengths, popularities and arrivals; texts that many prompts share as their beginning
    conversations       prompts that grow turn by turn: Chat, Agents
    system              questions after shared system prompts: System, Bursts
    coding, rag, scan, mix
                        one kind of load each
    hostile             loads that mislead learning policies: Trap, Memoryless, Turns
"""

from __future__ import annotations

from .coding import Coding
from .conversations import Agents, Chat
from .generator import Generator
from .hostile import Memoryless, Trap, Turns
from .mix import Mix
from .rag import Rag
from .scan import Scan
from .system import Bursts, System

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
