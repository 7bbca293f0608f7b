"""One model over several processes (tensor parallel): rank 0 decides, all ranks compute their share of each step.

Read it in this order:

    sharding          a rank's share of a model: the modules that its own plan splits, by rows or columns
    group             sums over the ranks: torch.distributed's gloo, or NCCL on CUDA
    joining           what ranks must have in common, a rank's way into the group, its part of the cache
    peers             where the other ranks come from: processes of our own, or torchrun's
    leader, watch     rank 0: sends steps; why a rank ended, in a sentence, and the end of the others
    follower          the other ranks: receive steps, carry them out

What rank 0 (>) and another rank (<) say, in this order, as messages of `blockyard.wire`:

    > start     which model, as which rank (processes of our own alone)
    < hello     what the rank has
    > welcome   join
    > settings  the cache
    < ready     everything is made
    > step, swap    a plan, in one chain of all of them (`wire.plans`)
    > ping, < pong  whether the rank is there, at any time
    < failed    why the rank ends
    > close     end; it says why, if something is wrong
"""
