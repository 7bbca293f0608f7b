"""The lab: traces of production and of generators, replayed through the manager.

Read it in this order:

    trace          what a trace is: requests, and the names of their prompts' blocks
    traces         readers and generators
"""
