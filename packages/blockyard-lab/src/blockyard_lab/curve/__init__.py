"""Hit rate against capacity, as numbers, a picture or a page.

Read it in this order:

    curves                            the result: hit rates by policy and size; its table, JSON and claims
    hit_rates                         runs every policy at every size and finds the knee
    side_by_side                      several traces in one picture; colours and dashes of policies
    captions                          texts of pictures and pages
    drawing, sheet, labels, picture   the picture: PNG or SVG
    curve_page                        the interactive page
"""

from .curves import Claim, HitCurves, Knee
from .hit_rates import count_hits, hit_curves, lru_hits
from .side_by_side import combine_curves

__all__ = ["Claim", "HitCurves", "Knee", "combine_curves", "count_hits", "hit_curves", "lru_hits"]
