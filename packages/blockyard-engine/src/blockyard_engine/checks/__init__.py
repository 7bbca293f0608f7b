"""Whether a model can be served: what its config, cache and masks ask for, and a trial against its own forward.

    config    what a config asks for that the engine does not compute
    masks     what transformers' own cache keeps and what each layer's mask hides, against the window that it names
    small     a small copy of a model, with random weights
    trial     the engine's logits against the model's own: in chunks, in a batch, behind a prefix hit

`probe` runs them, in this order, when an engine is made.
"""
