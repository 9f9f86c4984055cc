"""Model: Flax decoder, weights, text and sampling. Does not know what a context or a page is."""
