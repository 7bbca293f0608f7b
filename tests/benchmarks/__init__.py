"""What the benchmarks measure with: ageing, traces, builds in turns. No time is asserted."""
