"""Hit rate against capacity: counted, and shown as a picture or a page.

Read it in this order:

    hit_rates                         every policy at every size, and where the curve bends
    side_by_side                      several traces in one picture; colours and dashes of policies
    words                             what is said of curves, and claimed for policies
    drawing, sheet, labels, picture   the picture: PNG or SVG
    page                              the page with hover
"""

from .hit_rates import HitCurves, Knee, count_hits, hit_curves, lru_hits
from .side_by_side import put_together

__all__ = ["HitCurves", "Knee", "count_hits", "hit_curves", "lru_hits", "put_together"]
