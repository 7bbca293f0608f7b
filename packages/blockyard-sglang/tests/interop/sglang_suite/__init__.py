"""SGLang's own unit tests of its radix cache, stock and on Blockyard."""
