"""Where requests come from: files of production, and generators."""
