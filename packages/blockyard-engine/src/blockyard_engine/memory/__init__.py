"""The size of an engine's pool of blocks.

account        memory use in bytes, and the blocks that fit
largest_step   the largest step, run to measure its memory
pool_sizing    the size of the pool, measured on a GPU, computed on a CPU
"""
