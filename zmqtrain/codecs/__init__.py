"""How an array shrinks: codecs of pure functions, the payloads they fill, and the fragments a model is cut into."""
