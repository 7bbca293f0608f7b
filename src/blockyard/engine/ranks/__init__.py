"""One model over several processes (tensor parallel): rank 0 decides, all ranks compute their share of each step.

Read it in this order:

    plans, linear, sharding  a rank's share of a model: the modules that its own plan splits, by rows or columns
    group                    sums over the ranks: torch.distributed's gloo, or NCCL on CUDA
    channel, step_message    what rank 0 says: messages, and a step as bytes that each rank checks against all before
    identity, joining        what ranks must have in common, and a rank's way into the group, tried
    settings                 what rank 0 says of the cache, and a rank's tensors and runner made from it
    peers                    where the other ranks come from: processes of our own (processes), or torchrun's (torchrun)
    leader, watch            rank 0: sends steps; why a rank ended, in a sentence, and the end of the others
    follower, worker         the other ranks: receive steps, carry them out
"""
