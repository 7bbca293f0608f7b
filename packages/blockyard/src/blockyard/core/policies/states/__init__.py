"""Choice of checkpoint positions in prompts, and of the checkpoints to drop first."""
