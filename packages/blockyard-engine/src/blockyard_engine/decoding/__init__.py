"""From logits to text: sampling, speculation and detokenization."""
