"""The picture of hit-rate curves, by matplotlib's objects: no pyplot, and no settings that outlive a call.

Read it in this order:

    sheet          the figure, its axes, and text that is never mathematics
    frame          axes, ticks and the words around them
    curves         lines, bands, the shaded gap, the infinite cache
    differences    a second pair of axes below: points above LRU
    end_labels     names at the ends of lines; label_places keeps them apart
    knee_mark      the knee, and its sentence where there is room
    picture        all of it, as the bytes of a file
"""
