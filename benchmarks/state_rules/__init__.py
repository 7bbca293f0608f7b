"""Rules for the states of hybrid models, on a trace: what they hit, beside a bound that no cache passes."""
