"""How many blocks an engine takes: what a device has left beside the weights and the largest step, which is run to see.

meter           what a device's memory holds while something runs on it
largest_step    the step to run, over a cache of two blocks
account         the sum: how many blocks fit, and what the engine says of it
finding         all of it together
"""
