"""The lab: traces of production and of generators, replayed through the manager.

Read it in this order:

    trace, traces               what a trace is; readers and generators
    survey, references          totals of a trace; its references, numbered and sampled
    simulation                  loops over whole traces, compiled
    sizes, policy_names         sizes and policies as people write them
    curve, knee                 hit rate against capacity, and where it bends
    drawing, figure, page       the curve as a picture, and as a page with hover
    expansion, causes, measured tokens for the manager; why they did not hit; what a replay found
    replay, service             one request after another; by timestamps
    planning                    blocks, requests and hit rates from a model, GPUs and a trace
    sweep                       many runs over processes, or a cluster

`docs/lab.md` has the commands, and what their numbers mean.
"""
