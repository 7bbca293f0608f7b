"""One model on several processes: rank 0 decides, and all ranks compute their share of each step.

Read it in this order:

    sharding          a tensor parallel rank's share of a model: split rows or columns of planned modules
    group             sums over the ranks: torch.distributed's gloo, or NCCL on CUDA
    joining           the checks before ranks join, a rank's share of the model and its part of the cache
    peers             the other ranks' processes: started by rank 0, or by torchrun
    leader, watch     rank 0: sends steps; finds out why a rank ended, and ends the others
    follower          the other ranks: receive steps and carry them out
    sharing           objects of tiers in memory that all ranks of a machine map

Messages between rank 0 (>) and another rank (<), in this order (`blockyard.wire`):

    > start     the model and the rank's number (only to processes that rank 0 started)
    < hello     the rank's versions, model and sizes
    > welcome   join
    > settings  sizes of the cache
    < ready     the rank is set up
    > step, swap    a plan, all of them in one chain (`wire.plans`)
    > ping, < pong  sign of life, at any time
    < failed    why the rank ends
    > close     end; with the reason after a failure
"""
