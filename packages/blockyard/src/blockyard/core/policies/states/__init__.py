"""Which checkpoint positions a prompt has, and which checkpoints are dropped first."""
