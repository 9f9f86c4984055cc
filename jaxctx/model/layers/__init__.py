"""The layers that decoders are made of, in Flax NNX. Attributes have the names of the tensors in checkpoints.

    linear.py         products with a weight, and their biases
    norm.py           root mean square norms
    rope.py           rotary position embeddings
    attention.py      projections before and after attention
    feed_forward.py   the gated feed-forward block
    experts.py        a router, and the experts that a row takes
    decoder_layer.py  attention and feed-forward, normalised and added to the residual stream

Each is made from its sizes and a `Create`, which decides what a parameter's value is.
"""
