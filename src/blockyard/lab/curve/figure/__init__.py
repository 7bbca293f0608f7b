"""The picture of hit-rate curves, by matplotlib's objects: no pyplot, and no settings that outlive a call.

Read it in this order:

    sheet          the figure, its axes and ticks, and text that is never mathematics
    curves         lines, bands, the shaded gap, the infinite cache; below them the points above LRU
    labels         names at the ends of lines, kept apart, and the knee with its sentence
    picture        all of it, as the bytes of a file
"""
