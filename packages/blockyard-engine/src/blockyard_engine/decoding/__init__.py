"""From logits to text: the choice of tokens, guesses ahead of the model, and text that is certain."""
