"""Where keys and values are: in the blocks that are hashed, or, with layer groups, in blocks below them."""
